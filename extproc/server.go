package extproc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"tandem/extproc/concurrent"
	"tandem/extproc/endpointpicker"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/latebinding"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/internal/guard"
	"tandem/internal/memory"
	"tandem/kvstate"
)

// Options are the options of a Server. Zero durations and sizes mean the defaults named.
type Options struct {
	State    *kvstate.State
	Log      *slog.Logger
	Tracer   trace.Tracer  // nil: no traces
	Settings pass.Settings // initial settings; every pool of State needs a policy

	Tokenizer pass.Tokenizer // for pools whose policy has a token source; may be nil

	SplitBodyBytes int            // larger bodies are never split, because Envoy could not replay them; default 16 MiB
	MaxBodyBytes   int            // larger bodies are refused with 413; default 4 x SplitBodyBytes
	HeldBytes      int            // of all bodies in memory; more is refused with 503; default 1 GiB
	Memory         *memory.Budget // the same, shared with other users of memory; nil: one of HeldBytes
	BodyTimeout    time.Duration  // how long receiving a request's body may take; default 5 m
	TicketTTL      time.Duration  // lifetime of a leg's ticket; default 10 m
	HandOverTTL    time.Duration  // lifetime of KV parameters after P's answer, a third of their lease at most; default 20 s
	MaxRedirects   int            // Envoy's max_internal_redirects; the server plans for fewer; default 8

	DecisionMetadata bool                    // also write decisions into dynamic metadata
	Operator         func(token []byte) bool // reports whether a token may ask for decisions in a header; nil: none may

	// checks an endpoint's health soon, and marks it as failed if the check fails; nil: it is marked at once
	Check  func(*kvstate.Endpoint)
	Models pass.ModelAsker // nil: engines are not asked for the models of requests

	PathPrefixes []string // that gateways in front add to paths

	Picker *endpointpicker.Options // not nil: serve the Endpoint Picker protocol instead of the main role
}

// Server answers Envoy. It is safe for concurrent use.
type Server struct {
	Options
	passes   *pass.Shared
	observer *telemetry.Observer
	started  time.Time
	scratch  sync.Pool // of *scratch
	draining chan struct{}
	replan   *replan.Port
	reclaim  *reclaim.Reclaimer
	pairs    *concurrent.Pairs
	guard    *guard.Guard
	streams  streamOptions
	loggers  envoywire.Loggers
	faults   faults.Faults
	journeys *journey.Shared
}

// New returns a server over the options' state. It starts no goroutines.
func New(o Options, m *telemetry.Metrics) *Server { return newServer(o, m, false) }

// NewInside is New for an Envoy that has Tandem loaded, and asks by no gRPC: package carrier makes the passes.
func NewInside(o Options, m *telemetry.Metrics) (*Server, *pass.Shared) {
	s := newServer(o, m, true)
	return s, s.passes
}

