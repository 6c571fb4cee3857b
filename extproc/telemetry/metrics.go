package telemetry

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"tandem/extproc/ended"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
)

// TicketRefused counts a ticket that is forged, of another request, or of another stage.
func (m *Metrics) TicketRefused() { m.tickets.forged.Inc() }

// ControlFieldsCut counts a request with members that a client must not send, which were cut.
func (m *Metrics) ControlFieldsCut() { m.controlFields.Inc() }

// TicketSealed counts a sealed ticket with KV parameters, by its size in bytes.
func (m *Metrics) TicketSealed(bytes int) { m.tickets.bytes.Observe(float64(bytes)) }

// Orphaned counts a hand-over that no decode endpoint fetched, or possibly none.
func (m *Metrics) Orphaned(pool, endpoint, reason string) {
	m.orphaned.WithLabelValues(pool, endpoint, reason).Inc()
}

// LoadFailed counts KV that decode could not load from a prefill endpoint, by how it was detected.
func (m *Metrics) LoadFailed(pool, prefill, seen string) {
	m.loadFailures.WithLabelValues(pool, prefill, seen).Inc()
}

// EndpointFull counts an endpoint that was full, and gets no request for a while, by the status of its answer.
func (m *Metrics) EndpointFull(pool, endpoint string, status int) {
	m.full.WithLabelValues(pool, endpoint, strconv.Itoa(status)).Inc()
}

// EndpointAbsent counts a request whose endpoint Envoy's cluster lacked.
func (m *Metrics) EndpointAbsent(pool, endpoint string) {
	m.absent.WithLabelValues(pool, endpoint).Inc()
}

// Outdated counts an answer that was refused because its KV may have been another prompt's.
func (m *Metrics) Outdated(pool, decode, reason string) {
	m.outdated.WithLabelValues(pool, decode, reason).Inc()
}

// Expired counts KV that an engine freed because no other had fetched it in time.
func (m *Metrics) Expired(endpoint string, n int64) {
	m.expired.WithLabelValues(endpoint).Add(float64(n))
}

// Reclaimed counts an orphaned hand-over that should be fetched, by result.
func (m *Metrics) Reclaimed(pool, result string) { m.cleanups.WithLabelValues(pool, result).Inc() }

// NotFollowed counts a redirect that Envoy did not follow.
func (m *Metrics) NotFollowed(reason string) { m.notFollowed.WithLabelValues(reason).Inc() }

// Learned counts token ids of prompts that were learned.
func (m *Metrics) Learned(pool, source string, ids int) {
	m.tokensLearned.WithLabelValues(pool, source).Add(float64(ids))
}

// QueueChanged counts requests that enter (1) or leave (-1) the admission queue of a pool.
func (m *Metrics) QueueChanged(pool string, by float64) { m.queued.WithLabelValues(pool).Add(by) }

// WaitEnded counts one request that waited for its endpoints.
func (m *Metrics) WaitEnded(pool, end string, took time.Duration) {
	m.waits.WithLabelValues(pool, end).Observe(took.Seconds())
}

// Processed counts one stream that has ended: how long it was open, and how long it was worked on.
func (m *Metrics) Processed(role string, d, busy time.Duration, of exemplar) {
	observe(m.Took.stream.WithLabelValues(role), d, of)
	if role == names.RoleMain || role == names.RolePicker {
		m.liveTotals.decisions.observe(busy)
	}
}

// Refused counts a request that Tandem answered itself with an error, before endpoints were chosen for it.
func (m *Metrics) Refused(e *openai.Error) {
	m.GivenUp(e)
	m.liveTotals.refused.Add(1)
}

// GivenUp counts an error of Tandem's for a request after one of its hops. Its end is counted as that of a request.
func (m *Metrics) GivenUp(e *openai.Error) { m.refusals.WithLabelValues(e.Code).Inc() }

// decided counts a pass that was planned.
func (m *Metrics) decided(pool, route, reason string) {
	m.requests.WithLabelValues(pool, route, reason).Inc()
	m.liveTotals.decided(route)
}

