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
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Options are what a Server needs to know. Zero durations and sizes take the defaults named.
type Options struct {
	State  *kvstate.State
	Log    *slog.Logger
	Tracer trace.Tracer // nil: no traces
	Live                // to begin with; every pool of State has a policy

	Tokenizer Tokenizer // for pools whose tokens are not learned alone; may be nil

	SplitBodyBytes int           // larger bodies are never split, because Envoy could not replay them; default 16 MiB
	MaxBodyBytes   int           // larger bodies are refused with 413; default 4 x SplitBodyBytes
	HeldBytes      int           // of bodies in memory at one time, over all streams; more is refused with 503; default 1 GiB
	BodyTimeout    time.Duration // how long a request's body may take to arrive; default 5 m
	TicketTTL      time.Duration // how long a leg's ticket is good for; default 10 m
	HandOverTTL    time.Duration // how long KV parameters are good for after P's answer; default 20 s, below vLLM's 30 s lease
	MaxRedirects   int           // Envoy's max_internal_redirects; the server's own budget ends below; default 8

	DecisionMetadata bool                    // say every decision in dynamic metadata too
	Operator         func(token []byte) bool // who may have decisions explained in a header; nil: nobody

	Picker *PickerOptions // not nil: serve the Endpoint Picker protocol in place of the main role
}

// Policy is what a pool wants done with its requests.
type Policy struct {
	Dialect         kvtransfer.Dialect    // nil: one hop for everything, unless there is
	Concurrent      kvtransfer.Concurrent // the dialect, where both legs run at once
	Peers           *kvtransfer.Peers     // who the prefill engines are; nil: the dialect does not need to know
	Split           bool
	Place           picker.Policy // of what may be split; without a model: the default one, and all is split
	RefuseLong      bool          // bodies over SplitBodyBytes get 413 instead of decode alone
	OnFailure       OnFailure     // of a prefill
	PrefillAttempts int           // at most, over all passes; default 3
	AttemptsTime    time.Duration // after this, counted from when the request came, no other endpoint is tried; default 1 m
	PrefillTimeout  time.Duration // time limit of the prefill hop: this ...
	PerToken        time.Duration // ... and this for every token of the prompt and of what is before it, until the speed is known
	EncodeTimeout   time.Duration // time limit of the encode hop; 0: media are encoded by whoever prefills
	Session         SessionKey
	LearnTokens     bool          // ask prefill for the prompt's token ids, which KV events are matched with
	Tokens          TokenSource   // who else is asked for them
	TokenBudget     time.Duration // how long a request waits for that; 0: not at all
	PrefillCached   bool          // clients are told what prefill had in its cache, not decode
	CleanupDecode   bool          // have stranded hand-overs fetched by a decode endpoint
	Handoff         Handoff       // who makes the second hop
	StreamStart     time.Duration // how long a streamed answer may take to begin, beside PerToken where D computes the prompt; default 1 m
	WholeAnswer     time.Duration // how long an answer that is not streamed may take, beside the same; 0: as long as Envoy lets it
	Waiting         Waiting       // with Place.Late, or where objectives have requests wait
	Objectives      Objectives
	LabelHeader     string         // a request header that says which labels its endpoints must bear; "": none does
	Priorities      EnginePriority // how engines are told of a request's place among others

	room *waitingRoom // nil: requests do not wait
}

func (p Policy) withDefaults() Policy {
	orDefault(&p.PrefillAttempts, 3)
	orDefault(&p.AttemptsTime, time.Minute)
	orDefault(&p.StreamStart, time.Minute)
	return p
}

// OnFailure says what follows a failed prefill.
type OnFailure uint8

// The policies of a pool's onPrefillFailure.
const (
	OtherPrefill OnFailure = iota // another prefill endpoint while there is one, then decode alone
	DecodeAlone                   // decode alone at once
	Fail                          // 503
)

