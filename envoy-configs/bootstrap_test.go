package envoyconfigs

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"flag"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"sigs.k8s.io/yaml"

	"tandem/replica/config"
)

var update = flag.Bool("update", false, "rewrite the envoy.yaml files")

// The folders are what Bootstrap renders, and run as they are.
func TestReadyToRun(t *testing.T) {
	files, err := filepath.Glob("*/tandem.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(filepath.Dir(file), func(t *testing.T) {
			c, _, err := config.Load(file)
			require.NoError(t, err)
			got, err := Bootstrap(c)
			require.NoError(t, err)
			rendered := filepath.Join(filepath.Dir(file), "envoy.yaml")
			if *update {
				require.NoError(t, os.WriteFile(rendered, got, 0o644))
			}
			want, err := os.ReadFile(rendered)
			require.NoError(t, err)
			require.Equal(t, string(want), string(got), "run go test -update")
			validate(t, got)
		})
	}
}

const pool = `
pools:
- name: a
  kvTransfer: nixl
  endpoints:
  - {address: 127.0.0.1:8101, role: prefill}
  - {address: 127.0.0.1:8201, role: decode}
`

// cases are configurations of every shape.
func cases(t *testing.T) map[string]string {
	ca := writeCertificate(t)
	return map[string]string{
		"least":                   pool,
		"traces":                  `tracing: {endpoint: "127.0.0.1:4317", sampleRatio: 0.01}` + pool,
		"traces, by name":         `tracing: {endpoint: "collector.svc:4317"}` + pool,
		"explained":               "{extProc: {decisionMetadata: true}, admin: {tokenFile: t}" + flow(),
		"IPv6":                    `envoy: {listen: "[::1]:8080", admin: "[::1]:9901", extProcs: ["[::1]:9002"], replans: ["[::1]:9003"]}` + pool,
		"everywhere":              `{extProc: {listen: "[::]:9002"}, replan: {listen: 0.0.0.0:9003}, envoy: {listen: "[::]:8080"}, pools: [{name: a, kvTransfer: none, endpoints: [{address: "x:1"}]}]}`,
		"by name":                 `envoy: {extProcs: ["tandem.svc:9002"]}` + pool,
		"by name and number":      `{envoy: {extProcs: ["10.0.0.1:9002", "b.svc:9002"]}, tickets: {keyFile: k}` + flow(),
		"three replicas":          `{envoy: {extProcs: ["10.0.0.1:9002", "10.0.0.2:9002", "10.0.0.3:9002"], replans: ["10.0.0.9:1"]}, tickets: {keyFile: k}` + flow(),
		"one replan of two":       `{envoy: {extProcs: ["10.0.0.1:9002", "10.0.0.1:9012"]}, tickets: {keyFile: k}` + flow(),
		"usage":                   "{usage: {}" + flow(),
		"usage by tenant, traced": `{usage: {tenantHeader: x-tenant, ledger: "-"}, tracing: {endpoint: "127.0.0.1:4317"}` + flow(),
		"duplex":                  "envoy: {bodyMode: duplex}" + pool,
		"buffered":                "envoy: {bodyMode: buffered, maxBodyBytes: 1048576, decodeIdleTimeout: 90s}" + pool,
		"https and h2c":           strings.Replace(strings.Replace(pool, "role: prefill", "role: prefill, scheme: https", 1), "role: decode", "role: decode, scheme: h2c", 1),
		"https, verified":         "envoy: {endpointTls: {caFile: " + ca + ", serverName: engines.example}}" + strings.Replace(pool, "role: decode", "role: decode, scheme: https", 1),
		"pairs, traced":           `tracing: {endpoint: "127.0.0.1:4317"}` + strings.Replace(pool, "nixl", "sglang", 1),
		"pairs":                   strings.Replace(pool, "nixl", "sglang", 1),
		"pairs, https and h2c":    strings.Replace(strings.Replace(strings.Replace(pool, "nixl", "sglang", 1), "role: prefill", "role: prefill, scheme: https", 1), "role: decode", "role: decode, scheme: h2c", 1),
		"pairs, two replicas":     `{envoy: {extProcs: ["10.0.0.1:9002", "10.0.0.2:9002"]}, tickets: {keyFile: k}` + strings.Replace(flow(), "nixl", "sglang", 1),
		"TLS, unverified":         "extProc: {tls: {certFile: c, keyFile: k}}" + pool,
		"mutual TLS, verified":    "{extProc: {tls: {certFile: c, keyFile: k, clientCaFile: a}}, envoy: {extProcTls: {caFile: " + ca + ", certFile: " + ca + ", keyFile: " + ca + "}}" + flow(),
		"prefill's cached tokens": strings.Replace(pool, "kvTransfer: nixl", "kvTransfer: nixl\n  cachedTokens: prefill", 1),
		"an encode stage":         strings.Replace(pool, "nixl", "nixl\n  encode: {}", 1) + "  - {address: 127.0.0.1:8301, role: encode, scheme: h2c}\n",
		"encode, two, traced":     `{tracing: {endpoint: "127.0.0.1:4317"}, envoy: {extProcs: ["10.0.0.1:9002", "10.0.0.2:9002"]}, tickets: {keyFile: k}` + strings.Replace(flow(), "nixl", "nixl, encode: {}", 1),
		"answers rewritten":       strings.Replace(pool, "nixl", "lmcache\n  lmcache: {retFirstToken: true}", 1),
	}
}

