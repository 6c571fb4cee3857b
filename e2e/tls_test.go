package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Envoy and Tandem use TLS if configured, and a certificate that changes on disk is loaded without a restart.
func TestTLSBetweenEnvoyAndTandem(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	selfSigned(t, cert, key, 1)
	f := start(t, options{
		extProcFields: fmt.Sprintf(", tls: {certFile: %q, keyFile: %q}", cert, key),
		envoyFields:   fmt.Sprintf(", extProcTls: {caFile: %q, serverName: tandem.test}", cert),
	})
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)

	config, err := os.ReadFile(f.config)
	require.NoError(t, err)
	address := string(regexp.MustCompile(`extProc: \{listen: "([^"]+)"`).FindSubmatch(config)[1])
	require.EqualValues(t, 1, serial(t, address))
	selfSigned(t, cert, key, 2)
	future := time.Now().Add(2 * time.Second)
	require.NoError(t, os.Chtimes(cert, future, future))
	require.Eventually(t, func() bool { return serial(t, address) == 2 }, patience, 100*time.Millisecond)
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
}

func selfSigned(t *testing.T, certFile, keyFile string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "tandem"}, DNSNames: []string{"tandem.test"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, &key.PublicKey, key)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}), 0o600))
	require.NoError(t, os.WriteFile(certFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600))
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
