package telemetry

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"tandem/extproc/usage"
	"tandem/kvstate"
)

// Metrics are the server's metrics. Label values are bounded: pools are configured, the series of endpoints that
// left are dropped (fleet.go), the rest are constants of this package.
type Metrics struct {
	passMetrics
	promptMetrics
	hopMetrics
	handOverMetrics
	streamMetrics
	Streams Streams         // that outlive their engine
	Usage   *usage.Recorder // nil: nobody records what requests use. Set it before requests come

	liveTotals liveTotals
	byEndpoint []vec // metrics with an endpoint's label
	endpoints  departed
}

// NewMetrics registers the server's metrics and gauges of its state.
func NewMetrics(r prometheus.Registerer, state *kvstate.State) *Metrics {
	r.MustRegister(newStateCollector(state), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "tandem_reservations", Help: "Reservations that are held now.",
	}, func() float64 { return float64(state.Bookings.Reservations()) }))
	m := &Metrics{}
	to := registry{promauto.With(r), &m.byEndpoint}
	m.passMetrics, m.promptMetrics, m.hopMetrics, m.handOverMetrics = to.passes(), to.prompts(), to.hops(),
		to.handOvers()
	m.streamMetrics, m.Streams = to.streams(), to.continuing()
	return m
}

// registry makes metrics and registers them.
type registry struct {
	promauto.Factory
	byEndpoint *[]vec // metrics that have a series for each endpoint
}

func (r registry) counter(name, help string, labels ...string) *prometheus.CounterVec {
	v := r.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	r.note(v, labels)
	return v
}

func (r registry) histogram(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := r.NewHistogramVec(histogramOpts(name, help, buckets), labels)
	r.note(v, labels)
	return v
}

func (r registry) note(v vec, labels []string) {
	if slices.Contains(labels, endpointLabel) {
		*r.byEndpoint = append(*r.byEndpoint, v)
	}
}

// Buckets for scrapers without native histograms: 1 ms to 150 s for hops, 10 us to 2.6 s for Tandem's own work.
func hopBuckets() []float64  { return prometheus.ExponentialBuckets(0.001, 2.5, 14) }
func workBuckets() []float64 { return prometheus.ExponentialBuckets(0.00001, 4, 10) }

// passMetrics are about the passes of requests, and those that wait or are refused.
type passMetrics struct {
	requests    *prometheus.CounterVec   // pool, route, reason
	refusals    *prometheus.CounterVec   // code
	replans     *prometheus.CounterVec   // pool, cause
	notFollowed *prometheus.CounterVec   // reason
	queued      *prometheus.GaugeVec     // pool
	waits       *prometheus.HistogramVec // pool, end; seconds
}

func (r registry) passes() passMetrics {
	return passMetrics{
		requests: r.counter("tandem_decisions_total",
			"Passes routed, by route (split, decode_alone, pass_through, stored_response) and, where a request that "+
				"could be split was not, the reason.",
			"pool", "route", "reason"),
		refusals: r.counter("tandem_refusals_total",
			"Requests that Tandem answered itself with an error, by error code.", "code"),
		replans: r.counter("tandem_replans_total", "Passes planned again after a hop failed, by cause.", "pool",
			"cause"),
		notFollowed: r.counter("tandem_redirects_not_followed_total",
			"Redirects that Envoy did not follow, so that the client got attempts_exhausted, by reason (incomplete, "+
				"not_kept, too_many, no_location).", "reason"),
		queued: r.NewGaugeVec(prometheus.GaugeOpts{
			Name: "tandem_queue_requests", Help: "Requests that wait in this replica for endpoints (late binding).",
		}, []string{"pool"}),
		waits: r.histogram("tandem_queue_wait_seconds",
			"Time that requests waited for endpoints, of those that did, by how it ended (bound, expired, pushed, "+
				"shed, client_gone).", hopBuckets(), "pool", "end"),
	}
}