// Whatever the configuration, the real Envoy takes what is printed, without a warning.
func TestEnvoyTakes(t *testing.T) {
	for name, text := range cases(t) {
		t.Run(name, func(t *testing.T) {
			c, _, err := config.Parse([]byte(text))
			require.NoError(t, err)
			got, err := Bootstrap(c)
			require.NoError(t, err)
			validate(t, got)
		})
	}
}

// What the model holds is valid by the rules of Envoy's API, what is printed is the model and nothing else, and says all of its notes.
func TestPrintedIsTheModel(t *testing.T) {
	for name, text := range cases(t) {
		t.Run(name, func(t *testing.T) {
			c, _, err := config.Parse([]byte(text))
			require.NoError(t, err)
			m, err := newModel(c, false)
			require.NoError(t, err)
			want := m.bootstrap()
			text, err := m.print(m.overview(), want)
			require.NoError(t, err)
			require.NoError(t, want.ValidateAll())
			for _, packed := range m.packed {
				require.NoError(t, packed.(interface{ ValidateAll() error }).ValidateAll())
			}
			asJSON, err := yaml.YAMLToJSON(text)
			require.NoError(t, err)
			got := &bootstrapv3.Bootstrap{}
			require.NoError(t, protojson.Unmarshal(asJSON, got))
			require.True(t, proto.Equal(want, got))
			unwrapped := regexp.MustCompile(`\n *# `).ReplaceAllString(string(text), " ")
			for message, notes := range m.notes {
				for field, note := range notes {
					require.Contains(t, unwrapped, note, "%T.%s", message, field)
				}
			}
			again, err := Bootstrap(c)
			require.NoError(t, err)
			require.Equal(t, string(text), string(again))
		})
	}
}

// The resources for an existing Gateway attach to one listener of it, the patched one, and bring no Gateway and no class.
func TestEnvoyGatewayOfOthers(t *testing.T) {
	c, _, err := config.Parse([]byte(pool))
	require.NoError(t, err)
	text, err := EnvoyGateway(c, GatewayOptions{Gateway: "shop/https", Namespace: "web"})
	require.NoError(t, err)
	require.NotRegexp(t, `(?m)^kind: (Gateway|GatewayClass|EnvoyProxy|ClientTrafficPolicy)$`, string(text))
	require.Contains(t, string(text), "- {name: shop, sectionName: https}")
	require.Contains(t, string(text), "targetRef: {group: gateway.networking.k8s.io, kind: Gateway, name: shop}")
	require.Contains(t, string(text), "name: web/shop/https\n    type: type.googleapis.com/envoy.config.route.v3.RouteConfiguration")
	for _, wrong := range []string{"shop", "shop/", "/https"} {
		_, err = EnvoyGateway(c, GatewayOptions{Gateway: wrong})
		require.ErrorContains(t, err, "it is NAME/SECTION")
	}
	text, err = EnvoyGateway(c, GatewayOptions{})
	require.NoError(t, err)
	require.NotContains(t, string(text), "kind: GatewayClass", "a class is the administrator's")
}

// flow is pool as the rest of a flow mapping.
func flow() string {
	return ", pools: [{name: a, kvTransfer: nixl, endpoints: [{address: \"127.0.0.1:8101\", role: prefill}, {address: \"127.0.0.1:8201\", role: decode}]}]}"
}

// validate asks the real Envoy.
func validate(t *testing.T, bootstrap []byte) {
	t.Helper()
	envoy := findEnvoy(t)
	file := filepath.Join(t.TempDir(), "envoy.yaml")
	require.NoError(t, os.WriteFile(file, bootstrap, 0o600))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, envoy, "--mode", "validate", "-c", file, "-l", "warning", "--disable-hot-restart").CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, "configuration '"+file+"' OK\n", string(out))
}

// findEnvoy is the path of a real Envoy. Without one the test is skipped, or fails where tools are required.
func findEnvoy(t *testing.T) string {
	t.Helper()
	if e := os.Getenv("ENVOY"); e != "" {
		return e
	}
	if e, err := exec.LookPath("envoy"); err == nil {
		return e
	}
	e, err := filepath.Abs("../.tools/bin/envoy")
	require.NoError(t, err)
	if _, err := os.Stat(e); err == nil {
		return e
	}
	const missing = "no Envoy: run scripts/tools.sh, put one on the PATH, or set $ENVOY"
	if os.Getenv("TANDEM_REQUIRE_TOOLS") != "" {
		t.Fatal(missing)
	}
	t.Skip(missing)
	return ""
}

// writeCertificate writes a self-signed certificate for the loopback and its key into one PEM file.
func writeCertificate(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	spec := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"tandem.test"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, spec, spec, &key.PublicKey, key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	text := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})...)
	file := filepath.Join(t.TempDir(), "both.pem")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	return file
}
