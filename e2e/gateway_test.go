package e2e

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
)

// gateway is a real Envoy Gateway without a cluster, with its own Envoy and a shop in addition to the engines.
type gateway struct {
	*fleet
	dir  string
	key  *rsa.PrivateKey // of JWTs
	shop string          // address

	authorized atomic.Int64 // questions to the external authority
}

// gatewayOptions are what else a gateway has.
type gatewayOptions struct {
	top          string         // more top-level YAML of Tandem's configuration; %i is the replica's number
	beside       func(*gateway) // starts what Envoy Gateway needs, when it has its certificates
	replacements []string       // in testdata/gateway/envoy-gateway.yaml, old and new
}

// startGateway starts one in the network namespace of this process, whose ports Envoy Gateway chooses itself. Its
// settings are those of testdata/gateway/envoy-gateway.yaml with replacements, old and new.
func startGateway(t *testing.T, replacements ...string) *gateway {
	t.Helper()
	return startGatewayOf(t, gatewayOptions{replacements: replacements})
}

func startGatewayOf(t *testing.T, o gatewayOptions) *gateway {
	t.Helper()
	if os.Getenv("TANDEM_GATEWAY") == "" {
		t.Skip("takes a real Envoy Gateway, and a network namespace: make e2e-gateway")
	}
	program := builtTool(t, "envoy-gateway")
	f := start(t, withOrders(t, options{replicas: 2, engineArgs: []string{"--decode-step", "1ms"}, prefills: 6, decodes: 6, encodes: 1,
		mix:    []string{"nixl", "sglang", "shared"},
		poolOf: map[string]string{"nixl": "  encode: {timeout: 5s}\n", "shared": "  cachedTokens: prefill\n"},
		top:    "envoyGateway: {listen: \"127.0.0.1:1700%i\", services: [\"tandem.default:17000\"]}\n" + o.top}))
	g := &gateway{fleet: f, dir: t.TempDir(), shop: startShop(t)}
	var err error
	g.key, err = rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	for _, folder := range []string{"resources", "config", "state", "runtime", "data/envoy-versions/1.40.0/bin"} {
		require.NoError(t, os.MkdirAll(filepath.Join(g.dir, folder), 0o700))
	}
	envoy, err := filepath.EvalSymlinks(tool(t, "ENVOY", "envoy", ".tools/bin/envoy"))
	require.NoError(t, err)
	require.NoError(t, os.Symlink(envoy, filepath.Join(g.dir, "data/envoy-versions/1.40.0/bin/envoy"))) // looked up before any download
	extension := "127.0.0.1:17000"
	if file := os.Getenv("TANDEM_GATEWAY_RECORD"); file != "" {
		extension = record(t, extension, file)
	}
	crt, key := certificate(t)
	g.write("resources.yaml", "resources/existing.yaml", "TLSCRT", crt, "TLSKEY", key, "PUBLICKEYS", g.jwks(),
		"ENGINE", portOf(f.decodes[0].addr), "SHOP", portOf(g.shop), "AUTHORITY", portOf(g.authority()))
	config := g.write("envoy-gateway.yaml", "gateway.yaml",
		append(o.replacements, "DIR", g.dir, "EXTENSION", portOf(extension))...)
	out, err := exec.Command(program, "certgen", "--local", "--config-home", filepath.Join(g.dir, "config")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	if o.beside != nil {
		o.beside(g)
	}
	startProcess(t, g.dir, "envoy-gateway", program, "server", "--config-path", config)
	f.url = "http://127.0.0.1:18080"
	// An Envoy that starts before Envoy Gateway listens tries again after up to half a minute, more than once.
	require.Eventually(t, func() bool {
		got, err := f.try(t.Context(), http.MethodGet, "/", "")
		return err == nil && got.status == 200
	}, 3*patience, 100*time.Millisecond, "the shop answers through the gateway")
	return g
}

// write fills in a file of testdata and returns where it is then.
func (g *gateway) write(name, to string, values ...string) string {
	g.t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata/gateway", name))
	require.NoError(g.t, err)
	to = filepath.Join(g.dir, to)
	require.NoError(g.t, os.WriteFile(to+".new", []byte(strings.NewReplacer(values...).Replace(string(text))), 0o600))
	require.NoError(g.t, os.Rename(to+".new", to))
	return to
}

// attach adds the policy and waits until it is in force.
func (g *gateway) attach() {
	g.t.Helper()
	g.write("policy.yaml", "resources/policy.yaml")
	n := 0
	soon(g.t, "a request is split", func() bool {
		n++
		id := fmt.Sprintf("attached-%d", n)
		got, err := g.try(g.t.Context(), http.MethodPost, "/v1/chat/completions", gatewayChat(id, 50), "host", "llm.test")
		return err == nil && got.status == 200 && len(g.asked(id, g.prefills)) > 0
	})
}

// startShop starts a server that echoes the request.
func startShop(t *testing.T) string {
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("x-fail") != "" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		r.Header.Del("x-request-id")
		_ = json.NewEncoder(w).Encode(map[string]any{"uri": r.RequestURI, "host": r.Host, "headers": r.Header, "body": fmt.Sprintf("%x", sha256.Sum256(body))})
	})}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return l.Addr().String()
}

