package engine

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the counts behind /metrics. Names and labels with the prefix vllm: are those of vLLM 0.32 (recorded
// from a running server); those with enginesim_ are ours.
type metrics struct {
	loadMetrics
	cacheMetrics
	transferMetrics
	ruleMetrics

	generated               atomic.Int64
	finished                Counters // by finished_reason
	firstToken, latency     prometheus.Histogram
	promptTokens, genTokens prometheus.Histogram
	gaps                    prometheus.Histogram
}

// loadMetrics are the numbers of requests.
type loadMetrics struct {
	Running         atomic.Int64
	waitingCapacity atomic.Int64 // for blocks, or for prefill
	WaitingDeferred atomic.Int64 // for KV from another engine
}

// Waiting returns the number of waiting requests.
func (m *loadMetrics) Waiting() int64 { return m.waitingCapacity.Load() + m.WaitingDeferred.Load() }

// cacheMetrics are the sources of prompts' KV, in tokens.
type cacheMetrics struct {
	prefixQueries, prefixHits     atomic.Int64
	externalQueries, externalHits atomic.Int64
	loadedBytes, loadedMicros     atomic.Int64 // from CPU memory
	LocalCompute, LocalHit        atomic.Int64 // prompt tokens by source
	External                      atomic.Int64
}

// transferMetrics are about KV from other engines.
type transferMetrics struct {
	FailedTransfers        atomic.Int64
	transferredBytes       atomic.Int64
	TransferTime, PostTime prometheus.Histogram
	TransferBytes, Descs   prometheus.Histogram
}

// ruleMetrics count requests, and violations.
type ruleMetrics struct {
	Requests     Counters // path, leg
	Violations   Counters // kind
	RoleMismatch Counters // kind
	Injected     Counters // mode
	Aborted      atomic.Int64
}

// Counters are counts by label values, joined with a NUL.
type Counters struct {
	mu sync.Mutex
	m  map[string]int64
}

// Add adds n to the count of key.
func (c *Counters) Add(key string, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.m == nil {
		c.m = make(map[string]int64)
	}
	c.m[key] += n
}

// Each calls fn for every count.
func (c *Counters) Each(fn func(key string, n int64)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k, n := range c.m {
		fn(k, n)
	}
}

// Total returns the sum of all counts.
func (c *Counters) Total() (sum int64) {
	c.Each(func(_ string, n int64) { sum += n })
	return sum
}

// Reset makes every count 0.
func (c *Counters) Reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for k := range c.m {
		c.m[k] = 0
	}
}

func newMetrics(model string, rank int) *metrics {
	labels := prometheus.Labels{"engine": strconv.Itoa(rank), "model_name": model}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets,
			ConstLabels: labels})
	}
	seconds := []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
		640}
	short := []float64{.005, .01, .025, .05, .075, .1, .2, .3, .5, .75, 1, 5}
	tokens := []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
	size := prometheus.ExponentialBuckets(1<<11, 4, 12)
	m := &metrics{
		firstToken: histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.",
			seconds),
		latency: histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.",
			seconds),
		promptTokens: histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", tokens),
		genTokens:    histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", tokens),
		gaps: histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.",
			seconds),
		transferMetrics: transferMetrics{
			TransferTime: histogram("vllm:nixl_xfer_time_seconds",
				"Histogram of transfer duration for NIXL KV Cache transfers.", short),
			PostTime: histogram("vllm:nixl_post_time_seconds",
				"Histogram of transfer post time for NIXL KV Cache transfers.", short),
			TransferBytes: histogram("vllm:nixl_bytes_transferred",
				"Histogram of bytes transferred per NIXL KV Cache transfers.", size),
			Descs: histogram("vllm:nixl_num_descriptors",
				"Histogram of number of descriptors per NIXL KV Cache transfers.", tokens),
		},
	}
	for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
		m.finished.Add(reason, 0)
	}
	for _, kind := range violationKinds {
		m.Violations.Add(kind, 0)
	}
	return m
}

// violationKinds are the values of enginesim_violations_total's label. They start at 0 so that a test can demand 0.
var violationKinds = []string{
	"read_twice", "expired", "released", "unknown_request", "fewer_blocks", "foreign_blocks", "other_prompt",
	"request_id_mismatch", "missing_request_id", "stale_blocks_on_prefill", "key_reused",
	"incomplete_params", "other_block_size", "other_weights", "forbidden_keys", "bad_disagg_id", "first_token_asked",
	"spec_on_decode", "buffer_exhausted",
}

// KVBytesPerToken is the recorded tiny model's: 16,384 bytes for a block of 32.
const KVBytesPerToken = 512

func (m *metrics) Transferred(blocks, blockSize int, took time.Duration) {
	bytes := int64(blocks) * int64(blockSize) * KVBytesPerToken
	m.transferredBytes.Add(bytes)
	m.TransferBytes.Observe(float64(bytes))
	m.TransferTime.Observe(took.Seconds())
	m.PostTime.Observe(took.Seconds())
	m.Descs.Observe(2)
}

// Collector sends series with the labels of vLLM's.
type Collector struct {
	Ch     chan<- prometheus.Metric
	Labels prometheus.Labels
}

