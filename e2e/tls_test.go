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

// certified is a certificate and its key.
type certified struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

func selfSigned(t *testing.T, certFile, keyFile string, serial int64) certified {
	t.Helper()
	return signed(t, certFile, keyFile, serial, certified{})
}

// signed writes a certificate and its key. The zero issuer is itself.
func signed(t *testing.T, certFile, keyFile string, serial int64, issuer certified) certified {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: filepath.Base(certFile)}, DNSNames: []string{"tandem.test"},
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