// certificate is a self-signed one of *.test, and its key, as a Secret has them.
func certificate(t *testing.T) (crt, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	spec := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"*.test"}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, spec, spec, &k.PublicKey, k)
	require.NoError(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	require.NoError(t, err)
	encode := func(kind string, der []byte) string {
		return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
	}
	return encode("CERTIFICATE", der), encode("PRIVATE KEY", raw)
}

func base64url(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

func (g *gateway) jwks() string {
	return fmt.Sprintf(`{"keys":[{"kty":"RSA","alg":"RS256","kid":"k","n":"%s","e":"AQAB"}]}`, base64url(g.key.N.Bytes()))
}

// token is a JWT that the gateway takes.
func (g *gateway) token() string {
	text := base64url([]byte(`{"alg":"RS256","kid":"k"}`)) + "." + base64url(fmt.Appendf(nil, `{"iss":"someone","sub":"me","exp":%d}`, time.Now().Add(time.Hour).Unix()))
	sum := sha256.Sum256([]byte(text))
	signature, err := rsa.SignPKCS1v15(nil, g.key, crypto.SHA256, sum[:])
	require.NoError(g.t, err)
	return text + "." + base64url(signature)
}

// asBytes is a codec that passes messages on as they are.
type asBytes struct{}

func (asBytes) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (asBytes) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

func (asBytes) Name() string { return "proto" }

// record passes on what Envoy Gateway sends to an extension, and keeps the last translation in a file, from which
// `go test ./replica/gatewayextension -record FILE` makes a fixture.
func record(t *testing.T, to, file string) string {
	t.Helper()
	conn, err := grpc.NewClient(to, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer(grpc.ForceServerCodecV2(asBytes{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		var in, out []byte
		if err := stream.RecvMsg(&in); err != nil {
			return err
		}
		if err := os.WriteFile(file, in, 0o600); err != nil {
			return err
		}
		if err := conn.Invoke(context.Background(), method, &in, &out, grpc.ForceCodecV2(asBytes{})); err != nil {
			return err
		}
		return stream.SendMsg(&out)
	}))
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return l.Addr().String()
}

// ask sends a chat to a host of the gateway.
func (g *gateway) ask(host, path, id string, headers ...string) answer {
	g.t.Helper()
	return g.post(path, gatewayChat(id, 50), append([]string{"host", host}, headers...)...)
}

func gatewayChat(id string, words int) string {
	return fmt.Sprintf(`{"model":"nixl","max_tokens":6,"messages":[{"role":"user","content":"%s%s"}]}`, id, strings.Repeat(" word", words))
}

// asked are the requests with a chat that engines got. The gateway gives each request an id of its own.
func (g *gateway) asked(id string, engines []*engine) (out []seen) {
	g.t.Helper()
	for _, s := range g.requests("", engines...) {
		if strings.Contains(s.Body, `"`+id+" word") {
			out = append(out, s)
		}
	}
	return out
}

// split requires that a chat was answered over two hops.
func (g *gateway) split(got answer, id string) (prefill, decode seen) {
	g.t.Helper()
	require.Equal(g.t, 200, got.status, got.body)
	require.Contains(g.t, got.body, `"finish_reason"`)
	for name := range got.header {
		require.False(g.t, strings.HasPrefix(name, "X-Tandem-") || name == "X-Gateway-Destination-Endpoint", name)
	}
	p, d := g.asked(id, g.prefills), g.asked(id, g.decodes)
	require.Len(g.t, p, 1, "prefill requests of %s", id)
	require.Len(g.t, d, 1, "decode requests of %s", id)
	require.Positive(g.t, d[0].ExternalTokens)
	return p[0], d[0]
}

// An HTTPRoute of a Gateway that is there already gets an EnvoyExtensionPolicy, and is served over two engines; its
// neighbours notice nothing.
func TestEnvoyGatewayExtension(t *testing.T) {
	g := startGateway(t)
	before := g.neighbour()
	g.attach()
	t.Run("split", func(*testing.T) { g.split(g.ask("llm.test", "/v1/chat/completions", "plain"), "plain") })
	t.Run("neighbour", func(t *testing.T) { require.Equal(t, before, g.neighbour()) })
	t.Run("sizes", g.testSizes)
	t.Run("TLS", g.testTLS)
	t.Run("prefix", func(t *testing.T) {
		_, d := g.split(g.ask("llm.test", "/team/a/v1/chat/completions", "prefix"), "prefix")
		require.Equal(t, "/v1/chat/completions", d.Path)
	})
	t.Run("JWT", g.testJWT)
	t.Run("API key", g.testAPIKey)
	t.Run("rate limit", g.testRateLimit)
	t.Run("retries", g.testRetries)
	t.Run("CORS", g.testCORS)
	t.Run("external authorization", g.testExternalAuthorization)
	t.Run("basic auth", g.testBasicAuth)
	t.Run("IP list", func(t *testing.T) {
		openAI(t, g.ask("denied.test", "/v1/chat/completions", "denied"), 403, "permission_denied", "")
	})
	t.Run("both legs at once", func(*testing.T) {
		body := strings.Replace(gatewayChat("pair", 50), `"nixl"`, `"sglang"`, 1)
		g.split(g.post("/v1/chat/completions", body, "host", "llm.test"), "pair")
	})
	t.Run("encode", g.testEncode)
	t.Run("rewritten answers", g.testRewrittenAnswers)
	t.Run("an engine dies", g.testEngineDies)
	t.Run("a replica dies", g.testReplicaDies)
	t.Run("detached", g.testDetached)
}

// An Envoy whose route was not extended sends nothing to an engine. Here Envoy Gateway calls a hook that Tandem does not
// have, and lets it go on without.
func TestEnvoyGatewayNotExtended(t *testing.T) {
	g := startGateway(t, "extensionManager:", "extensionManager:\n  failOpen: true", "[Translation]", "[HTTPListener]")
	before := g.neighbour()
	g.write("policy.yaml", "resources/policy.yaml")
	var got answer
	soon(t, "the policy is in force", func() bool {
		got = g.ask("llm.test", "/v1/chat/completions", "refused")
		return got.status == 503
	})
	openAI(t, got, 503, "route_not_extended", "extension")
	require.Empty(t, g.asked("refused", g.prefills))
	require.Equal(t, before, g.neighbour())
}

// Gateways that share their Envoys share Tandem's listeners in them. Their access log says the tokens of answers, if it
// names them.
func TestEnvoyGatewayMerged(t *testing.T) {
	log := filepath.Join(t.TempDir(), "access.log")
	g := startGateway(t, "envoyProxy:", "envoyProxy:\n  mergeGateways: true\n  telemetry: {accessLog: {settings: [{"+
		`format: {type: Text, text: "%REQ(:authority)% %DYNAMIC_METADATA(tandem.usage:total)%\n"}, `+
		"sinks: [{type: File, file: {path: "+log+"}}]}]}}")
	g.attach()
	first := g.ask("llm.test", "/v1/chat/completions", "first")
	g.split(first, "first")
	used := usageOf(first)
	require.True(t, used.Said)
	require.NotEmpty(t, g.neighbour())
	soon(t, "the gateway's access log has the tokens of answers", func() bool {
		text, err := os.ReadFile(log)
		return err == nil && strings.Contains(string(text), fmt.Sprintf("llm.test %d\n", used.Prompt+used.Answer)) &&
			strings.Contains(string(text), "127.0.0.1:18080 -\n")
	})
	g.url = "http://127.0.0.1:18090"
	g.write("second.yaml", "resources/second.yaml")
	soon(t, "the second Gateway answers", func() bool {
		got, err := g.try(t.Context(), http.MethodGet, "/v1/models", "", "host", "second.test")
		return err == nil && got.status == 200
	})
	g.split(g.ask("second.test", "/v1/chat/completions", "second"), "second")
}

// Without an extension, patches do the same for one listener of a Gateway that is there.
func TestEnvoyGatewayPatches(t *testing.T) {
	g := startGateway(t, "enableBackend: true", "enableBackend: true, enableEnvoyPatchPolicy: true")
	before := g.neighbour()
	bin, err := binaries()
	require.NoError(t, err)
	text, err := exec.Command(filepath.Join(bin, "tandem"), "envoy", "-f", g.config, "--for", "envoy-gateway",
		"--gateway", "existing/http").Output()
	require.NoError(t, err)
	text = bytes.Replace(text, []byte("  rules:"), []byte("  hostnames: [patched.test]\n  rules:"), 1)
	require.NoError(t, os.WriteFile(filepath.Join(g.dir, "resources/tandem.yaml"), text, 0o600))
	soon(t, "the patches are in force", func() bool {
		got, err := g.try(t.Context(), http.MethodGet, "/v1/models", "", "host", "patched.test")
		return err == nil && got.status == 200 && strings.Contains(got.body, `"sglang"`)
	})
	g.split(g.ask("patched.test", "/v1/chat/completions", "patched"), "patched")
	require.Contains(t, g.overTLS("patched.test", "other"), `"uri"`, "the other listener has not got the route")
	require.Equal(t, before, g.neighbour())
}

// A picture is encoded before both other legs.
func (g *gateway) testEncode(t *testing.T) {
	body := strings.Replace(show(1, 1, 1, "").body, `"tiny"`, `"nixl"`, 1)
	got := g.post("/v1/chat/completions", body, "host", "llm.test")
	require.Equal(t, 200, got.status, got.body)
	require.Len(t, g.requests("", g.encodes...), 1)
	encoded := 0
	for _, s := range g.requests("", g.prefills...) {
		encoded += s.Encoded
	}
	require.Equal(t, 1, encoded)
}

// What prefill found in its cache is in the client's usage.
func (g *gateway) testRewrittenAnswers(t *testing.T) {
	for range 2 {
		body := strings.Replace(gatewayChat("cached", 500), `"nixl"`, `"shared"`, 1)
		got := g.post("/v1/chat/completions", body, "host", "llm.test")
		require.Equal(t, 200, got.status, got.body)
		legs := g.asked("cached", g.prefills)
		require.Contains(t, got.body, fmt.Sprintf(`"cached_tokens":%d`, legs[len(legs)-1].CachedTokens))
	}
	passed := 0.
	for _, admin := range g.admins {
		passed += metric(t, admin, "tandem_ext_proc_duration_seconds_count", `role="answer-leg"`)
	}
	require.InDelta(t, 2, passed, 0)
}

func (g *gateway) testEngineDies(*testing.T) {
	g.prefills[0].stop(syscall.SIGKILL) // of nixl
	g.lenient = true
	for i := range 10 {
		id := fmt.Sprintf("dead-engine-%d", i)
		g.split(g.ask("llm.test", "/v1/chat/completions", id), id)
	}
}

// The replica that Envoy Gateway asks dies: what Envoys have stays as it is.
func (g *gateway) testReplicaDies(t *testing.T) {
	g.tandems[0].stop(syscall.SIGKILL)
	for i := range 10 {
		id := fmt.Sprintf("dead-replica-%d", i)
		got := g.ask("llm.test", "/v1/chat/completions", id)
		require.Equal(t, 200, got.status, got.body)
	}
	g.startTandem(0, filepath.Join(g.fleet.dir, "tandem-0.yaml"), g.admins[0])
}

// Without the policy the route leads where it led before.
func (g *gateway) testDetached(t *testing.T) {
	require.NoError(t, os.Remove(filepath.Join(g.dir, "resources/policy.yaml")))
	n := 0
	soon(t, "the route leads to its own engine", func() bool {
		n++
		id := fmt.Sprintf("detached-%d", n)
		got := g.ask("llm.test", "/v1/chat/completions", id)
		return got.status == 200 && len(g.asked(id, g.prefills)) == 0 && len(g.asked(id, g.decodes)) == 1
	})
	require.Zero(t, metric(t, g.admins[0], "tandem_gateway_routes"))
}

// neighbour is what the shop is asked, and what its clients are answered.
func (g *gateway) neighbour() (out []string) {
	g.t.Helper()
	large := strings.Repeat("x", 3_000_000)
	for _, q := range []struct {
		path, body string
		headers    []string
	}{
		{"/", "", nil},
		{"/a%2Fb//c/../d?x=%20", "", []string{"host", "llm.test"}},
		{"/v2/chat/completions", `{"model":"tiny"}`, []string{"host", "llm.test", "x-gateway-destination-endpoint", "me", "x-data-parallel-rank", "1"}},
		{"/upload", large, nil},
		{"/", "", []string{"x-fail", "1"}},
		{"/", "", []string{"x-large", strings.Repeat("y", 70_000)}},
	} {
		method := http.MethodGet
		if q.body != "" {
			method = http.MethodPost
		}
		got, err := g.try(g.t.Context(), method, q.path, q.body, q.headers...)
		require.NoError(g.t, err)
		got.header.Del("date")
		got.header.Del("x-envoy-upstream-service-time")
		out = append(out, fmt.Sprint(got.status, got.header, got.body))
	}
	return out
}

func (g *gateway) testSizes(t *testing.T) {
	for i, words := range []int{10, 8_000, 240_000, 800_000} {
		for _, stream := range []bool{false, true} {
			id := fmt.Sprintf("size-%d-%v", i, stream)
			body := gatewayChat(id, words)
			if stream {
				body = strings.Replace(body, `{"model"`, `{"stream":true,"model"`, 1)
			}
			got := g.post("/v1/chat/completions", body, "host", "llm.test")
			require.Equal(t, 200, got.status, got.body)
			if stream {
				require.True(t, strings.HasSuffix(got.body, "data: [DONE]\n\n"))
			}
			t.Logf("%d bytes, streamed %v: %s", len(body), stream, got.took)
		}
	}
}

func (g *gateway) testTLS(*testing.T) {
	g.split(answer{status: 200, body: g.overTLS("llm.test", "tls")}, "tls")
}

// overTLS sends a chat over HTTP/2 to the TLS listener, and returns what was answered with 200.
func (g *gateway) overTLS(host, id string) string {
	g.t.Helper()
	c := &http.Client{Transport: &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true, ServerName: host}, // the test's own
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", "127.0.0.1:18443")
		},
	}}
	r, err := http.NewRequestWithContext(g.t.Context(), http.MethodPost, "https://"+host+"/v1/chat/completions",
		bytes.NewBufferString(gatewayChat(id, 50)))
	require.NoError(g.t, err)
	r.Header.Set("content-type", "application/json")
	resp, err := c.Do(r)
	require.NoError(g.t, err)
	require.Equal(g.t, 2, resp.ProtoMajor)
	got, err := readAnswer(resp)
	require.NoError(g.t, err)
	require.Equal(g.t, 200, got.status, got.body)
	return got.body
}

