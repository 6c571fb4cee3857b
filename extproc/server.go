package extproc

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/internal/memory"
	"tandem/kvstate"
)

// Options are what a Server needs to know. Zero durations and sizes take the defaults named.
type Options struct {
	State  *kvstate.State
	Log    *slog.Logger
	Tracer trace.Tracer // nil: no traces
	Live                // to begin with; every pool of State has a policy

	Tokenizer Tokenizer // for pools whose tokens are not learned alone; may be nil

	SplitBodyBytes int            // larger bodies are never split, because Envoy could not replay them; default 16 MiB
	MaxBodyBytes   int            // larger bodies are refused with 413; default 4 x SplitBodyBytes
	HeldBytes      int            // of bodies in memory at one time, over all streams; more is refused with 503; default 1 GiB
	Memory         *memory.Budget // the same, shared with others that count what they hold; nil: one of HeldBytes
	BodyTimeout    time.Duration  // how long a request's body may take to arrive; default 5 m
	TicketTTL      time.Duration  // how long a leg's ticket is good for; default 10 m
	HandOverTTL    time.Duration  // how long KV parameters are good for after P's answer; default 20 s, below vLLM's 30 s lease
	MaxRedirects   int            // Envoy's max_internal_redirects; the server's own budget ends below; default 8

	DecisionMetadata bool                    // say every decision in dynamic metadata too
	Operator         func(token []byte) bool // who may have decisions explained in a header; nil: nobody

	Check func(*kvstate.Endpoint) // asks an endpoint soon how it is, and marks it as failed if it is not well; nil: it is marked at once

	PathPrefixes []string // that gateways in front add to paths

	Picker *PickerOptions // not nil: serve the Endpoint Picker protocol in place of the main role
}

// Policy is what a pool wants done with its requests.
type Policy struct {
	plan.Policy

	Peers         *kvtransfer.Peers // the prefill engines that are known; nil: the dialect does not need to know them
	Session       SessionKey
	LearnTokens   bool          // ask prefill for the prompt's token ids, which KV events are matched with
	Tokens        TokenSource   // who else is asked for them
	TokenBudget   time.Duration // how long a request waits for that; 0: not at all
	PrefillCached bool          // clients are told what prefill had in its cache, not decode
	CleanupDecode bool          // have orphaned hand-overs fetched by a decode endpoint
	Waiting       Waiting       // with Place.Late, or where objectives have requests wait
	Objectives    Objectives
	Paths         *Paths         // what clients may ask for beside the APIs; default: the paths of clients of all engines
	LabelHeader   string         // a request header that says which labels its endpoints must bear; "": none does
	Priorities    EnginePriority // how engines are told of a request's place among others

	room *waitingRoom // nil: requests do not wait
}

func (p Policy) withDefaults() Policy {
	if p.Paths == nil {
		p.Paths, _ = NewPaths("any", nil) // no paths to refuse
	}
	p.Policy = p.WithDefaults()
	return p
}

// limits returns the limits that every pool shares.
func (s *Server) limits() plan.Limits {
	return plan.Limits{SplitBodyBytes: s.SplitBodyBytes, MaxRedirects: s.MaxRedirects}
}

// Server answers Envoy. It is safe for concurrent use.
type Server struct {
	Options
	live     atomic.Pointer[inForce]
	metrics  *telemetry.Metrics
	started  time.Time
	scratch  sync.Pool // of *scratch
	draining chan struct{}
	hedges   hedges
	reclaim  *reclaim.Reclaimer
	recent   *telemetry.Recent
	pairs    *pairs
	seed     uint64 // of reservation ids
	direct   *directCalls
	guard    *guard.Guard
}

// New returns a server over the options' state. It starts nothing.
func New(o Options, m *telemetry.Metrics) *Server {
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
		Options: o, metrics: m, started: time.Now(), draining: make(chan struct{}), hedges: hedges{held: map[[16]byte]*hedge{}},
		recent: telemetry.NewRecent(), pairs: newPairs(), seed: random(), guard: guard.New(o.Log, m.Panicked),
	}
	s.direct = newDirectCalls()
	if o.State != nil {
		o.State.OnTransferFailed(func(p *kvstate.Pool, prefill, decode string) { s.loadFailed(p, prefill, decode, loadCount) })
	}
	s.reclaim = reclaim.New(reclaim.Options{State: o.State, Log: o.Log, Observer: m, TTL: o.HandOverTTL, Policy: func(pool string) reclaim.Policy {
		policy, _ := s.policy(pool)
		return reclaim.Policy{Cleanup: policy.CleanupDecode, Dialect: policy.Dialect, Place: policy.Placement()}
	}})
	s.Apply(o.Live)
	s.Options.Live = Live{} // nobody is to read what it was once
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

