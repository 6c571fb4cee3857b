package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"tandem/extproc"
	"tandem/internal/grpcserver"
	"tandem/internal/memory"
	"tandem/internal/xds"
	configv1 "tandem/protos/config/v1"
)

// Streams at one time, over all connections. An Envoy has an access log stream for each worker and log.
const (
	maxProcessStreams   = 1 << 16
	maxAccessLogStreams = 4096
	maxXDSStreams       = 1024 // one for each Envoy
)

// newBudget returns the budget of everything that is received and not handled: 1 GiB, or half of GOMEMLIMIT where that is less.
func newBudget() *memory.Budget {
	limit := int64(1 << 30)
	if total := debug.SetMemoryLimit(-1); total != math.MaxInt64 {
		limit = min(limit, total/2)
	}
	return memory.New(limit)
}

// newGRPC makes the server that Envoy talks to.
func newGRPC(
	cfg *configv1.Config, server *extproc.Server, envoys *xds.Server, health *extproc.Health,
) (*grpcserver.Server, error) {
	o := grpcserver.Options{
		Codec: extproc.Codec(), Pool: extproc.BufferPool(), MaxMessage: int(cfg.GetExtProc().GetMaxMessageBytes()), Memory: server.Memory,
		MethodStreams: map[string]int{
			extproc.ProcessMethod: maxProcessStreams, extproc.AccessLogMethod: maxAccessLogStreams, xds.Method: maxXDSStreams,
		},
	}
	switch t := cfg.GetExtProc().GetTls(); t.GetMode() {
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
	s := grpcserver.New(o)
	server.Register(s)
	envoys.Register(s)
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