// Server answers Envoy. It is safe for concurrent use.
type Server struct {
	Options
	live      atomic.Pointer[inForce]
	metrics   *Metrics
	started   time.Time
	exchanges sync.Pool
	draining  chan struct{}
	cleanups  chan cleanup
	cleaning  atomic.Int64 // bytes of parameters in cleanups
	handed    handedOut
	recent    *recent
	pairs     *pairs
	seed      uint64 // of reservation ids
	held      atomic.Int64
	direct    *directCalls
}

// New returns a server over the options' state. It starts nothing.
func New(o Options, m *Metrics) *Server {
	orDefault(&o.SplitBodyBytes, 16<<20)
	orDefault(&o.MaxBodyBytes, 4*o.SplitBodyBytes)
	orDefault(&o.HeldBytes, 1<<30)
	orDefault(&o.BodyTimeout, 5*time.Minute)
	orDefault(&o.TicketTTL, 10*time.Minute)
	orDefault(&o.HandOverTTL, 20*time.Second)
	orDefault(&o.MaxRedirects, 8)
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{
		Options: o, metrics: m, started: time.Now(), draining: make(chan struct{}), cleanups: make(chan cleanup, maxCleanups),
		recent: newRecent(), pairs: newPairs(), seed: random(),
	}
	s.direct = newDirectCalls()
	s.Apply(o.Live)
	s.Options.Live = Live{} // nobody is to read what it was once
	s.exchanges.New = func() any { return &exchange{s: s} }
	return s
}

func orDefault[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Codec is what a gRPC server serving this package must read and write messages with.
func Codec() encoding.CodecV2 { return newCodec() }

// Inline reports whether a method ("/service/method") may run on the goroutine that reads the connection: it is quick, and says when
// it is about to wait (mayWait).
func Inline(method string) bool { return method == "/"+ServiceName+"/Process" }

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
		ServiceName: "envoy.service.accesslog.v3.AccessLogService",
		HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "StreamAccessLogs", ClientStreams: true,
			Handler: func(_ any, stream grpc.ServerStream) error { return s.streamAccessLogs(stream) }}},
		Metadata: "envoy/service/accesslog/v3/als.proto",
	}, nil)
}

// ServiceName is the external processor's full gRPC name, which health checks ask for.
const ServiceName = "envoy.service.ext_proc.v3.ExternalProcessor"

// exchange is one ext_proc stream and everything it needs, reused by later streams.
type exchange struct {
	s      *Server
	stream grpc.ServerStream
	msg    message
	body   bodyBuffer // the body as received, then as the client sent it
	held   int64      // bytes counted for it ...
	beside int64      // ... and of them, those of what is kept beside it
	spare  bodyBuffer // the next body while it is made
	other  bool       // the body is not the one that Envoy has: control members were cut, or a leg's edits undone

	req         openai.Request
	patch       openai.Patch
	undo        openai.Edits
	view        kvstate.View
	picker      picker.Picker
	hashes      []uint64
	known       kvstate.KnownTokens // of the prompt
	ids         []uint32            // scratch for token ids
	tokenHashes []uint64            // scratch for their blocks
	params      []byte              // scratch for the decode member
	pair        kvtransfer.Pair
	source      kvtransfer.Side // that pair.Source points at

	requestID string
	bookedAs  string // the request id as Envoy has it, and logs it, until it has taken the first answer in
	session   uint64 // hash of its name; 0: none
	waits     waiter
	waited    time.Duration // for its endpoints
	stoodBy   stoodBy       // what it waited for
	priority  int32         // of the request
	wanted    []string      // labels of its endpoints
	work      time.Duration // of its prefill, as the model has it
	price     float64       // of the choice, s

	explanation []byte // for a header; nil: nobody asked who may
	decision    []byte // dynamic metadata; nil: none
	newID       bool   // the client's request id was absent or unfit
	headers     headerEdits
	pieces      pieces
	timer       *time.Timer
	role        uint8         // 0: main, 1: prefill leg
	began       time.Time     // the stream
	noMemory    bool          // for what receiveAnswer was to read
	since       time.Time     // when the phase of work began that is under way (did)
	busy        time.Duration // time of all phases but those of waiting
	span        trace.Span    // nil: not traced
	traced      exemplar      // of the span; nil: not traced
	goesOn      carrier       // the trace context that the request goes on with, where Envoy has none of its own
	sending     sync.Mutex    // between the body's deadline and the handler
	answered    bool
}

