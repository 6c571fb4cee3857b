// Package certificates makes the TLS configuration of the servers that Envoy connects to.
package certificates

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"os"
	"sync"
	"time"

	configv1 "tandem/protos/config/v1"
)

// TLS returns the TLS configuration of a server, nil for plaintext. Certificate files are read again when they change.
func TLS(spec *configv1.Tls) (*tls.Config, error) {
	switch spec.GetMode() {
	case "files":
		files, err := newFiles(spec)
		if err != nil {
			return nil, err
		}
		return files.config(), nil
	case "selfSigned":
		c, err := selfSigned()
		if err != nil {
			return nil, fmt.Errorf("extProc.tls: %w", err)
		}
		return c, nil
	}
	return nil, nil //nolint:nilnil // nil is plaintext, for grpcserver too
}

// files are a certificate and its authorities, read again when the files change.
type files struct {
	spec *configv1.Tls

	mu      sync.Mutex
	checked time.Time
	newest  time.Time
	current *tls.Config
}

func newFiles(spec *configv1.Tls) (*files, error) {
	f := &files{spec: spec}
	if err := f.read(); err != nil {
		return nil, err
	}
	return f, nil
}

// config returns the listener's configuration for a new connection: that of the newest readable files.
func (f *files) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.get(), nil }}
}

// checkEvery is the minimum interval at which connections check the files' times.
const checkEvery = time.Second

func (f *files) get() *tls.Config {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.checked) > checkEvery {
		_ = f.read() // half-written files are no reason to drop a working certificate
	}
	return f.current
}

// read reads the files if one of them is newer than the configuration in use.
func (f *files) read() error {
	f.checked = time.Now()
	newest := time.Time{}
	for _, name := range []string{f.spec.GetCertFile(), f.spec.GetKeyFile(), f.spec.GetClientCaFile()} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return fmt.Errorf("extProc.tls: %w", err)
		}
		if info.ModTime().After(newest) {
			newest = info.ModTime()
		}
	}
	if f.current != nil && !newest.After(f.newest) {
		return nil
	}
	certificate, err := tls.LoadX509KeyPair(f.spec.GetCertFile(), f.spec.GetKeyFile())
	if err != nil {
		return fmt.Errorf("extProc.tls: %w", err)
	}
	c := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{certificate},
	}
	if ca := f.spec.GetClientCaFile(); ca != "" {
		pem, err := os.ReadFile(ca)
		if err != nil {
			return fmt.Errorf("extProc.tls: %w", err)
		}
		c.ClientCAs = x509.NewCertPool()
		if !c.ClientCAs.AppendCertsFromPEM(pem) {
			return errors.New("extProc.tls.clientCaFile: no certificate in it")
		}
		c.ClientAuth = tls.RequireAndVerifyClientCert
	}
	f.current, f.newest = c, newest
	return nil
}

// selfSigned makes a certificate for this run of the server. It does not prove the server's identity: gateways that
// call endpoint pickers encrypt and do not verify (Endpoint Picker protocol, proposal 004).
func selfSigned() (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	spec := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{Organization: []string{"Tandem"}}, DNSNames: []string{"tandem"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(10, 0, 0), // as long as a process may live
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, spec, spec, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
	}, nil
}
