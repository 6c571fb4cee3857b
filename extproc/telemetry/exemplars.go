package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
)

// exemplar connects an observed time to the trace of its request; nil without a trace, at no cost. Scrapers that
// ask for OpenMetrics or protobuf receive it.
type exemplar prometheus.Labels

// labelTraceID is the label's name in exemplars that Grafana expects by default.
const labelTraceID = "trace_id"

// exemplarOf returns the exemplar of a span, if it is recorded.
func exemplarOf(span trace.Span) exemplar {
	if span == nil || !span.SpanContext().IsSampled() {
		return nil
	}
	return exemplar{labelTraceID: span.SpanContext().TraceID().String()}
}

// exemplarIn returns the exemplar of a traceparent (W3C, version 00), if its trace is sampled.
func exemplarIn(traceparent []byte) exemplar {
	const id, flags = len("00-"), len("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0")
	if len(traceparent) != flags+1 || (traceparent[flags]-'0')&1 == 0 {
		return nil
	}
	traceID, err := trace.TraceIDFromHex(string(traceparent[id : id+32]))
	if err != nil {
		return nil
	}
	return exemplar{labelTraceID: traceID.String()}
}

// observe counts a time in a histogram of seconds.
func observe(h prometheus.Observer, d time.Duration, of exemplar) {
	if of != nil {
		if e, ok := h.(prometheus.ExemplarObserver); ok {
			e.ObserveWithExemplar(d.Seconds(), prometheus.Labels(of))
			return
		}
	}
	h.Observe(d.Seconds())
}
