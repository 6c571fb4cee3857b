package zmtp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"tandem/internal/guard"
)

// Kind is what a receiving socket is.
type Kind string

// The kinds, and who may connect to each.
const (
	Pull   Kind = "PULL"   // PUSH
	Router Kind = "ROUTER" // DEALER, REQ, ROUTER
)

func (k Kind) takes(peer string) bool {
	if k == Pull {
		return peer == "PUSH"
	}
	return slices.Contains([]string{"DEALER", "REQ", "ROUTER"}, peer)
}

const (
	greetTime      = 5 * time.Second // for greeting and READY
	maxConnections = 4096
)

// Server receives messages from everybody who connects.
type Server struct {
	Kind Kind
	// Receive is called with each message's frames, for one connection in order, for several at once. identity is the name
	// that the peer gave its socket, "" for none. What it is given is its own to keep.
	Receive func(identity string, frames [][]byte)
	Log     *slog.Logger
}

// Serve accepts connections until ctx ends, which closes the listener and all of them, and waits for their goroutines.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	var running sync.WaitGroup
	defer running.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	room := make(chan struct{}, maxConnections)
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() || isTemporary(err) {
			select { // out of file descriptors, perhaps: that passes
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("accepting ZeroMQ connections: %w", err)
		}
		select {
		case room <- struct{}{}:
		default:
			s.Log.Warn("ZeroMQ connection refused: too many", "peer", conn.RemoteAddr(), "open", maxConnections)
			_ = conn.Close()
			continue
		}
		running.Go(func() {
			defer func() { <-room }()
			defer guard.Recover(ctx, "ZeroMQ")
			s.serveConn(ctx, conn)
		})
	}
}

// isTemporary reports whether an accept may work again.
func isTemporary(err error) bool {
	t, ok := errors.AsType[interface {
		error
		Temporary() bool
	}](err)
	return ok && t.Temporary()
}

func (s *Server) serveConn(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(greetTime))
	r := bufio.NewReader(conn)
	identity, err := s.greet(conn, r)
	if err == nil {
		_ = conn.SetDeadline(time.Time{}) // TCP keep-alive notices a peer that is gone
		err = s.receive(conn, r, identity)
	}
	if err != nil && !errors.Is(err, io.EOF) && ctx.Err() == nil {
		s.Log.Info("ZeroMQ connection ended", "peer", conn.RemoteAddr(), "err", err)
	}
}

// greet exchanges greetings and READY commands.
func (s *Server) greet(w io.Writer, r io.Reader) (identity string, err error) {
	ready := newCommand("READY", appendProperty(nil, "Socket-Type", string(s.Kind)))
	if _, err := w.Write(append(greeting(), ready...)); err != nil {
		return "", err
	}
	var theirs [greetingLen]byte
	if _, err := io.ReadFull(r, theirs[:]); err != nil {
		return "", fmt.Errorf("reading a greeting: %w", err)
	}
	if err := checkGreeting(theirs[:]); err != nil {
		return "", err
	}
	f, err := readFrame(r, MaxMessage)
	if err != nil {
		return "", fmt.Errorf("reading READY: %w", err)
	}
	name, data, err := command(f.body)
	if err != nil || f.flags&flagCommand == 0 || name != "READY" {
		return "", fmt.Errorf("the first frame is not READY: %w", errors.Join(err))
	}
	kind, err := property(data, "Socket-Type")
	if err != nil {
		return "", err
	}
	if !s.Kind.takes(string(kind)) {
		return "", fmt.Errorf("a %.20q socket cannot talk to %s", kind, s.Kind)
	}
	id, err := property(data, "Identity")
	return string(id), err
}

// receive hands messages on until the connection ends.
func (s *Server) receive(w io.Writer, r io.Reader, identity string) error {
	var frames [][]byte
	size := 0
	for {
		f, err := readFrame(r, MaxMessage-size)
		if err != nil {
			return err
		}
		if f.flags&flagCommand != 0 {
			if err := answerCommand(w, f.body); err != nil {
				return err
			}
			continue
		}
		frames, size = append(frames, f.body), size+len(f.body)
		if f.flags&flagMore != 0 {
			if len(frames) == maxFrames {
				return fmt.Errorf("a message of more than %d frames", maxFrames)
			}
			continue
		}
		s.Receive(identity, frames)
		frames, size = nil, 0
	}
}

// answerCommand answers PING (ZMTP 3.1, where the peer has heartbeats on) and ends a connection that the peer gives up.
func answerCommand(w io.Writer, body []byte) error {
	name, data, err := command(body)
	switch {
	case err != nil:
		return err
	case name == "ERROR":
		return fmt.Errorf("the peer says %.100q", data)
	case name != "PING" || len(data) < 2 || len(data) > 2+16:
		return nil
	}
	_, err = w.Write(newCommand("PONG", data[2:]))
	return err
}
