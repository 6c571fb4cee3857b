// Package grpcserver is grpc-go's server with limits on the memory that its peers can occupy.
//
// grpc-go bounds streams per connection, header lists, message sizes and handshakes, but not their sum: a peer may
// send a complete message on every stream as soon as a handler waits for it, and grpc-go keeps the received bytes
// until the message is complete. This package counts these bytes and enforces limits:
//
//   - Bytes that have arrived on a stream and are not handled yet, and replies that are not written yet, count against
//     one [memory.Budget], and against a share of it for each connection. The stream that exceeds either is refused:
//     its handler answers ([memory.OnFull]), and a peer that continues is disconnected.
//   - A peer that does not let a reply be written, or does not read at all, is disconnected after [Options.StuckTime].
//   - Connections are bounded; when there are too many, the one that has been without streams for longest is closed.
//   - Streams are bounded for each method, over all connections, and for each connection to a sixteenth of that.
//   - Frames without a request (SETTINGS, PING, RST_STREAM, WINDOW_UPDATE, ...) are bounded in proportion to requests.
//
// Files: server.go the server and its limits, conn.go a connection and its frames, stream.go a stream and its bytes.
package grpcserver

import (
	"cmp"
	"crypto/tls"
	"net"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/mem"

	"tandem/internal/memory"
)

// Options are the settings of a server. Zero values take the named defaults.
type Options struct {
	Codec      encoding.CodecV2
	Pool       mem.BufferPool // of the memory that messages are received in
	MaxMessage int            // bytes of one message, either way
	TLS        *tls.Config    // nil: plaintext

	Memory           *memory.Budget // of all received and unhandled messages, and of unwritten replies
	ConnectionMemory int64          // the maximum of one connection; default a quarter of Memory
	Connections      int            // default 4,096
	Streams          int            // of one connection; default 4,096, beyond which Envoy opens another connection
	// of one streaming method ("/service/method") over all connections, of which one connection gets a sixteenth; all
	// others together get 1,024
	MethodStreams map[string]int
	ConnectTime   time.Duration // for TLS and the first frames; default 10 s
	StuckTime     time.Duration // time after which a peer that reads nothing is disconnected; default 30 s
}

const (
	streamWindow  = 1 << 20 // a longer message gets a larger window when its handler waits for it
	connWindow    = 64 << 20
	maxHeaders    = 64 << 10 // of one request's gRPC metadata; a client's headers come in messages
	otherStreams  = 1024
	leastShare    = 64 << 10 // of a connection, however many there are
	leastStreams  = 64       // of a connection, of each method
	sweepInterval = time.Second
)

// Server serves gRPC. Register services with it, then call Serve.
type Server struct {
	*grpc.Server
	o       Options
	methods map[string]*method
	other   method

	accepted atomic.Int64 // connections

	mu    sync.Mutex
	conns map[*conn]struct{}
	stop  chan struct{}
	once  sync.Once
}

// method counts a method's open streams.
type method struct {
	limit int64
	open  atomic.Int64
	left  atomic.Int64 // Unix nanoseconds: when the last one ended
}

// share is the number of streams that one connection may have, so that no peer takes those of all others. Envoy has one
// of xDS, and an access log's for each worker and log.
func (m *method) share() int64 { return max(m.limit/16, leastStreams) }

// Streams returns the number of open streams of one of [Options.MethodStreams], and when there was last one; zero:
// never.
func (s *Server) Streams(method string) (open int, last time.Time) {
	m := s.methods[method]
	if n := m.open.Load(); n > 0 {
		return int(n), time.Now()
	}
	if left := m.left.Load(); left != 0 {
		last = time.Unix(0, left)
	}
	return 0, last
}