// promptMetrics are about prompts: their tokens, and the conversations that they belong to.
type promptMetrics struct {
	promptTokens  *prometheus.CounterVec // pool, source
	tokensLearned *prometheus.CounterVec // pool, source
	expected      expectations
}

func (r registry) prompts() promptMetrics {
	return promptMetrics{
		promptTokens: r.counter("tandem_prompt_tokens_total",
			"Prompt tokens of split requests as prefill reports them, by source (cached, computed).", "pool", "source"),
		tokensLearned: r.counter("tandem_prompt_tokens_learned_total",
			"Token ids of prompts that were learned, to match KV events with, by source (prefill, tokenizer).", "pool",
			"source"),
		expected: expectations{
			cached: r.counter("tandem_cached_tokens_compared_total",
				"Prompt tokens of split requests in the prefix cache of their prefill endpoint, expected when it "+
					"was chosen, or measured by it.",
				"pool", "as"),
			time: r.counter("tandem_prefill_seconds_compared_total",
				"Time of prefill hops for which a time was expected, expected when the endpoint was chosen, or "+
					"measured.",
				"pool", "as"),
			ratio: r.histogram("tandem_prefill_time_ratio",
				"Measured time of a prefill hop over the expected one: 1 is a perfect prediction.",
				prometheus.ExponentialBuckets(1./16, 2, 9), "pool"),
		},
	}
}

// hopMetrics are about hops and whole requests.
type hopMetrics struct {
	hops          *prometheus.HistogramVec // pool, hop, endpoint, result; seconds
	firstByte     *prometheus.HistogramVec // pool, hop, endpoint; seconds
	whole         wholeMetrics
	prefillErrors *prometheus.CounterVec // pool, endpoint, status
}

// wholeMetrics are about whole requests.
type wholeMetrics struct {
	time       *prometheus.HistogramVec // pool, route, result; seconds
	firstByte  *prometheus.HistogramVec // pool, route; seconds
	firstToken *prometheus.HistogramVec // pool, endpoint; seconds
	foreseen   *prometheus.HistogramVec // pool
}

func (r registry) hops() hopMetrics {
	return hopMetrics{
		hops: r.histogram("tandem_hop_duration_seconds",
			"Time of one hop by endpoint and how it ended (ok, refused, failed, client_gone, moved).", hopBuckets(),
			"pool", "hop", "endpoint", "result"),
		firstByte: r.histogram("tandem_hop_first_byte_seconds",
			"Time to the first byte of a hop's answer, which is its headers, from Envoy's access log.", hopBuckets(),
			"pool", "hop", "endpoint"),
		whole: wholeMetrics{
			time: r.histogram("tandem_request_duration_seconds",
				"Time of a whole request, all passes, by route and how it ended (ok, refused, failed, client_gone).",
				hopBuckets(), "pool", "route", "result"),
			firstByte: r.histogram("tandem_request_first_byte_seconds",
				"Time from a request's arrival to the first byte of its answer, which is its headers, all passes.",
				hopBuckets(), "pool", "route"),
			firstToken: r.histogram("tandem_time_to_first_token_seconds",
				"Time from a request's arrival to the first byte of its answer's body, of streams.", hopBuckets(),
				"pool", "endpoint"),
			foreseen: r.histogram("tandem_time_to_first_token_ratio",
				"Measured time to the first token of a stream over the one that was expected when its endpoints were "+
					"chosen: 1 is a perfect prediction.", prometheus.ExponentialBuckets(1./16, 2, 9), "pool"),
		},
		prefillErrors: r.counter("tandem_prefill_errors_total",
			"Prefill answers other than 200 by endpoint and status; Envoy's own 503 and 504 stand for an endpoint "+
				"that was not reached or too slow.",
			"pool", "endpoint", "status"),
	}
}

// handOverMetrics are about KV that did not reach decode.
type handOverMetrics struct {
	orphaned     *prometheus.CounterVec // pool, endpoint, reason
	loadFailures *prometheus.CounterVec // pool, endpoint, seen
	full         *prometheus.CounterVec // pool, endpoint, status
	absent       *prometheus.CounterVec // pool, endpoint
	outdated     *prometheus.CounterVec // pool, endpoint, reason
	expired      *prometheus.CounterVec // endpoint
	cleanups     *prometheus.CounterVec // pool, result
}

