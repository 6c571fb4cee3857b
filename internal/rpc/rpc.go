// Package rpc is a gRPC server for one kind of client: few connections, each with very many short streams, as Envoy's are.
//
// It serves what is registered with it (it is a [grpc.ServiceRegistrar], and handlers get a [grpc.ServerStream]) over HTTP/2,
// with TLS or by prior knowledge. What it does otherwise than grpc-go's own server is who does the work. There, a stream's way
// leads from the goroutine that reads the connection to one that runs the handler to one that writes, and each of them has
// to be woken, for a handler that takes some ten microseconds. Here, whoever reads a connection (the leader) also
// runs the handlers of the streams that have become ready, one after the other, and then writes all their answers at once.
// A handler that has to wait, for the rest of its stream or for anything else, first hands the reading on to another
// goroutine, and is a goroutine by itself from there on:
//
//   - [grpc.ServerStream.RecvMsg] does that where the next message is not there yet, SendMsg where a window is full;
//   - a handler that is about to wait for something else says so: its stream has a method MayWait().
//
// Only methods named in [Options.Inline] are run that way, from their first message on; all others have goroutines of their own from the start. So have
// streams with a large message, whose work is better done beside the others'.
//
// Sources: RFC 9113 (HTTP/2), RFC 7541 (HPACK, golang.org/x/net/http2/hpack), gRPC over HTTP/2
// (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md). Messages are never compressed.
//
// Files: rpc.go the server, conn.go a connection and its leader, frames.go what the peer sends, headers.go the
// headers in it, stream.go one stream, message.go its messages, out.go what is written, encode.go headers that are written.
package rpc

import (
	"crypto/tls"
	"errors"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"

	"tandem/internal/rawconn"
)

// Options are what a server is made with. Zero values take the defaults named.
type Options struct {
	Codec        encoding.CodecV2         // of all messages; it must not keep what it is given to read
	Pool         mem.BufferPool           // of the memory that messages are received in
	MaxMessage   int                      // bytes of one message, either way; default 4 MiB
	TLS          *tls.Config              // nil: plaintext, HTTP/2 by prior knowledge
	StreamWindow int32                    // bytes a peer may send of a stream before its handler takes them; default 16 MiB, at least 65535
	ConnWindow   int32                    // bytes on their way in one connection; default 64 MiB, at least 65535
	MaxStreams   uint32                   // streams at a time in one connection, and handlers that have not returned; default 1 << 16, beyond which Envoy opens another connection
	Inline       func(method string) bool // methods ("/service/method") that the leader runs itself; nil: none
}

// How long a peer may take. Source of the first two: what cmd/tandem told grpc-go's keepalive.
const (
	quietTime     = 30 * time.Second // after which a connection is asked whether it lives
	answerTime    = 10 * time.Second // for its answer
	handshakeTime = 10 * time.Second // for TLS and the preface
	goAwayTime    = time.Second      // between the words of goodbye, where the peer does not answer
)

// Server serves gRPC. Register everything before Serve.
type Server struct {
	o       Options
	methods map[string]*method

	mu        sync.Mutex
	listeners map[net.Listener]struct{}
	conns     map[*conn]struct{}
	stopping  bool
	gone      sync.Cond // a connection has ended

	tasks chan task
	idle  atomic.Int32
	done  chan struct{} // closed by Stop
	once  sync.Once
}

// method is what a path leads to.
type method struct {
	impl   any
	unary  grpc.MethodHandler
	stream grpc.StreamHandler
	inline bool
}

// New returns a server that serves nothing yet.
func New(o Options) *Server {
	orDefault(&o.MaxMessage, 4<<20)
	orDefault(&o.StreamWindow, 16<<20)
	orDefault(&o.ConnWindow, 64<<20)
	orDefault(&o.MaxStreams, 1<<16)
	o.StreamWindow, o.ConnWindow = max(o.StreamWindow, firstWindow), max(o.ConnWindow, firstWindow) // a peer may use these before it hears of others
	s := &Server{o: o, methods: map[string]*method{}, listeners: map[net.Listener]struct{}{}, conns: map[*conn]struct{}{},
		tasks: make(chan task), done: make(chan struct{})}
	s.gone.L = &s.mu
	return s
}

