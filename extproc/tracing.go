package extproc

import (
	"errors"
	"io"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// One span for each meeting with the server (decide, prefill answer, hand over, replan; of pairs: decide, prefill answer,
// decode leg). Its parent is what Envoy names in
// the stream's metadata, where Envoy traces, else the client's traceparent, if any. The request goes on with the span's own
// context in its traceparent, so that what comes behind it (Envoy's spans of the prefill leg, engines, pass 2) joins; Envoy
// leaves that header alone (envoy-configs: no_context_propagation). Without a Tracer none of this is called.
//
// Envoy (1.40) forgets at an internal redirect that it traces: in pass 2 its own spans are not sampled, and say so. The header
// knows better there: it is the one that pass 1 wrote.
//
// Attributes are counts, names and addresses; never text of a prompt.

// Names of the spans.
const (
	spanDecide        = "tandem decide"
	spanPrefillAnswer = "tandem prefill answer"
	spanHandOver      = "tandem hand over"
	spanDecodeLeg     = "tandem decode leg"
	spanReplan        = "tandem replan"
	spanEncodeLeg     = "tandem encode leg"
)

const headerTraceparent, headerTracestate = "traceparent", "tracestate"

// carrier is a W3C trace context on its way in or out (propagation.TextMapCarrier).
type carrier struct{ traceparent, tracestate string }

func (c *carrier) Get(key string) string {
	switch key {
	case headerTraceparent:
		return c.traceparent
	case headerTracestate:
		return c.tracestate
	}
	return ""
}

func (c *carrier) Set(key, value string) {
	switch key {
	case headerTraceparent:
		c.traceparent = value
	case headerTracestate:
		c.tracestate = value
	}
}

// Keys is of propagation.TextMapCarrier.
func (c *carrier) Keys() []string { return []string{headerTraceparent, headerTracestate} }

// startSpan begins the span of this stream. orphan says whether there is one without a parent, where Envoy does not trace.
func (x *exchange) startSpan(name string, orphan bool) {
	if x.s.Tracer == nil {
		return
	}
	ctx := x.stream.Context()
	in := carrier{first(metadata.ValueFromIncomingContext(ctx, headerTraceparent)), first(metadata.ValueFromIncomingContext(ctx, headerTracestate))}
	byEnvoy := in.traceparent != ""
	if pass2 := x.role == 0 && len(x.msg.headers.ticket) > 0; pass2 || !byEnvoy {
		in = carrier{string(x.msg.headers.traceparent), string(x.msg.headers.tracestate)}
	}
	parent := propagation.TraceContext{}.Extract(ctx, &in)
	if (!orphan || byEnvoy) && !trace.SpanContextFromContext(parent).IsValid() {
		return
	}
	ctx, span := x.s.Tracer.Start(parent, name, trace.WithTimestamp(x.began), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("tandem.request_id", x.requestID)))
	if span.IsRecording() {
		x.span, x.traced = span, exemplarOf(span)
	}
	if orphan { // in the main role, where the request can still be changed
		propagation.TraceContext{}.Inject(ctx, &x.goesOn)
	}
}

// setTrace writes the trace context that the next hop is to join.
func (x *exchange) setTrace() {
	if x.goesOn.traceparent == "" {
		return
	}
	x.headers.add(headerTraceparent, []byte(x.goesOn.traceparent))
	if x.goesOn.tracestate != "" {
		x.headers.add(headerTracestate, []byte(x.goesOn.tracestate))
	}
}

func first(values []string) string {
	if len(values) == 0 {
		return ""
	}
	return values[0]
}

// endSpan ends it, with the error that the client gets.
func (x *exchange) endSpan(err error) {
	if x.span == nil {
		return
	}
	if err != nil && !errors.Is(err, errAnswered) {
		code := "internal_error"
		if errors.Is(err, io.EOF) || x.stream.Context().Err() != nil {
			code = "client_gone"
		}
		if e, ok := errors.AsType[*openai.Error](err); ok {
			code = e.Code
		}
		x.span.SetAttributes(attribute.String("error.type", code))
		x.span.SetStatus(otelcodes.Error, code)
	}
	x.span.End()
	x.span = nil
}