// New returns a server that serves nothing yet.
func New(o Options) *Server {
	o.MaxMessage = cmp.Or(o.MaxMessage, 4<<20)
	o.Connections = cmp.Or(o.Connections, 4096)
	o.Streams = cmp.Or(o.Streams, 4096)
	o.ConnectTime = cmp.Or(o.ConnectTime, 10*time.Second)
	o.StuckTime = cmp.Or(o.StuckTime, 30*time.Second)
	if o.Memory == nil {
		o.Memory = memory.New(1 << 30)
	}
	o.ConnectionMemory = cmp.Or(o.ConnectionMemory, o.Memory.Limit()/4)
	s := &Server{o: o, methods: map[string]*method{}, other: method{limit: otherStreams}, conns: map[*conn]struct{}{},
		stop: make(chan struct{})}
	for name, limit := range o.MethodStreams {
		s.methods[name] = &method{limit: int64(limit)}
	}
	security := insecure.NewCredentials()
	if o.TLS != nil {
		security = credentials.NewTLS(o.TLS)
	}
	s.Server = grpc.NewServer(
		grpc.Creds(handshake{security, s}),
		grpc.ForceServerCodecV2(codec{o.Codec}), experimental.BufferPool(o.Pool),
		grpc.MaxRecvMsgSize(o.MaxMessage), grpc.MaxSendMsgSize(o.MaxMessage),
		grpc.MaxConcurrentStreams(uint32(o.Streams)), grpc.MaxHeaderListSize(maxHeaders),
		grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow),
		grpc.ReadBufferSize(0), // conn buffers, and sees each frame when grpc-go does
		// Workers keep their stacks, which handlers grow to the same size each time. Streams beyond them get
		// goroutines of their own.
		grpc.NumStreamWorkers(uint32(8*runtime.GOMAXPROCS(0))),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
		// Envoy pings each of several replicas every 0.3 s (envoy-configs), to notice one that hangs.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 100 * time.Millisecond,
			PermitWithoutStream: true}),
		grpc.ConnectionTimeout(o.ConnectTime),
		//nolint:staticcheck // the only way to refuse a compression that another package has registered
		grpc.RPCDecompressor(noGzip{}),
		grpc.InTapHandle(s.admit), grpc.StreamInterceptor(s.serveStream),
	)
	return s
}

// Serve accepts connections until the server is stopped.
func (s *Server) Serve(l net.Listener) error {
	go s.sweep()
	return s.Server.Serve(&listener{l, s})
}

// Stop closes everything at once.
func (s *Server) Stop() {
	s.once.Do(func() { close(s.stop) })
	s.Server.Stop()
}

// GracefulStop accepts nothing more and returns when all streams have ended, or Stop was called.
func (s *Server) GracefulStop() {
	s.Server.GracefulStop()
	s.once.Do(func() { close(s.stop) })
}

// Held returns the bytes that all connections occupy.
func (s *Server) Held() (n int64) {
	for _, c := range s.connections() {
		c.mu.Lock()
		n += c.held
		c.mu.Unlock()
	}
	return n
}

// fairShare returns the maximum of a connection when less than a quarter of the budget is left: the average of the
// others. Connections with little memory are served while others occupy much.
func (s *Server) fairShare(total int64) int64 {
	return max(total/max(s.accepted.Load(), 1), leastShare)
}

func (s *Server) connections() []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*conn, 0, len(s.conns))
	for c := range s.conns {
		out = append(out, c)
	}
	return out
}

// listener bounds connections.
type listener struct {
	net.Listener
	s *Server
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := newConn(l.s, raw)
		if l.s.enter(c) {
			return c, nil
		}
		_ = raw.Close()
	}
}

// enter counts a connection. If there are too many, it closes the one that has been without streams for longest; if
// all have streams, it returns false.
func (s *Server) enter(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var idle *conn
	if len(s.conns) >= s.o.Connections {
		for other := range s.conns {
			if since := other.idleSince.Load(); since != 0 && (idle == nil || since < idle.idleSince.Load()) {
				idle = other
			}
		}
		if idle == nil {
			return false
		}
		delete(s.conns, idle)
		go idle.Close()
	}
	s.conns[c] = struct{}{}
	s.accepted.Store(int64(len(s.conns)))
	return true
}

func (s *Server) leave(c *conn) {
	s.mu.Lock()
	delete(s.conns, c)
	s.accepted.Store(int64(len(s.conns)))
	s.mu.Unlock()
}

// sweep disconnects peers that do not read, and refuses messages that stay incomplete while memory is short.
func (s *Server) sweep() {
	tick := time.NewTicker(sweepInterval)
	defer tick.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-tick.C:
		}
		now, short := time.Now(), s.o.Memory.Load() > s.o.Memory.Limit()/2
		for _, c := range s.connections() {
			c.sweep(now, short)
		}
	}
}

// handshake makes each connection count from its TLS handshake on.
type handshake struct {
	credentials.TransportCredentials
	s *Server
}

// identity is how handlers and admit find a stream's connection.
type identity struct {
	credentials.AuthInfo
	conn *conn
}

func (h handshake) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c := raw.(*conn) // from the listener
	top, info, err := h.TransportCredentials.ServerHandshake(c.Conn)
	if err != nil {
		return nil, nil, err
	}
	c.open(top)
	return c, identity{info, c}, nil
}

func (h handshake) Clone() credentials.TransportCredentials {
	return handshake{h.TransportCredentials.Clone(), h.s}
}