func (c *Collector) send(kind prometheus.ValueType, name, help string, v float64, labels ...string) {
	names := make([]string, 0, len(labels)/2)
	values := make([]string, 0, len(labels)/2)
	for i := 0; i < len(labels); i += 2 {
		names, values = append(names, labels[i]), append(values, labels[i+1])
	}
	c.Ch <- prometheus.MustNewConstMetric(prometheus.NewDesc(name, help, names, c.Labels), kind, v, values...)
}

// Gauge sends a gauge; labels are alternating names and values.
func (c *Collector) Gauge(name, help string, v float64, labels ...string) {
	c.send(prometheus.GaugeValue, name, help, v, labels...)
}

// Counter sends a counter; labels are alternating names and values.
func (c *Collector) Counter(name, help string, v int64, labels ...string) {
	c.send(prometheus.CounterValue, name, help, float64(v), labels...)
}

// Collect sends the engine's own series.
func (e *Engine) Collect(c *Collector) {
	m := e.Metrics
	for _, h := range []prometheus.Histogram{m.firstToken, m.latency, m.promptTokens, m.genTokens, m.gaps} {
		c.Ch <- h
	}
	e.collectLoad(c)
	e.collectCache(c)
}

func (e *Engine) collectLoad(c *Collector) {
	m := e.Metrics
	capacity, deferred := float64(m.waitingCapacity.Load()), float64(m.WaitingDeferred.Load())
	c.Gauge("vllm:num_requests_running", "Number of requests in model execution batches.", float64(m.Running.Load()))
	c.Gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", capacity+deferred)
	const byReason = "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling " +
		"capacity; " +
		"'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all " +
		"reasons equals vllm:num_requests_waiting."
	c.Gauge("vllm:num_requests_waiting_by_reason", byReason, capacity, "reason", "capacity")
	c.Gauge("vllm:num_requests_waiting_by_reason", byReason, deferred, "reason", "deferred")
	for _, state := range []string{"awake", "weights_offloaded", "discard_all"} {
		v := 0.0
		if state == "awake" {
			v = 1
		}
		c.Gauge("vllm:engine_sleep_state", "Engine sleep state; awake = 1 means engine is awake.", v, "sleep_state",
			state)
	}
	c.Gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", e.Pool.Usage())
	c.Counter("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", 0)
	c.Counter("vllm:generation_tokens_total", "Number of generation tokens processed.", m.generated.Load())
	m.finished.Each(func(reason string, n int64) {
		c.Counter("vllm:request_success_total", "Count of successfully processed requests.", n, "finished_reason",
			reason)
	})
}

func (e *Engine) collectCache(c *Collector) {
	m := e.Metrics
	c.Counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.",
		m.prefixQueries.Load())
	c.Counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.",
		m.prefixHits.Load())
	c.Counter("vllm:external_prefix_cache_queries_total",
		"External prefix cache queries from KV connector cross-instance cache sharing, in terms of number of "+
			"queried tokens.", m.externalQueries.Load())
	c.Counter("vllm:external_prefix_cache_hits_total",
		"External prefix cache hits from KV connector cross-instance cache sharing, in terms of number of cached "+
			"tokens.", m.externalHits.Load())
	compute, hit, ext := m.LocalCompute.Load(), m.LocalHit.Load(), m.External.Load()
	c.Counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", compute+hit+ext)
	const bySource = "Number of prompt tokens by source."
	c.Counter("vllm:prompt_tokens_by_source_total", bySource, compute, "source", "local_compute")
	c.Counter("vllm:prompt_tokens_by_source_total", bySource, hit, "source", "local_cache_hit")
	c.Counter("vllm:prompt_tokens_by_source_total", bySource, ext, "source", "external_kv_transfer")
	c.Counter("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", hit+ext)
	const cached = "Prefix-cache hit tokens by the cache tier that supplied them."
	c.Counter("vllm:prompt_tokens_cached_by_source_total", cached, hit, "source", "device")
	c.Counter("vllm:prompt_tokens_cached_by_source_total", cached, ext, "source", "p2p")
	offload := "None"
	if e.Cfg.HostBlocks > 0 {
		offload = strconv.FormatFloat(float64(e.Cfg.HostBlocks*e.Cfg.BlockSize*KVBytesPerToken)/(1<<30), 'g', -1, 64)
		c.Counter("vllm:kv_offload_total_bytes_total", "Number of bytes offloaded by KV connector",
			m.loadedBytes.Load(), "transfer_type", "CPU_to_GPU")
		c.Gauge("vllm:kv_offload_total_time_total", "Total time measured by all KV offloading operations",
			float64(m.loadedMicros.Load())/1e6, "transfer_type", "CPU_to_GPU")
	}
	n := strconv.Itoa(e.Cfg.Blocks)
	c.Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", 1,
		"block_size", strconv.Itoa(e.Cfg.BlockSize), "cache_dtype", e.Cfg.KVDtype, "enable_prefix_caching", "True",
		"gpu_memory_utilization", "0.92", "hash_block_size", "None",
		"kv_offloading_backend", "native", "kv_offloading_size", offload,
		"kv_cache_size_tokens", strconv.Itoa(e.Cfg.Blocks*e.Cfg.BlockSize),
		"num_cpu_blocks", "None", "num_gpu_blocks", n, "num_gpu_blocks_override", n,
		"prefix_caching_hash_algo", "sha256_cbor", "sliding_window", "None")
}
