package extproc

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"tandem/extproc/concurrent"
	"tandem/extproc/core"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/reclaim"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/internal/memory"
	"tandem/kvstate"
)

// Server answers Envoy. It is safe for concurrent use.
type Server struct {
	core.Options
	draining chan struct{}
	replan   *replan.Port
	pairs    *concurrent.Pairs
	streams  streamOptions
	loggers  envoywire.Loggers
	Risky    envoywire.Risky // Envoys whose release has a known fault
	scratch  sync.Pool       // of *scratch

	// of the core
	passes   *pass.Shared
	journeys *journey.Shared
	observer *telemetry.Observer
	reclaim  *reclaim.Reclaimer
	guard    *guard.Guard
	faults   *faults.Faults
	started  time.Time
}

// New returns a server of the core. It starts no goroutines.
func New(c *core.Core) *Server {
	s := &Server{
		Options: c.Options, draining: c.Draining, pairs: &concurrent.Pairs{},
		passes: c.Passes, journeys: c.Journeys, observer: c.Observer, reclaim: c.Reclaim, guard: c.Guard,
		faults: c.Faults, started: c.Started,
	}
	s.streams = streamOptions{
		memory: c.Memory, bodies: memory.NewBodies(c.Memory), guard: s.guard, bodyTimeout: c.BodyTimeout,
		gateway: c.Picker != nil, refused: s.observer.Refused,
	}
	s.replan = replan.NewPort(s.journeys, s.pairs, s.draining, c.MaxBodyBytes)
	s.scratch.New = func() any { return newScratch(s) }
	return s
}

// Codec returns the codec of the gRPC server that serves this package.
func Codec() encoding.CodecV2 { return envoywire.NewCodec() }

// BufferPool returns the pool that this gRPC server should read into.
func BufferPool() mem.BufferPool { return envoywire.BufferPool() }

// Register adds the external processor and the access log service to a gRPC server made with [Codec].
func (s *Server) Register(r grpc.ServiceRegistrar) {
	r.RegisterService(&grpc.ServiceDesc{
		ServiceName: ServiceName,
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Process", ServerStreams: true, ClientStreams: true,
			Handler: func(_ any, stream grpc.ServerStream) error { return s.process(stream) }}},
		Metadata: "envoy/service/ext_proc/v3/external_processor.proto",
	}, nil)
	r.RegisterService(&grpc.ServiceDesc{
		ServiceName: accessLogService,
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "StreamAccessLogs", ClientStreams: true,
			Handler: func(_ any, stream grpc.ServerStream) error { return s.streamAccessLogs(stream) }}},
		Metadata: "envoy/service/accesslog/v3/als.proto",
	}, nil)
}

// ServiceName is the external processor's full gRPC name, which health checks ask for.
const ServiceName = "envoy.service.ext_proc.v3.ExternalProcessor"

const accessLogService = "envoy.service.accesslog.v3.AccessLogService"

// Streaming methods of the services, which may have separate limits. Envoy has one access log stream for each
// worker and log.
const (
	ProcessMethod   = "/" + ServiceName + "/Process"
	AccessLogMethod = "/" + accessLogService + "/StreamAccessLogs"
)

// scratch is the memory of one stream, which later ones reuse.
type scratch struct {
	s         *Server
	stream    stream
	telemetry telemetry.Meter
	pass      pass.Pass
	legs      journey.Legs
	spoiled   bool // a panic may have left it in any state
}

func newScratch(s *Server) *scratch {
	m := &scratch{s: s, stream: stream{streamOptions: &s.streams}, telemetry: telemetry.Meter{Observer: s.observer}}
	s.passes.Begin(&m.pass, &m.stream, &m.telemetry)
	s.journeys.Begin(&m.legs, &m.pass)
	return m
}

// process serves one ext_proc stream.
func (s *Server) process(grpcStream grpc.ServerStream) error {
	m := s.scratch.Get().(*scratch)
	x := &m.stream
	x.begin(grpcStream, s.passes.Headers(), s.passes.Lenient())
	defer m.release()

	role := s.roleOf(grpcStream.Context())
	m.telemetry.Begin(role, s.Tracer)
	err := m.serveGuarded(role)
	m.telemetry.EndSpan(errorCode(err, grpcStream.Context().Err() != nil))
	if err == nil {
		m.telemetry.Processed(role)
		return nil
	}
	if errors.Is(err, errAnswered) {
		return nil
	}
	if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled || grpcStream.Context().Err() != nil {
		return nil // Envoy ended the stream before a decision: the client left, or the hop failed outright
	}
	return s.refuse(x, role, err)
}

// serveGuarded serves the stream. A panic becomes this stream's error, and its memory is not reused.
func (m *scratch) serveGuarded(role string) (err error) {
	defer func() {
		if v := recover(); v != nil {
			m.spoiled = true
			err = m.s.guard.Caught("ext_proc "+role, v)
		}
	}()
	return m.serve(role)
}

