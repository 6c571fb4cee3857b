package telemetry

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/kvstate"
)

// work is a phase of an ext_proc stream.
type work uint8

// The phases of an ext_proc stream.
const (
	PhaseReceive work = iota // waiting for Envoy, and thereby for the client or for P
	PhaseScan                // the body
	PhaseDecide              // view, pick, reservations, the leg's body, the ticket
	PhaseAnswer              // handing the reply to gRPC, flow control included
	works
)

// workRoles are the roles whose phases are measured.
var workRoles = [...]string{
	names.RoleMain, names.RolePrefillLeg, names.RoleDecodeLeg, names.RoleMirror,
	names.RoleAnswerLeg, names.RoleEncodeLeg,
}

// workOf returns the observers of all phases of all roles, so that streams need not look them up.
func workOf(h *prometheus.HistogramVec) (out [len(workRoles)][works]prometheus.Observer) {
	for i, role := range workRoles {
		for w, name := range [...]string{"receive", "scan", "decide", "answer"} {
			out[i][w] = h.WithLabelValues(role, name)
		}
	}
	return out
}

// Tracer starts spans.
type Tracer = trace.Tracer

// Meter measures one stream: its phases, and its span if it is traced.
type Meter struct {
	Observer *Observer
	tracer   trace.Tracer // nil: no traces
	role     int          // position in workRoles
	Began    time.Time    // when the stream began
	since    time.Time    // when the current phase began
	Busy     time.Duration
	span     trace.Span   // nil: not traced
	Exemplar exemplar     // of the span; nil: not traced
	Next     TraceContext // the trace context for the next hop, if Envoy has none of its own
}

// Begin starts another stream; tracer is nil without traces.
func (x *Meter) Begin(role string, tracer trace.Tracer) {
	x.tracer = tracer
	x.Began = time.Now()
	x.since, x.Busy = x.Began, 0
	x.role = max(slices.Index(workRoles[:], role), 0)
}

// Reset clears the stream.
func (x *Meter) Reset() { x.Next, x.Exemplar = TraceContext{}, nil }

// Traces reports whether streams may be traced at all.
func (x *Meter) Traces() bool { return x.tracer != nil }

// Recording reports whether the stream is traced.
func (x *Meter) Recording() bool { return x.span != nil }

// LeaveOut excludes some time from the current phase.
func (x *Meter) LeaveOut(d time.Duration) { x.since = x.since.Add(d) }

// Processed counts the stream.
func (x *Meter) Processed(role string) {
	x.Observer.Metrics.Processed(role, x.since.Sub(x.Began), x.Busy, x.Exemplar)
}

// EndPhase ends a phase of the stream and starts the next one.
func (x *Meter) EndPhase(w work) {
	now := time.Now()
	took := now.Sub(x.since)
	x.since = now
	observe(x.Observer.Metrics.work[x.role][w], took, x.Exemplar)
	if w != PhaseReceive {
		x.Busy += took
	}
}

// expectations compare predicted and measured prefill hops: the numbers to watch when decisions look wrong.
type expectations struct {
	cached *prometheus.CounterVec   // pool, as; tokens
	time   *prometheus.CounterVec   // pool, as; seconds
	ratio  *prometheus.HistogramVec // pool
}

// compare counts one prefill hop that ended well.
func (m *Metrics) compare(t *kvtransfer.Ticket, got kvtransfer.Answer, took time.Duration) {
	if got.PromptTokens > 0 && got.CachedTokens >= 0 {
		m.expected.cached.WithLabelValues(t.Pool, "expected").Add(float64(t.ExpectedCached))
		m.expected.cached.WithLabelValues(t.Pool, "measured").Add(float64(got.CachedTokens))
	}
	if t.ExpectedPrefill > 0 && took > 0 {
		m.expected.time.WithLabelValues(t.Pool, "expected").Add(t.ExpectedPrefill.Seconds())
		m.expected.time.WithLabelValues(t.Pool, "measured").Add(took.Seconds())
		m.expected.ratio.WithLabelValues(t.Pool).Observe(took.Seconds() / t.ExpectedPrefill.Seconds())
	}
}

