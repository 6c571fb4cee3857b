package main

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics are the counts behind /metrics. Names and labels with the prefix vllm: are those of vLLM 0.32 (recorded
// from a running server); those with enginesim_ are ours.
type metrics struct {
	running         atomic.Int64
	waitingCapacity atomic.Int64 // for blocks, or for their turn to prefill
	waitingDeferred atomic.Int64 // for KV from another engine

	prefixQueries, prefixHits     atomic.Int64 // tokens
	externalQueries, externalHits atomic.Int64
	localCompute, localHit        atomic.Int64 // prompt tokens by source
	external                      atomic.Int64
	generated                     atomic.Int64
	finished                      counters // by finished_reason
	failedTransfers               atomic.Int64
	transferredBytes              atomic.Int64

	firstToken, latency     prometheus.Histogram
	promptTokens, genTokens prometheus.Histogram
	gaps                    prometheus.Histogram
	transferTime, postTime  prometheus.Histogram
	transferBytes, descs    prometheus.Histogram

	requests     counters // path, leg
	violations   counters // kind
	roleMismatch counters // kind
	injected     counters // mode
	aborted      atomic.Int64
}

// counters are counts by label values, joined with a NUL.
type counters struct {
	mu sync.Mutex
	m  map[string]int64
}

func (c *counters) add(key string, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = make(map[string]int64)
	}
	c.m[key] += n
}

func (c *counters) each(fn func(key string, n int64)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, n := range c.m {
		fn(k, n)
	}
}

func (c *counters) total() (sum int64) {
	c.each(func(_ string, n int64) { sum += n })
	return sum
}

func (c *counters) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.m {
		c.m[k] = 0
	}
}

func newMetrics(model string) *metrics {
	labels := prometheus.Labels{"engine": "0", "model_name": model}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets, ConstLabels: labels})
	}
	seconds := []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640}
	short := []float64{.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}
	tokens := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
	size := prometheus.ExponentialBuckets(1<<11, 4, 12)
	m := &metrics{
		firstToken:    histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", seconds),
		latency:       histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", seconds),
		promptTokens:  histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", tokens),
		genTokens:     histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", tokens),
		gaps:          histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", seconds),
		transferTime:  histogram("vllm:nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV Cache transfers.", short),
		postTime:      histogram("vllm:nixl_post_time_seconds", "Histogram of transfer post time for NIXL KV Cache transfers.", short),
		transferBytes: histogram("vllm:nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV Cache transfers.", size),
		descs:         histogram("vllm:nixl_num_descriptors", "Histogram of number of descriptors per NIXL KV Cache transfers.", tokens),
	}
	for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
		m.finished.add(reason, 0)
	}
	for _, kind := range violationKinds {
		m.violations.add(kind, 0)
	}
	return m
}

// violationKinds are the values of enginesim_violations_total's label. They start at 0 so that a test can demand 0.
var violationKinds = []string{
	"read_twice", "expired", "released", "unknown_request", "fewer_blocks", "foreign_blocks", "other_prompt",
	"request_id_mismatch", "missing_request_id", "stale_blocks_on_prefill", "key_reused", "decode_before_kv",
	"incomplete_params", "forbidden_keys", "bad_disagg_id", "first_token_asked", "spec_on_decode", "buffer_exhausted",
}

const kvBytesPerToken = 512 // what the recorded tiny model moves: 16,384 bytes for a block of 32

func (m *metrics) transferred(blocks, blockSize int, took time.Duration) {
	bytes := int64(blocks) * int64(blockSize) * kvBytesPerToken
	m.transferredBytes.Add(bytes)
	m.transferBytes.Observe(float64(bytes))
	m.transferTime.Observe(took.Seconds())
	m.postTime.Observe(took.Seconds())
	m.descs.Observe(2)
}

// handler serves /metrics.
func (s *sim) metricsHandler() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s)
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{DisableCompression: true})
}

// Describe makes the collector an unchecked one: its series come and go with their labels.
func (s *sim) Describe(chan<- *prometheus.Desc) {}