// process serves one ext_proc stream.
func (s *Server) process(stream grpc.ServerStream) error {
	x := s.exchanges.Get().(*exchange)
	x.sending.Lock() // a deadline of the stream before may just be finding out that it came too late
	x.stream, x.answered = stream, false
	x.msg.headers.names = s.live.Load().names
	x.sending.Unlock()
	defer x.release()

	x.began = time.Now()
	x.since, x.busy, x.role = x.began, 0, 0
	role, serve := "main", x.route
	switch filterRole(stream.Context()) {
	case rolePrefillLeg:
		role, serve, x.role = rolePrefillLeg, x.prefillLeg, 1
	case roleDecodeLeg:
		role, serve, x.role = roleDecodeLeg, x.decodeLeg, 2
	case roleMirror:
		role, serve, x.role = roleMirror, x.mirroredLeg, 3
	case roleAnswerLeg:
		role, serve, x.role = roleAnswerLeg, x.answerLeg, 4
	case roleEncodeLeg:
		role, serve, x.role = roleEncodeLeg, x.encodeLeg, 5
	default:
		if s.Picker != nil {
			role, serve = rolePicker, x.serveAsPicker
		}
	}
	if role != "main" && role != rolePrefillLeg {
		x.mayWait() // for the other leg, or for as long as the request takes
	}
	err := serve()
	x.endSpan(err)
	if err == nil {
		s.metrics.processed(role, x.since.Sub(x.began), x.busy, x.traced)
		return nil
	}
	if errors.Is(err, errAnswered) {
		return nil
	}
	if errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled || stream.Context().Err() != nil {
		return nil // Envoy let go before a decision was due: the client left, or the hop failed outright
	}
	return s.refuse(x, role, err)
}

// errAnswered ends an exchange whose answer was already given.
var errAnswered = errors.New("answered")