// spanPlanned notes the decision and the parts of the prices of who was chosen.
func (x *exchange) spanPlanned(pool *kvstate.Pool, route, reason string, prefill, decode *kvstate.Endpoint, tokens int64, weighed []Weighed) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(
		attribute.String("tandem.pool", pool.Spec.Name), attribute.String("tandem.route", route),
		attribute.String("tandem.decode.endpoint", decode.Addr), attribute.Int64("gen_ai.usage.input_tokens", tokens),
		attribute.Int("tandem.body_bytes", x.body.len()), attribute.Int("tandem.prompt_blocks", len(x.hashes)),
		attribute.Int("tandem.candidates", len(x.view.Endpoints)), attribute.String("tandem.price_unit", PriceUnit),
	)
	if reason != "" {
		x.span.SetAttributes(attribute.String("tandem.reason", reason))
	}
	if x.waited > 0 {
		x.span.SetAttributes(attribute.Float64("tandem.waited_seconds", x.waited.Seconds()))
	}
	if prefill != nil {
		x.span.SetAttributes(attribute.String("tandem.prefill.endpoint", prefill.Addr))
	}
	for _, w := range weighed {
		if prefill != nil && w.Endpoint == prefill.Addr {
			x.span.SetAttributes(attribute.Int("tandem.prefill.hit_blocks", w.Hit))
			x.spanParts("tandem.prefill.cost.", w.Prefill)
		}
		if w.Endpoint == decode.Addr {
			x.spanParts("tandem.decode.cost.", w.Decode)
		}
	}
}

func (x *exchange) spanParts(prefix string, parts []Part) {
	for _, p := range parts {
		x.span.SetAttributes(attribute.Float64(prefix+strings.ReplaceAll(p.Name, " ", "_"), p.Value))
	}
}

// spanTicket notes what pass 2 and the prefill leg know of the request from its ticket.
func (x *exchange) spanTicket(t *kvtransfer.Ticket) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.String("tandem.pool", t.Pool), attribute.String("tandem.prefill.endpoint", t.Prefill), attribute.Int("tandem.redirects", t.Redirects))
	if t.Stage == kvtransfer.Failed {
		x.span.SetName(spanReplan)
		x.spanCause(t.Cause)
	}
}

// spanCause notes why the request is planned again.
func (x *exchange) spanCause(cause string) {
	if x.span != nil {
		x.span.SetAttributes(attribute.String("tandem.cause", cause))
	}
}

// spanPrefilled notes how the prefill hop ended. next is what the redirect carries.
func (x *exchange) spanPrefilled(status int, next *kvtransfer.Ticket) {
	if x.span == nil {
		return
	}
	x.span.SetAttributes(attribute.Int("http.response.status_code", status), attribute.Int64("gen_ai.usage.input_tokens", next.PromptTokens),
		attribute.Int64("tandem.expected_cached_tokens", next.ExpectedCached), attribute.Int("tandem.kv_params_bytes", len(next.Params)))
	if next.Stage == kvtransfer.Failed {
		x.span.SetStatus(otelcodes.Error, "prefill failed")
	}
}

// spanHandOver notes where the request goes on, and whether the KV parameters go with it.
func (x *exchange) spanHandOver(d *kvstate.Endpoint, withParams bool) {
	if x.span == nil {
		return
	}
	x.span.SetName(spanHandOver)
	x.span.SetAttributes(attribute.String("tandem.decode.endpoint", d.Addr), attribute.Bool("tandem.kv_params", withParams))
}

// spanPairLeg begins the span of one of two legs that run at once.
func (x *exchange) spanPairLeg(name string, t *kvtransfer.Ticket) {
	x.startSpan(name, false)
	x.spanTicket(t)
	if x.span != nil {
		x.span.SetAttributes(attribute.String("tandem.decode.endpoint", t.Decode), attribute.Int64("gen_ai.usage.input_tokens", t.PromptTokens))
	}
}

// spanLegEnded notes how such a leg ended, in the words of the metric tandem_hop_duration_seconds: for the decode leg, how
// P's part of it did. status is the engine's, 0 where none came.
func (x *exchange) spanLegEnded(result string, status int) {
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

// spanAnswered notes what P's good answer says of the prompt.
func (x *exchange) spanAnswered(got kvtransfer.Answer) {
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
