package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/redisserver"
	configv1 "tandem/protos/config/v1"
)

// keyPair writes a certificate and its key as NAME.crt and NAME.key.
func keyPair(t *testing.T, name string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	spec := &x509.Certificate{SerialNumber: big.NewInt(1)}
	certificate, err := x509.CreateCertificate(rand.Reader, spec, spec, &key.PublicKey, key)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), name)
	write := func(file, kind string, bytes []byte) string {
		require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: bytes}), 0o600))
		return file
	}
	return write(path+".crt", "CERTIFICATE", certificate), write(path+".key", "PRIVATE KEY", private)
}

// Every file of a certificate that is missing or wrong is named.
func TestCheckFilesOfCertificates(t *testing.T) {
	certFile, keyFile := keyPair(t, "a")
	_, otherKey := keyPair(t, "b")
	files := func(cert, key, ca string) *configv1.Config {
		return &configv1.Config{
			ExtProc: &configv1.ExtProc{Tls: &configv1.Tls{Mode: "files", CertFile: cert, KeyFile: key, ClientCaFile: ca}},
			State: &configv1.State{Redis: &configv1.Redis{
				Tls: &configv1.RedisTls{CertFile: cert, KeyFile: key, CaFile: ca},
			}},
		}
	}
	missing := func(name string) string { return ": open " + name + ": no such file or directory" }
	for name, tt := range map[string]struct {
		cert, key, ca string
		want          []string // without the section
		ofAuthorities string
	}{
		"in order":          {certFile, keyFile, certFile, nil, ""},
		"none named":        {"", "", "", nil, ""},
		"all missing":       {"no.crt", "no.key", "no.ca", []string{"certFile" + missing("no.crt"), "keyFile" + missing("no.key")}, missing("no.ca")},
		"one missing":       {certFile, "no.key", certFile, []string{"keyFile" + missing("no.key")}, ""},
		"another's key":     {certFile, otherKey, "", []string{"certFile: does not go with keyFile: tls: private key does not match public key"}, ""},
		"a key for a CA":    {certFile, keyFile, keyFile, nil, ": no certificate in " + keyFile},
		"only one is named": {"no.crt", "", "", []string{"certFile" + missing("no.crt")}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var want []string
			for section, authorities := range map[string]string{"extProc.tls.": "clientCaFile", "state.redis.tls.": "caFile"} {
				for _, w := range tt.want {
					want = append(want, section+w)
				}
				if tt.ofAuthorities != "" {
					want = append(want, section+authorities+tt.ofAuthorities)
				}
			}
			var got []string
			for _, e := range checkFiles(files(tt.cert, tt.key, tt.ca)) {
				got = append(got, e.String())
			}
			require.ElementsMatch(t, want, got)
		})
	}
}

// The folder of the ledger must be there.
func TestCheckLedger(t *testing.T) {
	errors := func(file string) int { return len(checkFiles(&configv1.Config{Usage: &configv1.Usage{Ledger: file}})) }
	require.Zero(t, errors("-"))
	require.Zero(t, errors(filepath.Join(t.TempDir(), "ledger")))
	require.Equal(t, 1, errors(filepath.Join(t.TempDir(), "no", "ledger")))
}

// `tandem serve --check --live` asks Redis: one that grants everything, one that refuses a command, another password, and
// none. There is no engine, so it always fails.
func TestCheckLiveAsksRedis(t *testing.T) {
	r := redisserver.New(t, "--user", "tandem", "on", ">s3cret", "~tandem:*", "+@all", "--user", "less", "on", ">s3cret", "~tandem:*", "+@all", "-hvals")
	dir := t.TempDir()
	check := func(user, password string) string {
		file := filepath.Join(dir, "tandem.yaml")
		require.NoError(t, os.WriteFile(filepath.Join(dir, "password"), []byte(password), 0o600))
		require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, `
pools: [{name: a, kvTransfer: none, endpoints: [{address: "127.0.0.1:1"}]}]
state: {redis: {url: "redis://%s@%s", passwordFile: %q}}
`, user, r.Addr, filepath.Join(dir, "password")), 0o600))
		err := run(context.WithoutCancel(t.Context()), []string{"serve", "-f", file, "--check", "--live"}, io.Discard, io.Discard)
		require.Error(t, err)
		return err.Error()
	}
	require.NotContains(t, check("tandem", "s3cret"), "state.redis")
	require.Contains(t, check("less", "s3cret"), "state.redis: HVALS is refused by Redis: NOPERM")
	require.Contains(t, check("tandem", "wrong"), "WRONGPASS")
	r.Kill()
	require.Contains(t, check("tandem", "s3cret"), "connection refused: replicas would go on by themselves")
}