// filterRole is which of Envoy's filters a stream comes from; "" is the main listener's.
func filterRole(ctx context.Context) string {
	values := metadata.ValueFromIncomingContext(ctx, metadataRole) // copies this value alone
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// refuse turns an error into the answer the client gets.
func (s *Server) refuse(x *exchange, role string, err error) error {
	var e *openai.Error
	if !errors.As(err, &e) {
		s.Log.Error("request failed", "role", role, "request_id", x.requestID, "err", err)
		e = openai.Internal()
	}
	s.metrics.refused(e)
	return x.sendError(e, role == roleAnswerLeg)
}

// release makes the exchange ready for the next stream.
func (x *exchange) release() {
	x.stopBodyTime()
	x.landed()
	x.waits, x.waited, x.stoodBy = waiter{hits: x.waits.hits[:0]}, 0, stoodBy{}
	x.body.free()
	x.spare.free()
	x.s.held.Add(-x.held)
	x.held, x.beside = 0, 0
	arena := x.msg.arena[:0]
	if cap(arena) > 64<<10 {
		arena = nil
	}
	x.msg = message{arena: arena}
	x.headers.reset()
	x.req.Reset()
	clear(x.undo) // refers to the body
	x.pair, x.source = kvtransfer.Pair{}, kvtransfer.Side{}
	if cap(x.params) > 64<<10 {
		x.params = nil
	}
	x.requestID, x.bookedAs, x.newID, x.other, x.session = "", "", false, false, 0
	x.goesOn, x.traced, x.known = carrier{}, nil, kvstate.KnownTokens{}
	x.price, x.explanation, x.decision, x.wanted = 0, nil, nil, nil
	x.s.exchanges.Put(x)
}

// receive reads the next message.
func (x *exchange) receive() error { return x.stream.RecvMsg(&x.msg) }

// mayWait says that the handler is about to wait for something other than its stream, or to work for long, so that a server that runs
// handlers on the goroutine that reads their connection (internal/rpc) has another one read it meanwhile.
func (x *exchange) mayWait() {
	if s, ok := x.stream.(interface{ MayWait() }); ok {
		s.MayWait()
	}
}

// mayAskOthers says so where other replicas may have to be asked.
func (x *exchange) mayAskOthers() {
	if x.s.State.Shared() {
		x.mayWait()
	}
}

// spend is [kvstate.State.Spend] of a ticket.
func (x *exchange) spend(t *kvtransfer.Ticket) bool {
	x.mayAskOthers()
	return x.s.State.Spend(t.ID)
}

// takeHandOver is [kvstate.State.TakeHandOver] of what a ticket refers to.
func (x *exchange) takeHandOver(t *kvtransfer.Ticket) ([]byte, bool) {
	x.mayAskOthers()
	return x.s.State.TakeHandOver(t.ParamsRef)
}

// send writes one reply, unless the deadline has already answered.
func (x *exchange) send(r *reply) error {
	x.sending.Lock()
	defer x.sending.Unlock()
	if x.answered {
		r.parts.Free()
		return io.EOF
	}
	return x.stream.SendMsg(r)
}

// sendError answers with an error of OpenAI's shape and ends the exchange. With final, Envoy is not to try another endpoint: the one
// that has answered is not at fault.
func (x *exchange) sendError(e *openai.Error, final bool) error {
	i := &immediate{status: e.Status, body: e.JSON(), details: detailsPrefix + "_" + e.Code}
	i.headers.add("content-type", []byte(contentTypeJSON))
	if e.RetryAfter > 0 {
		i.headers.add(headerRetryAfter, itoa(int((e.RetryAfter+time.Second-1)/time.Second)))
	}
	if x.s.Picker != nil {
		i.dropped(e)
	}
	if final {
		i.headers.add(headerFinal, []byte("true"))
	}
	if x.requestID != "" {
		i.headers.add(headerRequestID, []byte(x.requestID))
	}
	return x.send(&reply{immediate: i})
}

// limitBodyTime makes the exchange end with a 408 if the body is not complete in time. The stream's handler is blocked
// in receive then; the answer makes Envoy end the stream, which wakes it.
func (x *exchange) limitBodyTime() {
	stream, requestID := x.stream, x.requestID
	x.sending.Lock()
	defer x.sending.Unlock()
	x.timer = time.AfterFunc(x.s.BodyTimeout, func() {
		x.sending.Lock()
		defer x.sending.Unlock()
		if x.timer == nil || x.answered || x.stream != stream {
			return
		}
		x.answered = true
		e := openai.Timeout()
		x.s.metrics.refused(e)
		i := &immediate{status: e.Status, body: e.JSON(), details: detailsPrefix + "_" + e.Code}
		i.headers.add("content-type", []byte(contentTypeJSON))
		i.headers.add(headerRequestID, []byte(requestID))
		_ = stream.SendMsg(&reply{immediate: i})
	})
}

// stopBodyTime ends the deadline: what is sent from here on is the answer.
func (x *exchange) stopBodyTime() {
	if x.timer == nil {
		return
	}
	x.timer.Stop()
	x.sending.Lock()
	x.timer = nil // a deadline that is just firing sees this and does nothing
	x.sending.Unlock()
}

// random is where the picker's ties are broken.
func random() uint64 { return rand.Uint64() }

// Drain lets go of the streams that would never end by themselves. Call it once, before a graceful stop of the gRPC
// server.
func (s *Server) Drain() { close(s.draining) }

// Run does the server's regular work until ctx ends: expired reservations, tickets and hand-overs are swept, stranded ones
// cleaned up.
func (s *Server) Run(ctx context.Context) {
	var workers sync.WaitGroup
	defer workers.Wait()
	for range cleanupWorkers {
		workers.Go(func() { s.cleanUp(ctx) })
	}
	workers.Go(func() { s.metrics.pruneSeries(ctx, s.State) })
	s.State.Run(ctx)
}
