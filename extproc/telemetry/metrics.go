package telemetry

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Metrics are the server's metrics. Label values are bounded: pools are configured, the series of endpoints that
// left are dropped (fleet.go), the rest are constants of this package.
type Metrics struct {
	requests      *prometheus.CounterVec   // pool, route, reason
	refusals      *prometheus.CounterVec   // code
	replans       *prometheus.CounterVec   // pool, cause
	hops          *prometheus.HistogramVec // pool, hop, endpoint, result; seconds
	firstByte     *prometheus.HistogramVec // pool, hop, endpoint; seconds
	whole         *prometheus.HistogramVec // pool, route, result; seconds
	wholeFirst    *prometheus.HistogramVec // pool, route; seconds
	prefillErrors *prometheus.CounterVec   // pool, endpoint, status
	orphaned      *prometheus.CounterVec   // pool, endpoint, reason
	loadFailures  *prometheus.CounterVec   // pool, endpoint, seen
	cleanups      *prometheus.CounterVec   // pool, result
	promptTokens  *prometheus.CounterVec   // pool, source
	tokensLearned *prometheus.CounterVec   // pool, source
	turns         *prometheus.CounterVec   // pool, what
	expected      expectations
	process       *prometheus.HistogramVec // role; seconds
	work          [6][works]prometheus.Observer
	ticketBytes   prometheus.Histogram
	queued        *prometheus.GaugeVec     // pool
	waits         *prometheus.HistogramVec // pool, end; seconds
	forgedTickets prometheus.Counter
	notFollowed   *prometheus.CounterVec // reason
	controlFields prometheus.Counter
	panics        *prometheus.CounterVec

	liveTotals liveTotals
	endpoints  departed
}

// NewMetrics registers the server's metrics and gauges of its state.
//
//nolint:funlen // a list
func NewMetrics(r prometheus.Registerer, state *kvstate.State) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		r.MustRegister(c)
		return c
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(histogramOpts(name, help, buckets), labels)
		r.MustRegister(h)
		return h
	}
	// Buckets for scrapers without native histograms: 1 ms to 150 s for hops, 10 us to 2.6 s for Tandem's own work.
	hops, work := prometheus.ExponentialBuckets(0.001, 2.5, 14), prometheus.ExponentialBuckets(0.00001, 4, 10)
	m := &Metrics{
		requests: counter("tandem_decisions_total",
			"Passes routed, by route (split, decode_alone, pass_through, stored_response) and, where a request that "+
				"could be split was not, the reason.",
			"pool", "route", "reason"),
		refusals: counter("tandem_refusals_total",
			"Requests that Tandem answered itself with an error, by error code.", "code"),
		replans: counter("tandem_replans_total", "Passes planned again after a hop failed, by cause.", "pool",
			"cause"),
		hops: histogram("tandem_hop_duration_seconds",
			"Time of one hop by endpoint and how it ended (ok, refused, failed, client_gone).", hops, "pool", "hop",
			"endpoint", "result"),
		firstByte: histogram("tandem_hop_first_byte_seconds",
			"Time to the first byte of a hop's answer, from Envoy's access log.", hops, "pool", "hop", "endpoint"),
		whole: histogram("tandem_request_duration_seconds",
			"Time of a whole request, all passes, by route and how it ended (ok, refused, failed, client_gone).", hops,
			"pool", "route", "result"),
		wholeFirst: histogram("tandem_request_first_byte_seconds",
			"Time from a request's arrival to the first byte of its answer, all passes: for streamed answers close "+
				"to the time to first token.",
			hops, "pool", "route"),
		prefillErrors: counter("tandem_prefill_errors_total",
			"Prefill answers other than 200 by endpoint and status; Envoy's own 503 and 504 stand for an endpoint "+
				"that was not reached or too slow.",
			"pool", "endpoint", "status"),
		orphaned: counter("tandem_handovers_orphaned_total",
			"Hand-overs that no decode endpoint fetched, or possibly none: the prefill endpoint holds their blocks "+
				"until its lease ends.",
			"pool", "endpoint", "reason"),
		loadFailures: counter("tandem_kv_load_failures_total",
			"KV that decode could not load, by prefill endpoint and how it was seen (stream: an answer shorter than "+
				"any complete one, answer: decode failed).",
			"pool", "endpoint", "seen"),
		cleanups: counter("tandem_cleanup_decodes_total",
			"Orphaned hand-overs that a pool with strandedBlocks: cleanupDecode fetched, by result.", "pool", "result"),
		promptTokens: counter("tandem_prompt_tokens_total",
			"Prompt tokens of split requests as prefill reports them, by source (cached, computed).", "pool", "source"),
		tokensLearned: counter("tandem_prompt_tokens_learned_total",
			"Token ids of prompts that were learned, to match KV events with, by source (prefill, tokenizer).", "pool",
			"source"),
		turns: counter("tandem_turns_total",
			"Turns of conversations whose blocks decode holds for the next turn: kept, unusable, no_room; at the "+
				"next turn used (prefill got them), failed, or why prefill did not get them.",
			"pool", "what"),
		notFollowed: counter("tandem_redirects_not_followed_total",
			"Redirects that Envoy did not follow, so that the client got attempts_exhausted, by reason (incomplete, "+
				"not_kept, too_many, no_location).", "reason"),
		expected: expectations{
			cached: counter("tandem_cached_tokens_compared_total",
				"Prompt tokens of split requests in the prefix cache of their prefill endpoint, expected when it "+
					"was chosen, or measured by it.",
				"pool", "as"),
			time: counter("tandem_prefill_seconds_compared_total",
				"Time of prefill hops for which a time was expected, expected when the endpoint was chosen, or "+
					"measured.",
				"pool", "as"),
			ratio: histogram("tandem_prefill_time_ratio",
				"Measured time of a prefill hop over the expected one: 1 is a perfect prediction.",
				prometheus.ExponentialBuckets(1./16, 2, 9), "pool"),
		},
		process: histogram("tandem_ext_proc_duration_seconds",
			"Time of one ext_proc stream, waiting for the body included.", work, "role"),
		ticketBytes: prometheus.NewHistogram(histogramOpts("tandem_ticket_bytes",
			"Size of the tickets that carry KV parameters, as header values.",
			prometheus.ExponentialBuckets(256, 2, 9))),
		queued: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "tandem_queue_requests",
			Help: "Requests that wait in this replica for endpoints (late binding)."}, []string{"pool"}),
		waits: histogram("tandem_queue_wait_seconds",
			"Time that requests waited for endpoints, of those that did, by how it ended (bound, expired, pushed, "+
				"shed, client_gone).", hops, "pool", "end"),
		forgedTickets: prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_tickets_refused_total",
			Help: "Tickets that are forged, of another request, or of another stage."}),
		panics: counter("tandem_panics_total",
			"Panics of handlers, which cost the request or message that was handled.", "where"),
		controlFields: prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_control_fields_cut_total",
			Help: "Requests with members that a client must not send, which were cut."}),
	}
	m.observeWork(histogram("tandem_ext_proc_phase_seconds",
		"Time of one phase of an ext_proc stream: receive (waiting for Envoy and the client), scan, decide, answer.",
		work, "role", "phase"))
	r.MustRegister(m.queued, m.ticketBytes, m.forgedTickets, m.controlFields, newStateCollector(state),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "tandem_reservations",
			Help: "Reservations that are held now."},
			func() float64 { return float64(state.Reservations()) }))
	return m
}