// serve lets the handler of a filter role serve the stream.
func (m *scratch) serve(role string) error {
	shared := handler{&m.stream, &m.telemetry, m.s}
	switch role {
	case names.RolePrefillLeg:
		return prefillLeg{shared, &m.pass.Prefilled, &m.legs}.serve()
	case names.RoleDecodeLeg:
		return decodeLeg{pairLeg{shared}}.serve()
	case names.RoleMirror:
		return mirroredLeg{pairLeg{shared}, &m.pass.Prefilled, &m.legs}.serve()
	case names.RoleAnswerLeg:
		return answerLeg{pairLeg{shared}}.serve()
	case names.RoleEncodeLeg:
		return encodeLeg{shared, &m.pass.Req.Client, &m.pass.Prefilled, &m.legs}.serve()
	case names.RoleSwitched:
		return shared.switched()
	case names.RolePicker:
		return endpointPicker{shared, &m.pass}.serve()
	}
	return mainRole{shared, &m.pass, &m.legs}.serve()
}

// errorCode returns the code of the client's error; "": none; gone: the client's stream had ended.
func errorCode(err error, gone bool) string {
	if err == nil || errors.Is(err, errAnswered) {
		return ""
	}
	if e, ok := errors.AsType[*openai.Error](err); ok {
		return e.Code
	}
	if gone || errors.Is(err, io.EOF) {
		return "client_gone"
	}
	return "internal_error"
}

// errAnswered ends a stream that was answered already.
var errAnswered = errors.New("answered")

// roleOf returns the role of the filter that a stream comes from.
func (s *Server) roleOf(ctx context.Context) string {
	role := names.RoleMain
	// copies this value only
	if values := metadata.ValueFromIncomingContext(ctx, names.MetadataRole); len(values) > 0 {
		role = values[0]
	}
	switch role {
	case names.RolePrefillLeg, names.RoleDecodeLeg, names.RoleMirror, names.RoleAnswerLeg,
		names.RoleEncodeLeg, names.RoleSwitched:
		return role
	}
	if s.Picker != nil {
		return names.RolePicker
	}
	return names.RoleMain
}

// refuse turns an error into the client's answer.
func (s *Server) refuse(x *stream, role string, err error) error {
	var e *openai.Error
	if !errors.As(err, &e) {
		s.Log.Error("request failed", "role", role, "request_id", x.requestID, "err", err)
		e = openai.Internal()
	}
	if len(x.msg.Headers.Ticket) > 0 {
		s.observer.GivenUp(e)
	} else {
		s.observer.Refused(e)
	}
	return x.sendError(e, role == names.RoleAnswerLeg)
}

// release prepares the memory for the next stream.
func (m *scratch) release() {
	m.stream.stopBodyTime()
	m.pass.Reset()
	m.telemetry.Reset()
	m.stream.reset()
	if !m.spoiled {
		m.s.scratch.Put(m)
	}
}

// Run does the server's periodic work until ctx ends. The core has its own.
func (s *Server) Run(ctx context.Context) { s.streams.bodies.Run(ctx) }

// Replan handles the second try of a hop that failed outright.
func (s *Server) Replan() http.Handler { return s.replan }

// Envoy's access log reports how a hop ended. An Envoy that is killed or stopped reports nothing any more, and the
// reservations of its requests would stay until they expire. So a reservation refers to the connection that it was
// made over, and ends with it. (If a connection ends for another reason while its requests go on, their load is
// missing as long as they run, which is the lesser evil.)

// Sources wraps the listener of a gRPC server that serves this package: with it, reservations end with the Envoy
// that they were made for. The peer's address identifies a stream's connection, which costs the stream nothing.
func Sources(l net.Listener) net.Listener { return sources{l} }

type sources struct{ net.Listener }

func (l sources) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &sourceConn{Conn: c, addr: sourceAddr{Addr: c.RemoteAddr()}}, nil
}

// sourceConn is a connection whose remote address carries its source. The gRPC server closes a connection before it
// cancels the connection's streams, so the handler of a canceled stream can tell by the source whether the
// connection still exists.
type sourceConn struct {
	net.Conn
	addr sourceAddr
}

type sourceAddr struct {
	net.Addr
	source kvstate.Source
}

func (c *sourceConn) RemoteAddr() net.Addr { return &c.addr }

func (c *sourceConn) Close() error {
	c.addr.source.Gone()
	return c.Conn.Close()
}

// sourceOf returns the connection of a stream; nil if the server's listener is not of [Sources].
func sourceOf(ctx context.Context) *kvstate.Source {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	if a, ok := p.Addr.(*sourceAddr); ok {
		return &a.source
	}
	return nil
}