// openAI requires an error in OpenAI's shape.
func openAI(t *testing.T, got answer, status int, code, message string) {
	t.Helper()
	require.Equal(t, status, got.status, got.body)
	var e struct {
		Error struct{ Message, Type, Code string }
	}
	require.NoError(t, json.Unmarshal([]byte(got.body), &e), got.body)
	require.Equal(t, code, e.Error.Code)
	require.Contains(t, e.Error.Message, message)
}

func (g *gateway) testJWT(t *testing.T) {
	openAI(t, g.ask("jwt.test", "/v1/chat/completions", "jwt-none"), 401, "invalid_api_key", "Jwt is missing")
	openAI(t, g.ask("jwt.test", "/v1/chat/completions", "jwt-bad", "authorization", "Bearer x.y.z"), 401, "invalid_api_key", "Jwt")
	p, d := g.split(g.ask("jwt.test", "/v1/chat/completions", "jwt", "authorization", "Bearer "+g.token()), "jwt")
	for _, hop := range []seen{p, d} {
		require.Equal(t, []string{"me"}, hop.Headers["X-User"])
	}
}

func (g *gateway) testAPIKey(t *testing.T) {
	openAI(t, g.ask("key.test", "/v1/chat/completions", "key-none"), 401, "invalid_api_key", "")
	p, d := g.split(g.ask("key.test", "/v1/chat/completions", "key", "x-api-key", "secret-key"), "key")
	for _, hop := range []seen{p, d} {
		require.Equal(t, []string{"someone"}, hop.Headers["X-Client"])
		require.Empty(t, hop.Headers["X-Api-Key"], "the credential is removed, and not asked for again")
	}
}