// histogramOpts returns the options of a histogram that is native if the scraper supports it (about 10 % wide
// buckets, at most 100), and has the given buckets otherwise.
func histogramOpts(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100,
		NativeHistogramMinResetDuration: time.Hour,
	}
}

// TicketRefused counts a ticket that is forged, of another request, or of another stage.
func (m *Metrics) TicketRefused() { m.forgedTickets.Inc() }

// ControlFieldsCut counts a request with members that a client must not send, which were cut.
func (m *Metrics) ControlFieldsCut() { m.controlFields.Inc() }

// TicketSealed counts a ticket with KV parameters of so many bytes.
func (m *Metrics) TicketSealed(bytes int) { m.ticketBytes.Observe(float64(bytes)) }

// Orphaned counts a hand-over that no decode endpoint fetched, or possibly none.
func (m *Metrics) Orphaned(pool, endpoint, reason string) {
	m.orphaned.WithLabelValues(pool, endpoint, reason).Inc()
}

// LoadFailed counts KV that decode could not load from a prefill endpoint, by how it was detected.
func (m *Metrics) LoadFailed(pool, prefill, seen string) {
	m.loadFailures.WithLabelValues(pool, prefill, seen).Inc()
}

// Reclaimed counts an orphaned hand-over that should be fetched, by result.
func (m *Metrics) Reclaimed(pool, result string) { m.cleanups.WithLabelValues(pool, result).Inc() }

// NotFollowed counts a redirect that Envoy did not follow.
func (m *Metrics) NotFollowed(reason string) { m.notFollowed.WithLabelValues(reason).Inc() }

// Turn counts the result of a conversation's turn.
func (m *Metrics) Turn(pool, what string) { m.turns.WithLabelValues(pool, what).Inc() }

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
	observe(m.process.WithLabelValues(role), d, of)
	if role == envoywire.RoleMain || role == envoywire.RolePicker {
		m.liveTotals.decisions.observe(busy)
	}
}

// Refused counts a request that Tandem answered itself with an error.
func (m *Metrics) Refused(e *openai.Error) {
	m.refusals.WithLabelValues(e.Code).Inc()
	m.liveTotals.refused.Add(1)
}

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
func (m *Metrics) requestEnded(t *kvtransfer.Ticket, e *envoywire.LogEntry, took, first time.Duration) {
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
	observe(m.whole.WithLabelValues(t.Pool, route, result), e.Duration, of)
	m.liveTotals.ended(result)
	if e.FirstByte > 0 && result == "ok" {
		observe(m.wholeFirst.WithLabelValues(t.Pool, route), e.FirstByte, of)
		m.liveTotals.firstByte.observe(e.FirstByte)
	}
}

// EndedAs returns how a request ended: ok, refused, failed or client_gone.
func EndedAs(t *kvtransfer.Ticket, e *envoywire.LogEntry) string {
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