// Each stream has one span (decide, prefill answer, hand over, replan; for pairs: decide, prefill answer, decode leg).
// Its parent is named in the stream's metadata if Envoy traces, else by the client's traceparent, if any. The request
// continues with the span's own context in its traceparent, so that later spans (Envoy's of the prefill leg, engines',
// pass 2's) join the trace; Envoy leaves that header alone (envoy-configs: no_context_propagation). Without a Tracer
// none of this is called.
//
// Envoy (1.40) loses the sampling decision at an internal redirect: in pass 2 its own spans are not sampled, and its
// metadata says so. The header, which pass 1 wrote, is right.
//
// Attributes are counts, names and addresses; never text of a prompt.

// Names of the spans.
const (
	SpanDecide        = "tandem decide"
	SpanPrefillAnswer = "tandem prefill answer"
	SpanHandOver      = "tandem hand over"
	SpanDecodeLeg     = "tandem decode leg"
	SpanReplan        = "tandem replan"
	SpanEncodeLeg     = "tandem encode leg"
)

// TraceContext is a W3C trace context, received or sent (propagation.TextMapCarrier).
type TraceContext struct{ Traceparent, Tracestate string }

// Get implements propagation.TextMapCarrier.
func (c *TraceContext) Get(key string) string {
	switch key {
	case names.HeaderTraceparent:
		return c.Traceparent
	case names.HeaderTracestate:
		return c.Tracestate
	}
	return ""
}

// Set implements propagation.TextMapCarrier.
func (c *TraceContext) Set(key, value string) {
	switch key {
	case names.HeaderTraceparent:
		c.Traceparent = value
	case names.HeaderTracestate:
		c.Tracestate = value
	}
}

// Keys implements propagation.TextMapCarrier.
func (c *TraceContext) Keys() []string {
	return []string{names.HeaderTraceparent, names.HeaderTracestate}
}

// StartSpan starts the span of this stream. envoys is Envoy's own trace context, headers the request's. resumed: it
// comes from an earlier pass. orphan says whether the span may have no parent, if Envoy does not trace.
func (x *Meter) StartSpan(
	ctx context.Context, name string, orphan, resumed bool, envoys, headers TraceContext, requestID string,
) {
	if x.tracer == nil {
		return
	}
	in := envoys
	byEnvoy := in.Traceparent != ""
	if resumed || !byEnvoy {
		in = headers
	}
	x.start(ctx, &in, name, requestID, orphan && !byEnvoy, orphan) // the main role can still change the request
}

// StartSpanBelow starts the span of a pass inside Envoy below a W3C trace context; "": a trace begins here.
func (x *Meter) StartSpanBelow(ctx context.Context, name, traceparent, tracestate, requestID string) {
	if x.tracer != nil {
		x.start(ctx, &TraceContext{traceparent, tracestate}, name, requestID, true, true)
	}
}

// Trace returns the trace context for the next hop; "": the request is not traced.
func (x *Meter) Trace() (traceparent, tracestate string) {
	return x.Next.Traceparent, x.Next.Tracestate
}

// start starts a span below a trace context. orphan says whether it may have no parent, next whether the next hop is
// below it.
func (x *Meter) start(ctx context.Context, in *TraceContext, name, requestID string, orphan, next bool) {
	parent := propagation.TraceContext{}.Extract(ctx, in)
	if !orphan && !trace.SpanContextFromContext(parent).IsValid() {
		return
	}
	ctx, span := x.tracer.Start(parent, name, trace.WithTimestamp(x.Began), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("tandem.request_id", requestID)))
	if span.IsRecording() {
		x.span, x.Exemplar = span, exemplarOf(span)
	}
	if next {
		propagation.TraceContext{}.Inject(ctx, &x.Next)
	}
}

// EndSpan ends the span; code is the code of the client's error, "" if there is none.
func (x *Meter) EndSpan(code string) {
	if x.span == nil {
		return
	}
	if code != "" {
		x.span.SetAttributes(attribute.String("error.type", code))
		x.span.SetStatus(otelcodes.Error, code)
	}
	x.span.End()
	x.span = nil
}

