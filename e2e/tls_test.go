package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Envoy and Tandem use TLS if configured, and a certificate that changes on disk is loaded without a restart.
func TestTLSBetweenEnvoyAndTandem(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	ca, cert, key := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	// The authority stays when the certificate changes: an Envoy worker may connect for the first time after that.
	authority := selfSigned(t, ca, filepath.Join(dir, "ca.key"), 1)
	signed(t, cert, key, 1, authority)
	f := start(t, options{
		extProcFields: fmt.Sprintf(", tls: {certFile: %q, keyFile: %q}", cert, key),
		envoyFields:   fmt.Sprintf(", extProcTls: {caFile: %q, serverName: tandem.test}", ca),
	})
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)

	config, err := os.ReadFile(f.config)
	require.NoError(t, err)
	address := string(regexp.MustCompile(`extProc: \{listen: "([^"]+)"`).FindSubmatch(config)[1])
	require.EqualValues(t, 1, serial(t, address))
	signed(t, cert, key, 2, authority)
	future := time.Now().Add(2 * time.Second)
	require.NoError(t, os.Chtimes(cert, future, future))
	require.Eventually(t, func() bool { return serial(t, address) == 2 }, patience, 100*time.Millisecond)
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
}

// Engines behind names of their own take no other SNI and no other Host, and Envoy verifies their certificates for those
// names: for each leg, one after the other and both at once, and for Tandem's own requests.
func TestEnginesBehindNames(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "sglang", "mooncake"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			ca := filepath.Join(dir, "ca.pem")
			authority := selfSigned(t, ca, filepath.Join(dir, "ca.key"), 1)
			roots := x509.NewCertPool()
			roots.AddCert(authority.Certificate)
			bin, err := binaries()
			require.NoError(t, err)
			var engines []*engine
			asked := func(e *engine, path string, into any) error {
				name := e.role + ".test"
				over := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{ServerName: name, RootCAs: roots}}}
				defer over.CloseIdleConnections()
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+e.addr+path, http.NoBody)
				require.NoError(t, err)
				req.Host = name
				resp, err := over.Do(req)
				if err != nil {
					return err
				}
				defer resp.Body.Close()
				if into == nil {
					return nil
				}
				return json.NewDecoder(resp.Body).Decode(into)
			}
			pools := fmt.Sprintf("pools:\n- name: chat\n  kvTransfer: %s\n  split: always\n  decodeAlone: never\n  endpoints:\n", dialect)
			free := ports(t, 6)
			for i, role := range []string{"prefill", "decode"} {
				e := &engine{addr: free[3*i], role: role, dialect: dialect}
				cert, key := filepath.Join(dir, role+".pem"), filepath.Join(dir, role+".key")
				signed(t, cert, key, int64(2+i), authority, role+".test")
				e.args = []string{"--listen", e.addr, "--side-channel", free[3*i+1], "--role", role, "--model", "tiny",
					"--tls-cert", cert, "--tls-key", key, "--tls-name", role + ".test"}
				if dialect != "nixl" {
					e.speak(free[3*i+1], free[3*i+2])
				}
				e.process = startProcess(t, dir, role, filepath.Join(bin, "enginesim"), e.args...)
				require.Eventually(t, func() bool { return asked(e, "/health", nil) == nil }, patience, 20*time.Millisecond)
				pools += fmt.Sprintf("  - {address: %q, role: %s, scheme: https, serverName: %s.test%s}\n", e.addr, role, role, e.transfer)
				engines = append(engines, e)
			}
			f := start(t, options{launch: func(*fleet) {}, pools: pools, envoyFields: fmt.Sprintf(", endpointTls: {caFile: %q}", ca)})
			soon(t, "the engines' models are known", func() bool { _, known := f.models()["tiny"]; return known })
			for i := range 8 {
				a := ask("tiny", i)
				got := f.post(a.path, a.body, "x-request-id", a.id)
				require.Equal(t, 200, got.status, got.body)
				var external int
				for _, e := range engines {
					var all []seen
					require.NoError(t, asked(e, "/sim/requests", &all))
					all = slices.DeleteFunc(all, func(s seen) bool { return !strings.Contains(s.RequestID, a.id) })
					require.Len(t, all, 1, e.role)
					require.Equal(t, e.role+".test", all[0].Host)
					external = all[0].ExternalTokens
				}
				require.True(t, external > 0 || dialect == "sglang", "D got P's KV")
			}
		})
	}
}

// certified is a certificate and its key.
type certified struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

func selfSigned(t *testing.T, certFile, keyFile string, serial int64) certified {
	t.Helper()
	return signed(t, certFile, keyFile, serial, certified{})
}

// signed writes a certificate and its key, for tandem.test or the given names. The zero issuer is itself.
func signed(t *testing.T, certFile, keyFile string, serial int64, issuer certified, names ...string) certified {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	if len(names) == 0 {
		names = []string{"tandem.test"}
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: filepath.Base(certFile)}, DNSNames: names,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	if issuer.key == nil {
		issuer = certified{&template, key}
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, issuer.Certificate, &key.PublicKey, issuer.key)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600))
	require.NoError(t, os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
	made, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return certified{made, key}
}

// serial returns the serial number of the certificate at an address.
func serial(t *testing.T, address string) int64 {
	t.Helper()
	conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err != nil {
		return 0
	}
	defer conn.Close()
	return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
}
