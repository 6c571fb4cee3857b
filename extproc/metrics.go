package extproc

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Metrics are what the server counts. Label values are bounded: pools are configured, series of endpoints that left are
// dropped (endpoints.go), the rest are constants of this package.
type Metrics struct {
	requests      *prometheus.CounterVec   // pool, route, reason
	refusals      *prometheus.CounterVec   // code
	replans       *prometheus.CounterVec   // pool, cause
	hops          *prometheus.HistogramVec // pool, hop, endpoint, result; seconds
	firstByte     *prometheus.HistogramVec // pool, hop, endpoint; seconds
	whole         *prometheus.HistogramVec // pool, route, result; seconds
	wholeFirst    *prometheus.HistogramVec // pool, route; seconds
	prefillErrors *prometheus.CounterVec   // pool, endpoint, status
	stranded      *prometheus.CounterVec   // pool, endpoint, reason
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
	unfollowed    *prometheus.CounterVec // reason
	controlFields prometheus.Counter

	live      live
	endpoints departed
}

// NewMetrics registers the server's metrics and gauges of its state.
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
	// Buckets for those who do not scrape native histograms: 1 ms to 150 s for hops, 10 us to 2.6 s for work of our own.
	hops, work := prometheus.ExponentialBuckets(0.001, 2.5, 14), prometheus.ExponentialBuckets(0.00001, 4, 10)
	m := &Metrics{
		requests: counter("tandem_decisions_total",
			"Passes routed, by route (split, decode_alone, pass_through, stored_response) and, where a request that could be split was not, the reason.",
			"pool", "route", "reason"),
		refusals:  counter("tandem_refusals_total", "Requests that Tandem answered itself with an error, by error code.", "code"),
		replans:   counter("tandem_replans_total", "Passes planned again after a hop failed, by cause.", "pool", "cause"),
		hops:      histogram("tandem_hop_duration_seconds", "Time of one hop by endpoint and how it ended (ok, refused, failed, client_gone).", hops, "pool", "hop", "endpoint", "result"),
		firstByte: histogram("tandem_hop_first_byte_seconds", "Time to the first byte of a hop's answer, from Envoy's access log.", hops, "pool", "hop", "endpoint"),
		whole:     histogram("tandem_request_duration_seconds", "Time of a whole request, all passes, by route and how it ended (ok, refused, failed, client_gone).", hops, "pool", "route", "result"),
		wholeFirst: histogram("tandem_request_first_byte_seconds",
			"Time from a request's arrival to the first byte of its answer, all passes: for streamed answers close to the time to first token.",
			hops, "pool", "route"),
		prefillErrors: counter("tandem_prefill_errors_total",
			"Prefill answers other than 200 by endpoint and status; Envoy's own 503 and 504 stand for an endpoint that was not reached or too slow.",
			"pool", "endpoint", "status"),
		stranded: counter("tandem_handovers_stranded_total",
			"Hand-overs that no decode endpoint fetched, or perhaps none: the prefill endpoint holds their blocks until its lease ends.",
			"pool", "endpoint", "reason"),
		cleanups:      counter("tandem_cleanup_decodes_total", "Stranded hand-overs of pools that want them fetched (strandedBlocks: cleanupDecode), by what came of it.", "pool", "result"),
		promptTokens:  counter("tandem_prompt_tokens_total", "Prompt tokens of split requests as prefill reports them, by source (cached, computed).", "pool", "source"),
		tokensLearned: counter("tandem_prompt_tokens_learned_total", "Token ids of prompts that were learned, to match KV events with, by source (prefill, tokenizer).", "pool", "source"),
		turns: counter("tandem_turns_total",
			"Turns of conversations whose blocks decode keeps for the next one: kept, unusable, no_room; at the next, told (to prefill), failed, or why prefill was not told.",
			"pool", "what"),
		unfollowed: counter("tandem_redirects_unfollowed_total",
			"Redirects that Envoy did not follow, so that the client was told attempts_exhausted, by reason (incomplete, not_kept, too_many, no_location).", "reason"),
		expected: expectations{
			cached: counter("tandem_cached_tokens_compared_total",
				"Prompt tokens of split requests in the prefix cache of their prefill endpoint, by what says so: as expected when it was chosen, as measured by it.",
				"pool", "as"),
			time: counter("tandem_prefill_seconds_compared_total",
				"Time of prefill hops for which a time was expected, by what says so: as expected when the endpoint was chosen, as measured.",
				"pool", "as"),
			ratio: histogram("tandem_prefill_time_ratio", "Measured time of a prefill hop over the expected one: 1 is a perfect prediction.", prometheus.ExponentialBuckets(1./16, 2, 9), "pool"),
		},
		process: histogram("tandem_ext_proc_duration_seconds", "Time of one ext_proc stream, waiting for the body included.", work, "role"),
		ticketBytes: prometheus.NewHistogram(histogramOpts("tandem_ticket_bytes", "Size of the tickets that carry KV parameters, as header values.",
			prometheus.ExponentialBuckets(256, 2, 9))),
		queued: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "tandem_queue_requests", Help: "Requests that wait in this replica for endpoints (late binding)."}, []string{"pool"}),
		waits: histogram("tandem_queue_wait_seconds",
			"Time that requests waited for endpoints, of those that did, by how it ended (bound, expired, pushed, shed, client_gone).", hops, "pool", "end"),
		forgedTickets: prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_tickets_refused_total", Help: "Tickets that were not ours, not for that request, or not for that door."}),
		controlFields: prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_control_fields_cut_total", Help: "Requests from which members were cut that are not a client's to send."}),
	}
	m.observeWork(histogram("tandem_ext_proc_phase_seconds", "Time of one phase of an ext_proc stream: receive (waiting for Envoy and the client), scan, decide, answer.", work, "role", "phase"))
	r.MustRegister(m.queued, m.ticketBytes, m.forgedTickets, m.controlFields, newStateCollector(state),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "tandem_reservations", Help: "Reservations that are held now."},
			func() float64 { return float64(state.Reservations()) }))
	return m
}