// Collect reads every count at once.
func (s *sim) Collect(ch chan<- prometheus.Metric) {
	m := s.metrics
	for _, h := range []prometheus.Histogram{m.firstToken, m.latency, m.promptTokens, m.genTokens, m.gaps} {
		ch <- h
	}
	c := collector{ch: ch, labels: prometheus.Labels{"engine": "0", "model_name": s.cfg.models[0]}}
	s.collectLoad(&c)
	s.collectCache(&c)
	s.collectNIXL(&c)
	s.collectOurs(&c)
}

type collector struct {
	ch     chan<- prometheus.Metric
	labels prometheus.Labels
}

func (c *collector) send(kind prometheus.ValueType, name, help string, v float64, labels ...string) {
	names := make([]string, 0, len(labels)/2)
	values := make([]string, 0, len(labels)/2)
	for i := 0; i < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	c.ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, c.labels), kind, v, values...)
}

func (c *collector) gauge(name, help string, v float64, labels ...string) {
	c.send(prometheus.GaugeValue, name, help, v, labels...)
}

func (c *collector) counter(name, help string, v int64, labels ...string) {
	c.send(prometheus.CounterValue, name, help, float64(v), labels...)
}

func (s *sim) collectLoad(c *collector) {
	m := s.metrics
	capacity, deferred := float64(m.waitingCapacity.Load()), float64(m.waitingDeferred.Load())
	c.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", float64(m.running.Load()))
	c.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", capacity+deferred)
	const byReason = "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; " +
		"'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals vllm:num_requests_waiting."
	c.gauge("vllm:num_requests_waiting_by_reason", byReason, capacity, "reason", "capacity")
	c.gauge("vllm:num_requests_waiting_by_reason", byReason, deferred, "reason", "deferred")
	for _, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		v := 0.0
		if state == "awake" {
			v = 1
		}
		c.gauge("vllm:engine_sleep_state", "Engine sleep state; awake = 1 means engine is awake.", v, "sleep_state", state)
	}
	c.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", s.pool.usage())
	c.counter("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", 0)
	c.counter("vllm:generation_tokens_total", "Number of generation tokens processed.", m.generated.Load())
	m.finished.each(func(reason string, n int64) {
		c.counter("vllm:request_success_total", "Count of successfully processed requests.", n, "finished_reason", reason)
	})
}

func (s *sim) collectCache(c *collector) {
	m := s.metrics
	c.counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", m.prefixQueries.Load())
	c.counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", m.prefixHits.Load())
	c.counter("vllm:external_prefix_cache_queries_total", "External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of queried tokens.", m.externalQueries.Load())
	c.counter("vllm:external_prefix_cache_hits_total", "External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached tokens.", m.externalHits.Load())
	compute, hit, ext := m.localCompute.Load(), m.localHit.Load(), m.external.Load()
	c.counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", compute+hit+ext)
	const bySource = "Number of prompt tokens by source."
	c.counter("vllm:prompt_tokens_by_source_total", bySource, compute, "source", "local_compute")
	c.counter("vllm:prompt_tokens_by_source_total", bySource, hit, "source", "local_cache_hit")
	c.counter("vllm:prompt_tokens_by_source_total", bySource, ext, "source", "external_kv_transfer")
	c.counter("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", hit+ext)
	const cached = "Prefix-cache hit tokens by the cache tier that supplied them."
	c.counter("vllm:prompt_tokens_cached_by_source_total", cached, hit, "source", "device")
	c.counter("vllm:prompt_tokens_cached_by_source_total", cached, ext, "source", "p2p")
	n := strconv.Itoa(len(s.pool.blocks))
	c.gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", 1,
		"block_size", strconv.Itoa(s.cfg.blockSize), "cache_dtype", "auto", "enable_prefix_caching", "True",
		"gpu_memory_utilization", "0.92", "hash_block_size", "None",
		"kv_cache_size_tokens", strconv.Itoa(len(s.pool.blocks)*s.cfg.blockSize),
		"num_cpu_blocks", "None", "num_gpu_blocks", n, "num_gpu_blocks_override", n,
		"prefix_caching_hash_algo", "sha256_cbor", "sliding_window", "None")
}

