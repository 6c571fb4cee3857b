package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"

	"tandem/extproc"
	configv1 "tandem/protos/config/v1"
)

// newGRPC makes the server that Envoy talks to.
func newGRPC(config *configv1.Config, server *extproc.Server, health *extproc.Health) (*grpc.Server, error) {
	limit := int(config.GetExtProc().GetMaxMessageBytes())
	options := []grpc.ServerOption{
		extproc.Codec(), experimental.BufferPool(extproc.BufferPool()),
		grpc.MaxRecvMsgSize(limit), grpc.MaxSendMsgSize(limit),
		grpc.MaxConcurrentStreams(1 << 20), // Envoy's circuit breakers bound them
		// A stream is short and its stack grows to the same size each time: goroutines that are kept have grown (0.87 of the CPU).
		// Streams beyond them get goroutines of their own.
		grpc.NumStreamWorkers(uint32(8 * runtime.GOMAXPROCS(0))),
		// Whole prompts go both ways; a window below their size costs a round trip for each of its fillings.
		grpc.InitialWindowSize(16 << 20), grpc.InitialConnWindowSize(64 << 20),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	}
	switch t := config.GetExtProc().GetTls(); t.GetMode() {
	case "files":
		files, err := newTLSFiles(t)
		if err != nil {
			return nil, err
		}
		options = append(options, grpc.Creds(credentials.NewTLS(files.config())))
	case "selfSigned":
		c, err := selfSigned()
		if err != nil {
			return nil, fmt.Errorf("extProc.tls: %w", err)
		}
		options = append(options, grpc.Creds(credentials.NewTLS(c)))
	}
	s := grpc.NewServer(options...)
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
