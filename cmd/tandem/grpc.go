package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"tandem/extproc"
	"tandem/internal/rpc"
	configv1 "tandem/protos/config/v1"
)

// newGRPC makes the server that Envoy talks to.
func newGRPC(config *configv1.Config, server *extproc.Server, health *extproc.Health) (*rpc.Server, error) {
	o := rpc.Options{
		Codec: extproc.Codec(), Pool: extproc.BufferPool(), MaxMessage: int(config.GetExtProc().GetMaxMessageBytes()),
		Inline: extproc.Inline,
	}
	switch t := config.GetExtProc().GetTls(); t.GetMode() {
	case "files":
		files, err := newTLSFiles(t)
		if err != nil {
			return nil, err
		}
		o.TLS = files.config()
	case "selfSigned":
		c, err := selfSigned()
		if err != nil {
			return nil, fmt.Errorf("extProc.tls: %w", err)
		}
		o.TLS = c
	}
	s := rpc.New(o)
	server.Register(s)
	health.Register(s)
	return s, nil
}

// tlsFiles are a certificate and its authorities, read again when the files change.
type tlsFiles struct {
	spec *configv1.Tls

	mu      sync.Mutex
	checked time.Time
	newest  time.Time
	current *tls.Config
}

func newTLSFiles(spec *configv1.Tls) (*tlsFiles, error) {
	f := &tlsFiles{spec: spec}
	if err := f.read(); err != nil {
		return nil, err
	}
	return f, nil
}

// config is what the listener uses: the newest readable files, for every new connection.
func (f *tlsFiles) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.get(), nil }}
}

// tlsCheckEvery bounds how often connections make the files' times be looked at.
const tlsCheckEvery = time.Second

func (f *tlsFiles) get() *tls.Config {
	f.mu.Lock()
	defer f.mu.Unlock()
	if time.Since(f.checked) > tlsCheckEvery {
		_ = f.read() // half-written files are no reason to drop a certificate that works
	}
	return f.current
}

// read takes the files in if one of them is newer than what is in use.
func (f *tlsFiles) read() error {
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
	c := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{certificate}}
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