// Streaming methods of the services, which may be limited apart. Envoy has one access log stream for each worker and log.
const (
	ProcessMethod   = "/" + ServiceName + "/Process"
	AccessLogMethod = "/" + accessLogService + "/StreamAccessLogs"
)

// scratch is the memory of one stream, reused by later ones.
type scratch struct {
	stream    stream
	telemetry telemetry.Meter
	request   planning
	prefill   prefillAnswer
	spoiled   bool // a panic may have left anything in it
}

func newScratch(s *Server) *scratch {
	m := &scratch{stream: stream{s: s}, telemetry: telemetry.Meter{Metrics: s.metrics}}
	shared := handler{&m.stream, &m.telemetry}
	m.request.handler, m.prefill.handler = shared, shared
	return m
}

// process serves one ext_proc stream.
func (s *Server) process(grpcStream grpc.ServerStream) error {
	m := s.scratch.Get().(*scratch)
	x := &m.stream
	x.begin(grpcStream, s.live.Load().names)
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
		return nil // Envoy let go before a decision was due: the client left, or the hop failed outright
	}
	return s.refuse(x, role, err)
}

// serveGuarded serves the stream. A panic becomes the error of this stream, whose memory is not used again.
func (m *scratch) serveGuarded(role string) (err error) {
	defer func() {
		if v := recover(); v != nil {
			m.spoiled = true
			err = m.stream.s.guard.Caught("ext_proc "+role, v)
		}
	}()
	return m.serve(role)
}

// serve has the handler of a filter role serve the stream.
func (m *scratch) serve(role string) error {
	shared := m.request.handler
	switch role {
	case envoywire.RolePrefillLeg:
		return prefillLeg{&m.prefill}.serve()
	case envoywire.RoleDecodeLeg:
		return decodeLeg{pairLeg{shared}}.serve()
	case envoywire.RoleMirror:
		return mirroredLeg{pairLeg{shared}}.serve()
	case envoywire.RoleAnswerLeg:
		return answerLeg{pairLeg{shared}}.serve()
	case envoywire.RoleEncodeLeg:
		return encodeLeg{shared, &m.request.req}.serve()
	case envoywire.RoleSwitched:
		return m.request.switched()
	case envoywire.RolePicker:
		return endpointPicker{firstPass{&m.request}}.serve()
	}
	return mainRole{&m.request, &m.prefill}.serve()
}

// errorCode returns the code of the error that a client gets, "" where it gets none; gone: its stream ended before.
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

// errAnswered ends a stream whose answer was already given.
var errAnswered = errors.New("answered")

// roleOf returns the role of the filter that a stream comes from.
func (s *Server) roleOf(ctx context.Context) string {
	role := envoywire.RoleMain
	if values := metadata.ValueFromIncomingContext(ctx, envoywire.MetadataRole); len(values) > 0 { // copies this value alone
		role = values[0]
	}
	switch role {
	case envoywire.RolePrefillLeg, envoywire.RoleDecodeLeg, envoywire.RoleMirror, envoywire.RoleAnswerLeg, envoywire.RoleEncodeLeg, envoywire.RoleSwitched:
		return role
	}
	if s.Picker != nil {
		return envoywire.RolePicker
	}
	return envoywire.RoleMain
}

// refuse turns an error into the answer the client gets.
func (s *Server) refuse(x *stream, role string, err error) error {
	var e *openai.Error
	if !errors.As(err, &e) {
		s.Log.Error("request failed", "role", role, "request_id", x.requestID, "err", err)
		e = openai.Internal()
	}
	s.metrics.Refused(e)
	return x.sendError(e, role == envoywire.RoleAnswerLeg)
}

// release makes the memory ready for the next stream.
func (m *scratch) release() {
	m.stream.stopBodyTime()
	m.request.landed()
	m.request.reset()
	m.prefill.reset()
	m.telemetry.Reset()
	m.stream.reset()
	if !m.spoiled {
		m.stream.s.scratch.Put(m)
	}
}

// random is where the picker's ties are broken.
func random() uint64 { return rand.Uint64() }

// Drain lets go of the streams that would never end by themselves. Call it once, before a graceful stop of the gRPC
// server.
func (s *Server) Drain() { close(s.draining) }

// Run does the server's regular work until ctx ends: expired reservations, tickets and hand-overs are swept, orphaned ones
// reclaimed.
func (s *Server) Run(ctx context.Context) {
	var workers sync.WaitGroup
	defer workers.Wait()
	workers.Go(func() { s.reclaim.Run(ctx) })
	workers.Go(func() { s.metrics.PruneSeries(ctx, s.State) })
	s.State.Run(ctx)
}

// Recent returns the traces of the latest requests, newest first, at most n.
func (s *Server) Recent(n int) []telemetry.Trace { return s.recent.Latest(n) }