func (g *gateway) testCORS(t *testing.T) {
	preflight, err := g.try(t.Context(), http.MethodOptions, "/v1/chat/completions", "", "host", "cors.test",
		"origin", "https://app.test", "access-control-request-method", "POST")
	require.NoError(t, err)
	require.Equal(t, 200, preflight.status)
	require.Equal(t, "https://app.test", preflight.header.Get("access-control-allow-origin"))
	got := g.ask("cors.test", "/v1/chat/completions", "cors", "origin", "https://app.test")
	g.split(got, "cors")
	require.Equal(t, []string{"https://app.test"}, got.header.Values("access-control-allow-origin"))
}

// authority starts an external authorization server, which lets requests with a header pass.
func (g *gateway) authority() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(g.t, err)
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		g.authorized.Add(1)
		if r.Header.Get("x-pass") != "yes" {
			http.Error(w, "you have no pass", http.StatusForbidden)
		}
	})}
	go func() { _ = s.Serve(l) }()
	g.t.Cleanup(func() { _ = s.Close() })
	return l.Addr().String()
}

// The authority is asked once for a request, and not again at a redirect; what it answers to a client stays.
func (g *gateway) testExternalAuthorization(t *testing.T) {
	refused := g.ask("authorized.test", "/v1/chat/completions", "authorized-none")
	require.Equal(t, 403, refused.status)
	require.Equal(t, "you have no pass\n", refused.body)
	before := g.authorized.Load()
	g.split(g.ask("authorized.test", "/v1/chat/completions", "authorized", "x-pass", "yes"), "authorized")
	require.EqualValues(t, 1, g.authorized.Load()-before)
}