// histogramOpts are those of a histogram that is native where the scraper takes it (about 10 % wide buckets, as many as are
// used and no more than 100) and has the given buckets elsewhere.
func histogramOpts(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100, NativeHistogramMinResetDuration: time.Hour,
	}
}

// waitEnded counts one request that waited for its endpoints.
func (m *Metrics) waitEnded(pool, end string, took time.Duration) {
	m.waits.WithLabelValues(pool, end).Observe(took.Seconds())
}

// processed counts one stream that came to its end: how long it was open, and how long of that it was worked on.
func (m *Metrics) processed(role string, d, busy time.Duration, of exemplar) {
	observe(m.process.WithLabelValues(role), d, of)
	if role == "main" || role == rolePicker {
		m.live.decisions.observe(busy)
	}
}

func (m *Metrics) refused(e *openai.Error) {
	m.refusals.WithLabelValues(e.Code).Inc()
	m.live.refused.Add(1)
}

func (m *Metrics) decided(p *kvstate.Pool, route, reason string) {
	m.requests.WithLabelValues(p.Spec.Name, route, reason).Inc()
	m.live.decided(route)
}

func (m *Metrics) replanned(t *kvtransfer.Ticket) {
	m.replans.WithLabelValues(t.Pool, t.Cause).Inc()
	m.live.replans.Add(1)
}

// prefillEnded counts P's answer, or what came in its place.
func (m *Metrics) prefillEnded(t *kvtransfer.Ticket, code int, result string, took time.Duration, of exemplar) {
	m.hop(t.Pool, "prefill", t.Prefill, result, took, of)
	if result == "ok" {
		m.live.prefill.observe(took)
	}
	if code != 200 {
		m.prefillErrors.WithLabelValues(t.Pool, t.Prefill, statusLabel(code)).Inc()
	}
}

// statusLabel bounds what an endpoint can make of a label.
func statusLabel(code int) string {
	if code < 100 || code > 599 {
		return "other"
	}
	return strconv.Itoa(code)
}

// prefillLate counts a prefill whose time is up. The hop itself is counted when it ends.
func (m *Metrics) prefillLate(t *kvtransfer.Ticket) {
	m.prefillErrors.WithLabelValues(t.Pool, t.Prefill, "504").Inc()
}

func (m *Metrics) prompt(pool string, h kvtransfer.Answer) {
	if h.PromptTokens > 0 && h.CachedTokens >= 0 {
		computed := max(h.PromptTokens-h.CachedTokens, 0)
		m.promptTokens.WithLabelValues(pool, "cached").Add(float64(h.CachedTokens))
		m.promptTokens.WithLabelValues(pool, "computed").Add(float64(computed))
		m.live.cachedTokens.Add(uint64(h.CachedTokens))
		m.live.computedTokens.Add(uint64(computed))
	}
}

// hop counts one hop: how it ended (ok, refused, failed, client_gone) and how long it took.
func (m *Metrics) hop(pool, hop, endpoint, result string, took time.Duration, of exemplar) {
	observe(m.hops.WithLabelValues(pool, hop, endpoint, result), took, of)
}

// requestEnded counts the end of a request as Envoy logs it. What a prefill leg ended in was counted there.
func (m *Metrics) requestEnded(t *kvtransfer.Ticket, e *logEntry, took, first time.Duration) {
	of := exemplarIn(e.traceparent)
	switch {
	case t.Stage == kvtransfer.DecodeLeg, t.Stage == kvtransfer.PairLegs:
		m.hop(t.Pool, "decode", t.Decode, endedAs(e), took, of)
		if first > 0 {
			observe(m.firstByte.WithLabelValues(t.Pool, "decode", t.Decode), first, of)
		}
	case t.Stage == kvtransfer.PrefillLeg && e.clientGone:
		m.hop(t.Pool, "prefill", t.Prefill, "client_gone", e.duration, of)
	case t.Stage == kvtransfer.EncodeLeg && e.clientGone:
		m.hop(t.Pool, "encode", t.Decode, "client_gone", e.duration, of)
	}
	route := "one_hop"
	if t.Split {
		route = "split"
	}
	result := endedAs(e)
	observe(m.whole.WithLabelValues(t.Pool, route, result), e.duration, of)
	m.live.ended(result)
	if e.firstByte > 0 && result == "ok" {
		observe(m.wholeFirst.WithLabelValues(t.Pool, route), e.firstByte, of)
		m.live.firstByte.observe(e.firstByte)
	}
}

// brokeOff reports whether an answer ended before it was whole. Its status went out long before; Envoy (1.40) says it in the details:
// the endpoint's connection broke, or a time limit was over.
func (e *logEntry) brokeOff() bool {
	for _, why := range [...]string{"upstream_reset_after_response_started", "stream_idle_timeout", "upstream_per_try_idle_timeout", "response_timeout",
		"max_duration_timeout", "upstream_max_stream_duration_reached"} {
		if len(e.details) >= len(why) && string(e.details[:len(why)]) == why { // Envoy may add more in braces
			return true
		}
	}
	return false
}

func endedAs(e *logEntry) string {
	switch {
	case e.clientGone:
		return "client_gone"
	case e.status >= 500 || e.status == 0 || e.brokeOff():
		return "failed"
	case e.status >= 400:
		return "refused"
	}
	return "ok"
}
