package telemetry

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/usage"
)

// SpanAnswer is the span of the pass that answered the client, with what the request used. Envoy reports both when the
// answer has ended.
const SpanAnswer = "tandem answer"

// TraceAnswer makes that span, below the last one of the request's trace, if that is recorded. The attributes are those
// of OpenTelemetry's semantic conventions for GenAI (2026-06, in development).
func TraceAnswer(tracer trace.Tracer, t *kvtransfer.Ticket, e *ended.Pass, u *usage.Used) {
	if tracer == nil || len(e.Traceparent) == 0 {
		return
	}
	parent := propagation.TraceContext{}.Extract(context.Background(),
		propagation.MapCarrier{names.HeaderTraceparent: string(e.Traceparent)})
	if !trace.SpanContextFromContext(parent).IsSampled() {
		return
	}
	result := EndedAs(t, e)
	_, span := tracer.Start(parent, SpanAnswer, trace.WithTimestamp(e.Start), trace.WithAttributes(
		attribute.String("tandem.request_id", string(e.RequestID)), attribute.String("tandem.pool", t.Pool),
		attribute.String("tandem.decode.endpoint", AnsweredBy(t)), attribute.String("tandem.ended", result),
		attribute.Int("http.response.status_code", e.Status), attribute.Bool("gen_ai.request.stream", u.Streamed),
	))
	defer span.End(trace.WithTimestamp(e.Start.Add(e.Duration)))
	text := func(name, value string) {
		if value != "" {
			span.SetAttributes(attribute.String(name, value))
		}
	}
	text("gen_ai.request.model", u.Model)
	text("tandem.tenant", u.Tenant)
	text("tandem.promise", u.Promise)
	count := func(name string, n *int64) {
		if n != nil {
			span.SetAttributes(attribute.Int64(name, *n))
		}
	}
	count("gen_ai.usage.input_tokens", u.Prompt)
	count("gen_ai.usage.cache_read.input_tokens", u.Cached)
	count("gen_ai.usage.output_tokens", u.Answer)
	seconds := func(name string, d time.Duration) {
		if d > 0 {
			span.SetAttributes(attribute.Float64(name, d.Seconds()))
		}
	}
	seconds("gen_ai.response.time_to_first_chunk", u.FirstToken)
	seconds("tandem.time_per_output_token", u.PerToken)
	if u.FirstToken > 0 {
		span.AddEvent("first token", trace.WithTimestamp(t.Started.Add(u.FirstToken)))
	}
	if result == "failed" {
		span.SetStatus(otelcodes.Error, "answer failed")
	}
}