// spanPlanned records the decision, and the parts of the prices of the chosen endpoints.
func (x *Meter) spanPlanned(p *Planned) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(
		attribute.String("tandem.pool", p.Pool), attribute.String("tandem.route", p.Route),
		attribute.String("tandem.decode.endpoint", p.Decode),
		attribute.Int64("gen_ai.usage.input_tokens", p.PromptTokens),
		attribute.Int("tandem.body_bytes", p.BodyBytes), attribute.Int("tandem.prompt_blocks", p.PromptBlocks),
		attribute.Int("tandem.candidates", p.Candidates), attribute.String("tandem.price_unit", PriceUnit),
	)
	if p.Reason != "" {
		x.span.SetAttributes(attribute.String("tandem.reason", p.Reason))
	}
	if p.Waited > 0 {
		x.span.SetAttributes(attribute.Float64("tandem.waited_seconds", p.Waited.Seconds()))
	}
	if p.Prefill != "" {
		x.span.SetAttributes(attribute.String("tandem.prefill.endpoint", p.Prefill))
	}
	for _, w := range p.Weighed {
		if p.Prefill != "" && w.Endpoint == p.Prefill {
			x.span.SetAttributes(attribute.Int("tandem.prefill.hit_blocks", w.Hit))
			x.spanParts("tandem.prefill.cost.", w.Prefill)
		}
		if w.Endpoint == p.Decode {
			x.spanParts("tandem.decode.cost.", w.Decode)
		}
	}
}

func (x *Meter) spanParts(prefix string, parts []Part) {
	for _, p := range parts {
		x.span.SetAttributes(attribute.Float64(prefix+strings.ReplaceAll(p.Name, " ", "_"), p.Value))
	}
}

// SpanTicket records the ticket's information about the request, in pass 2 and on the prefill leg.
func (x *Meter) SpanTicket(t *kvtransfer.Ticket) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.String("tandem.pool", t.Pool),
		attribute.String("tandem.prefill.endpoint", t.Prefill), attribute.Int("tandem.redirects", t.Redirects))
	if t.Stage == kvtransfer.Failed {
		x.span.SetName(SpanReplan)
		x.SpanCause(t.Cause)
	}
}

// SpanCause records why the request is planned again.
func (x *Meter) SpanCause(cause string) {
	if x.span != nil {
		x.span.SetAttributes(attribute.String("tandem.cause", cause))
	}
}

// spanPrefilled records how the prefill hop ended. next is the redirect's ticket.
func (x *Meter) spanPrefilled(status int, next *kvtransfer.Ticket) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.Int("http.response.status_code", status),
		attribute.Int64("gen_ai.usage.input_tokens", next.PromptTokens),
		attribute.Int64("tandem.expected_cached_tokens", next.ExpectedCached),
		attribute.Int("tandem.kv_params_bytes", len(next.Params)))
	if next.Stage == kvtransfer.Failed {
		x.span.SetStatus(otelcodes.Error, "prefill failed")
	}
}

// spanHandOver records where the request continues, and whether the KV parameters go with it.
func (x *Meter) spanHandOver(d *kvstate.Endpoint, withParams bool) {
	if x.span == nil {
		return
	}
	x.span.SetName(SpanHandOver)
	x.span.SetAttributes(attribute.String("tandem.decode.endpoint", d.Addr),
		attribute.Bool("tandem.kv_params", withParams))
}

// SpanPair records the pair of one of two concurrent legs.
func (x *Meter) SpanPair(t *kvtransfer.Ticket) {
	if x.span != nil {
		x.span.SetAttributes(
			attribute.String("tandem.decode.endpoint", t.Decode),
			attribute.Int64("gen_ai.usage.input_tokens", t.PromptTokens))
	}
}

// SpanLegEnded records how such a leg ended, as in the metric tandem_hop_duration_seconds: for the decode leg, how
// P's part of it ended. status is the engine's, 0 if none came.
func (x *Meter) SpanLegEnded(result string, status int) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.String("tandem.result", result))
	if status != 0 {
		x.span.SetAttributes(attribute.Int("http.response.status_code", status))
	}
	if result == "failed" {
		x.span.SetStatus(otelcodes.Error, "leg failed")
	}
}

// spanAnswered records what P's answer reports of the prompt.
func (x *Meter) spanAnswered(got kvtransfer.Answer) {
	if x.span == nil {
		return
	}
	if got.PromptTokens > 0 {
		x.span.SetAttributes(attribute.Int64("gen_ai.usage.input_tokens", got.PromptTokens))
	}
	if got.CachedTokens >= 0 {
		x.span.SetAttributes(attribute.Int64("tandem.cached_tokens", got.CachedTokens))
	}
}