func newServer(o Options, m *telemetry.Metrics, inside bool) *Server {
	orDefault(&o.SplitBodyBytes, 16<<20)
	orDefault(&o.MaxBodyBytes, 4*o.SplitBodyBytes)
	orDefault(&o.HeldBytes, 1<<30)
	if o.Memory == nil {
		o.Memory = memory.New(int64(o.HeldBytes))
	}
	orDefault(&o.BodyTimeout, 5*time.Minute)
	orDefault(&o.TicketTTL, 10*time.Minute)
	orDefault(&o.HandOverTTL, 20*time.Second)
	orDefault(&o.MaxRedirects, 8)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		Options: o, observer: telemetry.NewObserver(m, o.Log), started: time.Now(), draining: make(chan struct{}),
		pairs: concurrent.NewPairs(), guard: guard.New(o.Log, m.Panicked),
	}
	if m != nil && m.Usage != nil && o.State != nil {
		m.Usage.Serves = func(pool, model string) bool {
			p := o.State.Pool(pool)
			return p != nil && p.Serves(model)
		}
	}
	if m != nil && m.Usage != nil {
		m.Usage.Promised = func(pool string) usage.Promise {
			policy, _ := s.passes.Policy(pool)
			promise := policy.Placement().Promise
			return usage.Promise{FirstToken: kvstate.Seconds(promise.TTFT), PerToken: kvstate.Seconds(promise.TPOT)}
		}
	}
	s.streams = streamOptions{
		memory: o.Memory, bodies: memory.NewBodies(o.Memory), guard: s.guard, bodyTimeout: o.BodyTimeout, gateway: o.Picker != nil,
		refused: s.observer.Refused,
	}
	s.faults = faults.Faults{State: o.State, Observer: s.observer, Log: o.Log, Check: o.Check}
	if o.State != nil {
		o.State.OnExpired(func(e *kvstate.Endpoint, n int64) {
			s.observer.Expired(e.Addr, n)
			s.Log.Warn("an engine freed KV that no other had fetched in time", "endpoint", e.Addr, "requests", n)
		})
		o.State.KVLoads.OnTransferFailed(func(p *kvstate.Pool, prefill, decode string) {
			s.faults.LoadFailed(p, prefill, decode, faults.SeenCount)
		})
	}
	s.reclaim = reclaim.New(reclaim.Options{
		State: o.State, Log: o.Log, Observer: s.observer, TTL: o.HandOverTTL,
		Policy: func(pool string) reclaim.Policy {
			policy, _ := s.passes.Policy(pool)
			return reclaim.Policy{Cleanup: policy.CleanupDecode, Dialect: policy.Dialect, Place: policy.Placement()}
		},
	})
	passes := pass.Options{
		State: o.State, Log: o.Log, Guard: s.guard, Observer: s.observer, Faults: &s.faults, Reclaim: s.reclaim,
		Waiting: latebinding.Options{
			State: o.State, Guard: s.guard, Observer: s.observer, Started: s.started, Draining: s.draining,
			ShortOfMemory: s.shortOfMemory,
		},
		Models: o.Models, Tokenizer: o.Tokenizer, Operator: o.Operator, HandOverTTL: o.HandOverTTL,
		Inside: inside,
		Limits: plan.Limits{SplitBodyBytes: o.SplitBodyBytes, MaxRedirects: o.MaxRedirects, TicketTTL: o.TicketTTL,
			Models: m != nil && m.Usage != nil},
	}
	if o.Picker != nil {
		passes.Gateway = &plan.GatewayOptions{Fallbacks: o.Picker.Fallbacks, ShedRequests: o.Picker.ShedRequests}
	}
	s.passes = pass.New(passes)
	s.journeys = &journey.Shared{Passes: s.passes, Tracer: o.Tracer}
	s.replan = replan.NewPort(s.journeys, s.pairs, s.draining, o.MaxBodyBytes)
	s.Apply(o.Settings)
	s.Options.Settings = pass.Settings{} // the initial settings must not be read later
	s.scratch.New = func() any { return newScratch(s) }
	return s
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
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

// random makes ids and seeds, and breaks the picker's ties.
func random() uint64 { return rand.Uint64() }

// Drain ends the streams that never end by themselves. Call it once, before a graceful stop of the gRPC server.
func (s *Server) Drain() { close(s.draining) }

// Run does the server's periodic work until ctx ends: it removes expired reservations, tickets and hand-overs, and
// reclaims orphaned ones.
func (s *Server) Run(ctx context.Context) {
	var workers sync.WaitGroup
	defer workers.Wait()
	workers.Go(func() { s.reclaim.Run(ctx) })
	workers.Go(func() { s.streams.bodies.Run(ctx) })
	workers.Go(func() { s.observer.PruneSeries(ctx, s.State) })
	s.State.Run(ctx)
}

// Recent returns the traces of the latest requests, newest first, at most n.
func (s *Server) Recent(n int) []telemetry.Trace { return s.observer.Latest(n) }

// Replan handles the second try of a hop that failed outright.
func (s *Server) Replan() http.Handler { return s.replan }

// Apply replaces the settings, for requests in progress as well.
func (s *Server) Apply(l pass.Settings) { s.passes.Apply(l) }

// Settings returns the current settings. Do not modify.
func (s *Server) Settings() pass.Settings { return s.passes.Settings() }

// Explain returns where a request with so many uncached prompt tokens would be placed in a pool now.
func (s *Server) Explain(pool string, promptTokens int64) (pass.Explanation, error) {
	return s.passes.Explain(pool, promptTokens)
}

// shortOfMemory reports whether so much of the memory for bodies is in use that no request should wait with its body.
func (s *Server) shortOfMemory() bool { return s.Memory.Load() > s.Memory.Limit()/4*3 }

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