func (g *gateway) testBasicAuth(t *testing.T) {
	openAI(t, g.ask("basic.test", "/v1/chat/completions", "basic-none"), 401, "invalid_api_key", "")
	g.split(g.ask("basic.test", "/v1/chat/completions", "basic", "authorization", "Basic c29tZW9uZTpzZWNyZXQtd29yZA=="), "basic")
}

func (g *gateway) testRateLimit(t *testing.T) {
	for i := range 3 {
		id := fmt.Sprintf("limited-%d", i)
		g.split(g.ask("limited.test", "/v1/chat/completions", id), id)
	}
	openAI(t, g.ask("limited.test", "/v1/chat/completions", "limited"), 429, "rate_limit_exceeded", "rate")
}

// A retry of Envoy Gateway's repeats the whole request: Tandem plans it again, and refuses it again here.
func (g *gateway) testRetries(t *testing.T) {
	refused := func() (n float64) {
		for _, admin := range g.admins {
			n += metric(t, admin, "tandem_refusals_total", `code="pool_paused"`)
		}
		return n
	}
	before := refused()
	g.order("POST", "/api/pools/nixl/pause", "")
	openAI(t, g.ask("retried.test", "/v1/chat/completions", "retried"), 503, "pool_paused", "no requests now")
	require.InDelta(t, before+3, refused(), 0, "once, and two retries")
	openAI(t, g.ask("llm.test", "/v1/chat/completions", "once"), 503, "pool_paused", "no requests now")
	require.InDelta(t, before+4, refused(), 0, "a route without the policy does not retry")
	g.order("POST", "/api/pools/nixl/resume", "")
	g.split(g.ask("retried.test", "/v1/chat/completions", "well"), "well")
}
