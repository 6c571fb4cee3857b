package web

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Port is the HTTP port: HTTP/1.1 and h2c.
type Port struct {
	handler  http.Handler
	wrap     func(net.Listener) (net.Listener, error)
	idle     time.Duration // idle connections are closed after this
	refusing sync.Mutex

	mu      sync.Mutex
	server  *http.Server
	address string // address to listen on; after the first time with the assigned port
	closed  bool
}

// New returns a closed port at an address, host:port. Connections that are idle for that long are closed.
// wrap is what stands before the connections: it may encrypt them.
func New(
	address string, handler http.Handler, idle time.Duration, wrap func(net.Listener) (net.Listener, error),
) *Port {
	return &Port{handler: handler, wrap: wrap, idle: idle, address: address}
}

// requests is the context's key of a connection's number of requests, *atomic.Int64.
type requests struct{}

// Reused reports whether a request came over a connection that had carried another one, by HTTP/1.1.
func Reused(r *http.Request) bool {
	n, ok := r.Context().Value(requests{}).(*atomic.Int64)
	return ok && r.ProtoMajor == 1 && n.Load() > 1
}

// ServeHTTP counts the connection's requests.
func (b *Port) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if n, ok := r.Context().Value(requests{}).(*atomic.Int64); ok {
		n.Add(1)
	}
	b.handler.ServeHTTP(w, r)
}

// Open opens the port, each time the same one.
func (b *Port) Open() error {
	l, err := net.Listen("tcp", b.Addr())
	if err != nil {
		return fmt.Errorf("opening the HTTP port: %w", err)
	}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{
		Handler: b, Protocols: &protocols, IdleTimeout: b.idle, ReadHeaderTimeout: time.Minute,
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, requests{}, new(atomic.Int64))
		},
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
	if l, err = b.wrap(l); err != nil {
		return err
	}
	go func() { _ = server.Serve(l) }()
	return nil
}

// Addr returns the address, host:port.
func (b *Port) Addr() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.address
}

func (b *Port) current() *http.Server {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.server
}

// Refuse closes the port for d. Running answers continue, idle connections are closed. It reports whether the port
// could be opened again.
func (b *Port) Refuse(d time.Duration) bool {
	b.refusing.Lock() // one after another
	defer b.refusing.Unlock()
	time.Sleep(20 * time.Millisecond) // time to send the answer to the POST that asked for this
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	_ = b.current().Shutdown(ctx)
	<-ctx.Done()
	for range 50 {
		if err := b.Open(); err == nil || errors.Is(err, net.ErrClosed) {
			return true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return false
}

// Shutdown lets running answers end until ctx ends.
func (b *Port) Shutdown(ctx context.Context) { _ = b.current().Shutdown(ctx) }

// Close cuts everything, for good.
func (b *Port) Close() {
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	_ = b.current().Close()
}