func (r registry) handOvers() handOverMetrics {
	return handOverMetrics{
		orphaned: r.counter("tandem_handovers_orphaned_total",
			"Hand-overs that no decode endpoint fetched, or possibly none: the prefill endpoint holds their blocks "+
				"until its lease ends.",
			"pool", "endpoint", "reason"),
		loadFailures: r.counter("tandem_kv_load_failures_total",
			"KV that decode could not load, by prefill endpoint and how it was seen (stream: an answer shorter than "+
				"any complete one, answer: decode answered several requests with an error, count: decode counts them).",
			"pool", "endpoint", "seen"),
		full: r.counter("tandem_endpoint_full_total",
			"Times that an endpoint answered 429 or 503, by status: it is full, and gets no request for a while.",
			"pool", "endpoint", "status"),
		absent: r.counter("tandem_endpoint_absent_total",
			"Requests whose endpoint the cluster of a gateway's route lacked: the endpoint gets no request for a "+
				"while.",
			"pool", "endpoint"),
		outdated: r.counter("tandem_kv_outdated_total",
			"KV that was not used because it may have been another prompt's: refused answers, by decode endpoint "+
				"(standstill, expired), and hand-overs without a known end, by prefill endpoint (unknown).",
			"pool", "endpoint", "reason"),
		expired: r.counter("tandem_kv_expired_total",
			"KV that an engine freed because no other had fetched it in time, as the engine counts it.", "endpoint"),
		cleanups: r.counter("tandem_cleanup_decodes_total",
			"Orphaned hand-overs that a pool with strandedBlocks: cleanupDecode fetched, by result.", "pool", "result"),
	}
}

// streamMetrics are about ext_proc streams and what comes by them.
type streamMetrics struct {
	Took          took
	work          [len(workRoles)][works]prometheus.Observer
	tickets       ticketMetrics
	controlFields prometheus.Counter
	panics        *prometheus.CounterVec
}

// took is how long Envoy was served, in seconds.
type took struct {
	stream *prometheus.HistogramVec // role; of ext_proc
	Hook   *prometheus.HistogramVec // hook; inside Envoy, of the worker's time
}

// ticketMetrics are about tickets.
type ticketMetrics struct {
	bytes  prometheus.Histogram
	forged prometheus.Counter
}

func (r registry) streams() streamMetrics {
	m := streamMetrics{
		Took: took{r.histogram("tandem_ext_proc_duration_seconds",
			"Time of one ext_proc stream, waiting for the body included.", workBuckets(), "role"),
			r.histogram("tandem_hook_seconds",
				"Time for which a hook of the filter inside Envoy held its worker.",
				[]float64{.00005, .0002, .001, .005, .02, .1, 1}, "hook")},
		tickets: ticketMetrics{
			bytes: r.NewHistogram(histogramOpts("tandem_ticket_bytes",
				"Size of the tickets that carry KV parameters, as header values.",
				prometheus.ExponentialBuckets(256, 2, 9))),
			forged: r.NewCounter(prometheus.CounterOpts{
				Name: "tandem_tickets_refused_total",
				Help: "Tickets that are forged, of another request, or of another stage.",
			}),
		},
		controlFields: r.NewCounter(prometheus.CounterOpts{
			Name: "tandem_control_fields_cut_total",
			Help: "Requests with members that a client must not send, which were cut.",
		}),
		panics: r.counter("tandem_panics_total",
			"Panics of handlers, which cost the request or message that was handled.", "where"),
	}
	m.work = workOf(r.histogram("tandem_ext_proc_phase_seconds",
		"Time of one phase of an ext_proc stream: receive (waiting for Envoy and the client), scan, decide, answer.",
		workBuckets(), "role", "phase"))
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
