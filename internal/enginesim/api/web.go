package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"tandem/internal/enginesim/front"
)

// web is the HTTP port: HTTP/1.1 and h2c.
type web struct {
	handler  http.Handler
	front    *front.Config
	idle     time.Duration // idle connections are closed after this
	refusing sync.Mutex

	mu      sync.Mutex
	server  *http.Server
	address string // address to listen on; after the first time with the assigned port
	closed  bool
}

// open opens the port, each time the same one.
func (b *web) open() error {
	l, err := net.Listen("tcp", b.addr())
	if err != nil {
		return fmt.Errorf("opening the HTTP port: %w", err)
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Handler: b.handler, Protocols: &protocols, IdleTimeout: b.idle, ReadHeaderTimeout: time.Minute,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 4096, MaxReceiveBufferPerConnection: 16 << 20,
			MaxReceiveBufferPerStream: 4 << 20},
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		_ = l.Close()
		return net.ErrClosed
	}
	b.server, b.address = server, l.Addr().String()
	if l, err = b.front.Listener(l); err != nil {
		return err //nolint:wrapcheck // it says what failed
	}
	go func() { _ = server.Serve(l) }()
	return nil
}

func (b *web) addr() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.address
}

func (b *web) current() *http.Server {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.server
}

// refuse closes the port for d. Running answers continue, idle connections are closed. It reports whether the port
// could be opened again.
func (b *web) refuse(d time.Duration) bool {
	b.refusing.Lock() // one after another
	defer b.refusing.Unlock()
	time.Sleep(20 * time.Millisecond) // time to send the answer to the POST that asked for this
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	_ = b.current().Shutdown(ctx)
	<-ctx.Done()
	for range 50 {
		if err := b.open(); err == nil || errors.Is(err, net.ErrClosed) {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

func (b *web) shutdown(ctx context.Context) { _ = b.current().Shutdown(ctx) }

func (b *web) close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	_ = b.current().Close()
}