func (s *sim) collectNIXL(c *collector) {
	if s.cfg.connector != connectorNIXL {
		return
	}
	m := s.metrics
	for _, h := range []prometheus.Histogram{m.transferTime, m.postTime, m.transferBytes, m.descs} {
		c.ch <- h
	}
	c.counter("vllm:nixl_num_failed_transfers_total", "Number of failed NIXL KV Cache transfers.", m.failedTransfers.Load())
	c.counter("vllm:nixl_num_notifications_after_expiry_total", "Number of notifications for requests whose KV had expired.", s.ledger.late.Load())
	const byStage = "Number of requests by stage of their KV fetch."
	c.gauge("vllm:num_requests_kv_fetch_by_stage", byStage, 0, "stage", "waiting_to_start")
	c.gauge("vllm:num_requests_kv_fetch_by_stage", byStage, float64(m.waitingDeferred.Load()), "stage", "in_progress")
	c.gauge("vllm:num_requests_kv_fetch_by_stage", byStage, 0, "stage", "completed_waiting")
	c.counter("vllm:nixl_num_kv_expired_reqs_total", "Number of requests that had their KV expire.", s.ledger.expired.Load())
}

func (s *sim) collectOurs(c *collector) {
	m := s.metrics
	c.gauge("enginesim_blocks_held", "KV blocks handed over and neither fetched, released nor expired, or waiting for the other leg.", float64(s.held()))
	if s.events != nil {
		c.gauge("enginesim_kv_events_subscribers", "Connections to the socket that publishes KV events.", float64(s.events.subs.count()))
	}
	const over = "KV hand-overs of the prefill side by how they ended; given counts them all."
	c.counter("enginesim_handovers_total", over, s.ledger.given.Load(), "outcome", "given")
	c.counter("enginesim_handovers_total", over, s.ledger.fetched.Load(), "outcome", "fetched")
	c.counter("enginesim_handovers_total", over, s.ledger.freed.Load(), "outcome", "released")
	c.counter("enginesim_handovers_total", over, s.ledger.expired.Load(), "outcome", "expired")
	m.violations.each(func(kind string, n int64) {
		c.counter("enginesim_violations_total", "Requests that a real engine would have answered from KV that was not theirs, or that broke a rule of the protocol.", n, "kind", kind)
	})
	m.roleMismatch.each(func(kind string, n int64) {
		c.counter("enginesim_role_mismatch_total", "Requests served although they do not belong on an engine of this role.", n, "kind", kind)
	})
	m.requests.each(func(key string, n int64) {
		path, leg := cutNUL(key)
		c.counter("enginesim_requests_total", "Requests by path and leg.", n, "path", path, "leg", leg)
	})
	m.injected.each(func(mode string, n int64) {
		c.counter("enginesim_injected_failures_total", "Failures injected by POST /sim/fail.", n, "mode", mode)
	})
	c.counter("enginesim_aborted_total", "Requests whose client left before the answer was complete.", m.aborted.Load())
}

// held is how many blocks wait for the other leg, here or in this engine's buffer, and embeddings for a prefill.
func (s *sim) held() int64 {
	n := s.ledger.held.Load() + s.rooms.held.Load() + s.encodings.held()
	if s.buffer != nil {
		n += int64(s.buffer.held())
	}
	return n
}

func cutNUL(s string) (before, after string) {
	for i := range len(s) {
		if s[i] == 0 {
			return s[:i], s[i+1:]
		}
	}
	return s, ""
}

// violate counts and logs a violation.
func (s *sim) violate(v *violation, xid string) {
	s.metrics.violations.add(v.kind, 1)
	s.logf("%v (x-request-id %q)", v, xid)
}

func (s *sim) logf(format string, args ...any) {
	s.logMu.Lock()
	defer s.logMu.Unlock()
	fmt.Fprintf(s.log, "enginesim "+s.cfg.name()+": "+format+"\n", args...)
}
