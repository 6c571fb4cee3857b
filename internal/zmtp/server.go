package zmtp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"tandem/internal/guard"
)

const maxConnections = 4096

// Server accepts connections of peers.
type Server struct {
	Kind  Kind
	Limit int // bytes of a message; 0: 64 KiB, far more than engines push
	// Handle is called with each connection. The connection is closed when Handle returns or ctx ends.
	Handle func(ctx context.Context, c *Conn) error
	Log    *slog.Logger
}

// Receive returns a Handle that calls f with each message: in order within a connection, concurrently for several.
// Frames are valid until f returns.
func Receive(f func(frames [][]byte)) func(context.Context, *Conn) error {
	return func(_ context.Context, c *Conn) error { return c.Each(f) }
}

// Serve accepts connections until ctx ends. Then it closes the listener and all connections, and waits for their
// goroutines.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	open := make(chan struct{}, maxConnections)
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() || isTemporary(err) {
			select { // possibly out of file descriptors, which passes
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("accepting ZeroMQ connections: %w", err)
		}
		select {
		case open <- struct{}{}:
		default:
			s.Log.Warn("ZeroMQ connection refused: too many", "peer", conn.RemoteAddr(), "open", maxConnections)
			_ = conn.Close()
			continue
		}
		running.Go(func() {
			defer func() { <-open }()
			defer guard.Recover(ctx, "ZeroMQ")
			s.serveConn(ctx, conn)
		})
	}
}

// isTemporary reports whether accepting may work again.
func isTemporary(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Temporary() bool
	}](err)
	return ok && t.Temporary()
}

func (s *Server) serveConn(ctx context.Context, nc net.Conn) {
	defer nc.Close()
	c, err := Open(ctx, nc, s.Kind, cmp.Or(s.Limit, 64<<10))
	if err == nil {
		defer context.AfterFunc(ctx, c.Close)()
		err = s.Handle(ctx, c)
	}
	if err != nil && !errors.Is(err, io.EOF) && ctx.Err() == nil {
		s.Log.Info("ZeroMQ connection ended", "peer", nc.RemoteAddr(), "err", err)
	}
}