func orDefault[T int | int32 | uint32](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// RegisterService implements [grpc.ServiceRegistrar].
func (s *Server) RegisterService(d *grpc.ServiceDesc, impl any) {
	add := func(name string, m *method) {
		path := "/" + d.ServiceName + "/" + name
		m.impl, m.inline = impl, s.o.Inline != nil && s.o.Inline(path)
		s.methods[path] = m
	}
	for _, m := range d.Methods {
		add(m.MethodName, &method{unary: m.Handler})
	}
	for _, m := range d.Streams {
		add(m.StreamName, &method{stream: m.Handler})
	}
}

// Serve accepts connections until the server is stopped, and then returns nil, or until the listener fails.
func (s *Server) Serve(l net.Listener) error {
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		return l.Close()
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	pause := 5 * time.Millisecond
	for {
		nc, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			stopping := s.stopping
			s.mu.Unlock()
			if stopping {
				return nil
			}
			var temporary interface{ Temporary() bool }
			if !errors.As(err, &temporary) || !temporary.Temporary() {
				return err
			}
			select { // out of descriptors, most likely
			case <-time.After(pause):
			case <-s.done:
				return nil
			}
			pause = min(2*pause, time.Second)
			continue
		}
		pause = 5 * time.Millisecond
		go s.serve(nc)
	}
}

// serve takes a connection in and leads it first.
func (s *Server) serve(nc net.Conn) {
	c := newConn(s, rawconn.New(nc))
	s.mu.Lock()
	if s.stopping {
		s.mu.Unlock()
		_ = nc.Close()
		return
	}
	s.conns[c] = struct{}{}
	s.mu.Unlock()
	if err := c.handshake(); err != nil {
		c.fail()
		return
	}
	s.mu.Lock()
	stopping := s.stopping
	s.mu.Unlock()
	if stopping { // since, and GracefulStop found it too new to be told
		c.goodbye()
	}
	s.work(task{conn: c})
}

// left takes a connection out that has ended.
func (s *Server) left(c *conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.gone.Broadcast()
	s.mu.Unlock()
}

// GracefulStop accepts nothing more, tells every peer so, and returns when all streams have ended, or Stop was called.
func (s *Server) GracefulStop() {
	for _, c := range s.refuse() {
		go c.goodbye() // one whose peer does not read keeps no other waiting
	}
	s.mu.Lock()
	for len(s.conns) > 0 {
		s.gone.Wait()
	}
	s.mu.Unlock()
	s.once.Do(func() { close(s.done) })
}

// Stop ends everything at once. Handlers find their streams cancelled.
func (s *Server) Stop() {
	s.once.Do(func() { close(s.done) })
	for _, c := range s.refuse() {
		c.fail()
	}
}

// refuse closes the listeners and tells which connections there are.
func (s *Server) refuse() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopping = true
	for l := range s.listeners {
		_ = l.Close()
	}
	clear(s.listeners)
	conns := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		conns = append(conns, c)
	}
	return conns
}

// task is work for a goroutine: to lead a connection or, with a stream, to run its handler.
type task struct {
	conn   *conn
	stream *stream
}

func (t task) run() {
	if t.stream != nil {
		t.stream.serve()
	} else {
		t.conn.lead()
	}
}

// work has a task done by another goroutine: one that is idle, whose stack has grown already (.87 of the CPU), or a new one.
func (s *Server) work(t task) {
	select {
	case s.tasks <- t:
	default:
		go s.worker(t)
	}
}

// worker does a task and waits for the next, unless enough others do.
func (s *Server) worker(t task) {
	for {
		t.run()
		if s.idle.Add(1) > int32(8*runtime.GOMAXPROCS(0)) {
			s.idle.Add(-1)
			return
		}
		select {
		case t = <-s.tasks:
			s.idle.Add(-1)
		case <-s.done:
			s.idle.Add(-1)
			return
		}
	}
}