// Replanned counts a pass that was planned again after a hop failed.
func (m *Metrics) Replanned(t *kvtransfer.Ticket) {
	m.replans.WithLabelValues(t.Pool, t.Cause).Inc()
	m.liveTotals.replans.Add(1)
}

// Panicked counts a panic of a handler.
func (m *Metrics) Panicked(where string) { m.panics.WithLabelValues(where).Inc() }

// prefillEnded counts P's answer, or Envoy's in its place.
func (m *Metrics) prefillEnded(t *kvtransfer.Ticket, code int, result string, took time.Duration, of exemplar) {
	m.HopEnded(t.Pool, "prefill", t.Prefill, result, took, of)
	if result == "ok" {
		m.liveTotals.prefill.observe(took)
	}
	if code != 200 {
		m.prefillErrors.WithLabelValues(t.Pool, t.Prefill, statusLabel(code)).Inc()
	}
}

// statusLabel bounds the label values that an endpoint can cause.
func statusLabel(code int) string {
	if code < 100 || code > 599 {
		return "other"
	}
	return strconv.Itoa(code)
}

// PrefillLate counts a prefill that exceeded its time. The hop itself is counted when it ends.
func (m *Metrics) PrefillLate(t *kvtransfer.Ticket) {
	m.prefillErrors.WithLabelValues(t.Pool, t.Prefill, "504").Inc()
}

// Prompt counts the tokens of a prompt, as P reported them.
func (m *Metrics) Prompt(pool string, h kvtransfer.Answer) {
	if h.PromptTokens > 0 && h.CachedTokens >= 0 {
		computed := max(h.PromptTokens-h.CachedTokens, 0)
		m.promptTokens.WithLabelValues(pool, "cached").Add(float64(h.CachedTokens))
		m.promptTokens.WithLabelValues(pool, "computed").Add(float64(computed))
		m.liveTotals.cachedTokens.Add(uint64(h.CachedTokens))
		m.liveTotals.computedTokens.Add(uint64(computed))
	}
}

// HopEnded counts one hop: how it ended (ok, refused, failed, client_gone) and how long it took.
func (m *Metrics) HopEnded(pool, hop, endpoint, result string, took time.Duration, of exemplar) {
	observe(m.hops.WithLabelValues(pool, hop, endpoint, result), took, of)
}

// requestEnded counts the end of a request as Envoy logs it. The end of a prefill leg was counted there.
func (m *Metrics) requestEnded(t *kvtransfer.Ticket, e *ended.Pass, took, first time.Duration) {
	of := exemplarIn(e.Traceparent)
	switch {
	case t.Stage == kvtransfer.DecodeLeg, t.Stage == kvtransfer.PairLegs:
		m.HopEnded(t.Pool, "decode", t.Decode, EndedAs(t, e), took, of)
		if first > 0 {
			observe(m.firstByte.WithLabelValues(t.Pool, "decode", t.Decode), first, of)
		}
	case t.Stage == kvtransfer.PrefillLeg && e.ClientGone:
		m.HopEnded(t.Pool, "prefill", t.Prefill, "client_gone", e.Duration, of)
	case t.Stage == kvtransfer.EncodeLeg && e.ClientGone:
		m.HopEnded(t.Pool, "encode", t.Decode, "client_gone", e.Duration, of)
	}
	route := "one_hop"
	if t.Split {
		route = "split"
	}
	result := EndedAs(t, e)
	observe(m.whole.time.WithLabelValues(t.Pool, route, result), e.Duration, of)
	m.liveTotals.ended(result)
	if e.FirstByte > 0 && result == "ok" {
		observe(m.whole.firstByte.WithLabelValues(t.Pool, route), e.FirstByte, of)
		m.liveTotals.firstByte.observe(e.FirstByte)
	}
}

// EndedAs returns how a request ended: ok, refused, failed or client_gone.
func EndedAs(t *kvtransfer.Ticket, e *ended.Pass) string {
	switch {
	case e.ClientGone:
		return "client_gone"
	case e.Status >= 500 || e.Status == 0 || e.TooShort(t.LeastBytes) || e.BrokeOff():
		return "failed"
	case e.Status >= 400:
		return "refused"
	}
	return "ok"
}

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
