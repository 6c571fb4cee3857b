package extproc

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Metrics are what the server counts. Label values are bounded: pools and endpoints are configured, the rest are
// constants of this package.
type Metrics struct {
	requests      *prometheus.CounterVec   // pool, route, reason
	refusals      *prometheus.CounterVec   // code
	replans       *prometheus.CounterVec   // pool, cause
	hops          *prometheus.HistogramVec // pool, hop, endpoint, result; seconds
	firstByte     *prometheus.HistogramVec // pool, hop, endpoint; seconds
	prefillErrors *prometheus.CounterVec   // pool, endpoint, status
	stranded      *prometheus.CounterVec   // pool, endpoint, reason
	cleanups      *prometheus.CounterVec   // pool, result
	promptTokens  *prometheus.CounterVec   // pool, source
	process       *prometheus.HistogramVec // role; seconds
	ticketBytes   prometheus.Histogram
	forgedTickets prometheus.Counter
	controlFields prometheus.Counter
}

// NewMetrics registers the server's metrics and gauges of its state.
func NewMetrics(r prometheus.Registerer, state *kvstate.State) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		r.MustRegister(c)
		return c
	}
	seconds := func(name, help string, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 14),
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100,
		}, labels)
		r.MustRegister(h)
		return h
	}
	m := &Metrics{
		requests: counter("tandem_decisions_total",
			"Passes routed, by route (split, decode_alone, pass_through, stored_response) and, where a request that could be split was not, the reason.",
			"pool", "route", "reason"),
		refusals:  counter("tandem_refusals_total", "Requests that Tandem answered itself with an error, by error code.", "code"),
		replans:   counter("tandem_replans_total", "Passes planned again after a hop failed, by cause.", "pool", "cause"),
		hops:      seconds("tandem_hop_duration_seconds", "Time of one hop by endpoint and how it ended (ok, refused, failed, client_gone).", "pool", "hop", "endpoint", "result"),
		firstByte: seconds("tandem_hop_first_byte_seconds", "Time to the first byte of a hop's answer, from Envoy's access log.", "pool", "hop", "endpoint"),
		prefillErrors: counter("tandem_prefill_errors_total",
			"Prefill answers other than 200 by endpoint and status; Envoy's own 503 and 504 stand for an endpoint that was not reached or too slow.",
			"pool", "endpoint", "status"),
		stranded:     counter("tandem_handovers_stranded_total", "Hand-overs that no decode endpoint fetched, or perhaps none: the prefill endpoint holds their blocks until its lease ends.", "pool", "endpoint", "reason"),
		cleanups:     counter("tandem_cleanup_decodes_total", "Stranded hand-overs of pools that want them fetched (strandedBlocks: cleanupDecode), by what came of it.", "pool", "result"),
		promptTokens: counter("tandem_prompt_tokens_total", "Prompt tokens of split requests as prefill reports them, by source (cached, computed).", "pool", "source"),
		process:      seconds("tandem_ext_proc_duration_seconds", "Time of one ext_proc stream, waiting for the body included.", "role"),
		ticketBytes: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "tandem_ticket_bytes", Help: "Size of the tickets that carry KV parameters, as header values.",
			Buckets: prometheus.ExponentialBuckets(256, 2, 9)}),
		forgedTickets: prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_tickets_refused_total", Help: "Tickets that were not ours, not for that request, or not for that door."}),
		controlFields: prometheus.NewCounter(prometheus.CounterOpts{Name: "tandem_control_fields_cut_total", Help: "Requests from which members were cut that are not a client's to send."}),
	}
	r.MustRegister(m.ticketBytes, m.forgedTickets, m.controlFields,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "tandem_reservations", Help: "Reservations that are held now."},
			func() float64 { return float64(state.Reservations()) }))
	return m
}

func (m *Metrics) processed(role string, d time.Duration) {
	m.process.WithLabelValues(role).Observe(d.Seconds())
}

func (m *Metrics) refused(e *openai.Error) { m.refusals.WithLabelValues(e.Code).Inc() }

func (m *Metrics) decided(p *kvstate.Pool, route, reason string) {
	m.requests.WithLabelValues(p.Spec.Name, route, reason).Inc()
}

func (m *Metrics) replanned(t *kvtransfer.Ticket) {
	m.replans.WithLabelValues(t.Pool, t.Cause).Inc()
}

// prefillEnded counts P's answer, or what came in its place.
func (m *Metrics) prefillEnded(t *kvtransfer.Ticket, code int, result string, took time.Duration) {
	m.hop(t.Pool, "prefill", t.Prefill, result, took)
	if code != 200 {
		m.prefillErrors.WithLabelValues(t.Pool, t.Prefill, strconv.Itoa(code)).Inc()
	}
}

// prefillLate counts a prefill whose time is up. The hop itself is counted when it ends.
func (m *Metrics) prefillLate(t *kvtransfer.Ticket) {
	m.prefillErrors.WithLabelValues(t.Pool, t.Prefill, "504").Inc()
}

// prefillCut counts a prefill that was ended because nobody waited for it any more.
func (m *Metrics) prefillCut(t *kvtransfer.Ticket, took time.Duration) {
	m.hop(t.Pool, "prefill", t.Prefill, "client_gone", took)
}

func (m *Metrics) prompt(pool string, h kvtransfer.Answer) {
	if h.PromptTokens > 0 && h.CachedTokens >= 0 {
		m.promptTokens.WithLabelValues(pool, "cached").Add(float64(h.CachedTokens))
		m.promptTokens.WithLabelValues(pool, "computed").Add(float64(max(h.PromptTokens-h.CachedTokens, 0)))
	}
}

// hop counts one hop: how it ended (ok, refused, failed, client_gone) and how long it took.
func (m *Metrics) hop(pool, hop, endpoint, result string, took time.Duration) {
	m.hops.WithLabelValues(pool, hop, endpoint, result).Observe(took.Seconds())
}

// requestEnded counts the end of a request as Envoy logs it. What a prefill leg ended in was counted there.
func (m *Metrics) requestEnded(t *kvtransfer.Ticket, e *logEntry, took, first time.Duration) {
	switch {
	case t.Stage == kvtransfer.DecodeLeg, t.Stage == kvtransfer.PairLegs:
		m.hop(t.Pool, "decode", t.Decode, endedAs(e), took)
		if first > 0 {
			m.firstByte.WithLabelValues(t.Pool, "decode", t.Decode).Observe(first.Seconds())
		}
	case t.Stage == kvtransfer.PrefillLeg && e.clientGone:
		m.hop(t.Pool, "prefill", t.Prefill, "client_gone", e.duration)
	}
}

func endedAs(e *logEntry) string {
	switch {
	case e.clientGone:
		return "client_gone"
	case e.status >= 500 || e.status == 0:
		return "failed"
	case e.status >= 400:
		return "refused"
	}
	return "ok"
}
