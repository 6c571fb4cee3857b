package scrape

import (
	"bytes"
	"math"
	"time"

	"tandem/kvstate"
)

// Read identifies the engine of a metrics page and returns its signals. ok is false if the engine is unknown, or if
// the page has nothing about its load. If rank is not "", only series with its label, or without any rank label,
// count. The caller sets the time.
func Read(page []byte, rank string) (engine string, s kvstate.Signals, ok bool) {
	for _, e := range engines() {
		if !bytes.Contains(page, []byte("\n"+e.prefix)) && !bytes.HasPrefix(page, []byte(e.prefix)) {
			continue
		}
		r := reading{running: -1, waiting: -1, usage: -1, tokens: -1, blocks: -1, blockTokens: -1, work: -1}
		each(page, e.prefix, e.letters, func(s sample) {
			if rank == "" || e.rank == "" || s.label(e.rank) == "" || s.label(e.rank) == rank {
				e.take(&r, s)
			}
		})
		if s, ok := r.signals(); ok {
			return e.name, s, true
		}
	}
	return "", kvstate.UnknownSignals(), false
}

// engine is a known engine. Metrics that take reads begin with the prefix and one of the letters.
type engine struct {
	name, prefix, letters string
	rank                  string // the label with the data-parallel rank; "": none
	take                  func(*reading, sample)
}

func engines() []engine {
	return []engine{
		{"vllm", "vllm:", "nkgcpirt", "engine", (*reading).vllm},
		{"sglang", "sglang:", "ntmpcighl", "dp_rank", (*reading).sglang},
		{"trtllm", "trtllm_", "nk", "", (*reading).trtllm}, {"triton", "nv_trt_llm_", "rk", "", (*reading).triton},
	}
}

// reading has the values read so far; -1: none.
type reading struct {
	running, waiting    float64 // summed over data-parallel ranks
	usage               float64 // of the fullest rank, 0 to 1
	tokens              float64 // capacity, summed
	blocks, blockTokens float64 // the same as a product of two figures, for engines that report those
	ranks               map[string]bool
	transfers           transferCounts
	answers             answerCounts
	work, expired       float64 // see [kvstate.Signals]
	steps               bool    // the figures are those of the engine's last step
	host                hostCounts
}

// hostCounts are about KV in CPU memory: its capacity, in tokens or bytes, and what was loaded from there.
type hostCounts struct {
	tokens, bytes, loadedTokens, loadedBytes, seconds float64
	formerBytes, formerSeconds                        float64 // under vLLM's former names, which may be there as well
}

// transferCounts count the KV that the engine has fetched since it started.
type transferCounts struct{ transfers, bytes, seconds, tokens, failed float64 }

// answerCounts count the tokens that the engine has generated since it started.
type answerCounts struct{ answers, single, tokens, gaps, seconds, generated float64 }

// add adds a value; invalid counts are ignored.
func add(sum *float64, v float64) {
	if v >= 0 && v <= maxCount {
		*sum = max(*sum, 0) + v
	}
}

// maxCount is larger than any real count; the bytes of KV fetched in years at 25 GB/s are below it.
const maxCount = 1 << 62

func most(highest *float64, v float64) {
	if v >= 0 && v <= 1.5 { // engines overshoot a little; values far above 1 are something else
		*highest = max(*highest, min(v, 1))
	}
}

func (r *reading) signals() (kvstate.Signals, bool) {
	if r.tokens < 0 && r.blocks >= 0 && r.blockTokens > 0 {
		add(&r.tokens, r.blocks*r.blockTokens)
	}
	s := kvstate.Signals{Running: count(r.running), Waiting: count(r.waiting), KVUsage: r.usage,
		KVTokens: count(r.tokens), Expired: count(r.expired)}
	if r.steps { // an engine that has not worked yet has counters, too
		did := r.answers.generated + r.answers.answers + r.transfers.transfers + r.transfers.failed
		s.Work = count(r.work + 1 + did)
	}
	s.Transfers = kvstate.TransferCounters{
		Transfers: count(r.transfers.transfers), Bytes: count(r.transfers.bytes),
		Time: time.Duration(count(r.transfers.seconds * float64(time.Second))), Tokens: count(r.transfers.tokens),
		Failed: count(r.transfers.failed),
	}
	single := max(r.answers.single, 0)
	s.Answers = kvstate.AnswerCounters{
		Answers: count(max(r.answers.answers-single, 0)), Tokens: count(max(r.answers.tokens-single, 0)),
		Gaps:      count(r.answers.gaps),
		GapTime:   time.Duration(count(r.answers.seconds * float64(time.Second))),
		Generated: count(r.answers.generated),
	}
	r.host.loadedBytes = max(r.host.loadedBytes, r.host.formerBytes)
	r.host.seconds = max(r.host.seconds, r.host.formerSeconds)
	s.Host = kvstate.HostMemory{
		Tokens: count(r.host.tokens), Bytes: count(r.host.bytes), LoadedTokens: count(r.host.loadedTokens),
		LoadedBytes: count(r.host.loadedBytes), LoadTime: time.Duration(count(r.host.seconds * float64(time.Second))),
	}
	return s, s.Running >= 0 || s.Waiting >= 0 || s.KVUsage >= 0
}

// count converts a sum to an int64.
func count(v float64) int64 { return int64(math.Round(min(v, maxCount))) }

// vllm reads vllm/v1/metrics/loggers.py of vLLM 0.9 to 0.33; the usage had another name until 0.11, which was the
// only one before 0.9.2. With several engines behind one server (label engine) each has its series.
func (r *reading) vllm(s sample) {
	switch string(s.name) {
	case "vllm:num_requests_running":
		r.steps = true
		add(&r.running, s.value())
	case "vllm:num_requests_waiting":
		add(&r.waiting, s.value())
	case "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc":
		most(&r.usage, s.value())
	case "vllm:cache_config_info": // all values are labels, as text; "None" until the engine has measured its memory
		// 0.32; with hybrid models blocks * block_size is another figure
		if tokens := s.number("kv_cache_size_tokens"); tokens > 0 {
			add(&r.tokens, tokens)
		} else if blocks, size := s.number("num_gpu_blocks"), s.number("block_size"); blocks > 0 && size > 0 {
			add(&r.tokens, blocks*size)
		}
		if size := s.number("kv_offloading_size"); size > 0 { // of all ranks together
			add(&r.host.bytes, size*(1<<30))
		}
	// the same, renamed; hidden from 0.12, gone by 0.19
	case "vllm:inter_token_latency_seconds_count", "vllm:time_per_output_token_seconds_count":
		add(&r.answers.gaps, s.value())
	case "vllm:inter_token_latency_seconds_sum", "vllm:time_per_output_token_seconds_sum":
		add(&r.answers.seconds, s.value())
	case "vllm:prompt_tokens_total", "vllm:iteration_tokens_total_count": // in each step that computes a token
		add(&r.work, s.value())
	case "vllm:generation_tokens_total":
		add(&r.answers.generated, s.value())
	case "vllm:request_generation_tokens_bucket", "vllm:request_generation_tokens_count",
		"vllm:request_generation_tokens_sum":
		r.vllmLengths(s)
	default:
		r.vllmTransfers(s)
	}
}

// vllmLengths reads the histogram of the lengths of answers.
func (r *reading) vllmLengths(s sample) {
	switch string(s.name) {
	case "vllm:request_generation_tokens_count":
		add(&r.answers.answers, s.value())
	case "vllm:request_generation_tokens_sum":
		add(&r.answers.tokens, s.value())
	default:
		if s.number("le") == 1 { // answers of one token, or of none
			add(&r.answers.single, s.value())
		}
	}
}

// vllmTransfers reads what vLLM's NIXL and offloading connectors count.
func (r *reading) vllmTransfers(s sample) {
	switch string(s.name) {
	case "vllm:nixl_xfer_time_seconds_count": // KV fetched from others; all ranks' transfers together
		add(&r.transfers.transfers, s.value())
	case "vllm:nixl_xfer_time_seconds_sum":
		add(&r.transfers.seconds, s.value())
	case "vllm:nixl_bytes_transferred_sum":
		add(&r.transfers.bytes, s.value())
	case "vllm:nixl_num_kv_expired_reqs_total": // 0.32, nixl/stats.py
		add(&r.expired, s.value())
	case "vllm:nixl_num_failed_transfers_total":
		add(&r.transfers.failed, s.value())
	case "vllm:prompt_tokens_by_source_total":
		if s.label("source") == "external_kv_transfer" {
			add(&r.transfers.tokens, s.value())
		}
	default:
		r.vllmOffloading(s)
	}
}

// vllmOffloading reads what vLLM's offloading connector counts.
func (r *reading) vllmOffloading(s sample) {
	switch string(s.name) {
	case "vllm:kv_offload_load_bytes_total":
		add(&r.host.loadedBytes, s.value())
	case "vllm:kv_offload_load_time_total":
		add(&r.host.seconds, s.value())
	case "vllm:kv_offload_total_bytes_total":
		if s.label("transfer_type") == "CPU_to_GPU" {
			add(&r.host.formerBytes, s.value())
		}
	case "vllm:kv_offload_total_time_total":
		if s.label("transfer_type") == "CPU_to_GPU" {
			add(&r.host.formerSeconds, s.value())
		}
	}
}

// sglang reads srt/observability/metrics_collector.py of SGLang 0.4.9 to 0.5.23. Every rank of a tensor- or
// pipeline-parallel group exports the same, data-parallel ranks each their own. Requests that wait for a hand-over
// count as waiting. None of these metrics shows that its scheduler stands still: the gauges are those of the last
// batch, for up to 30 s after it (scheduler_runtime_checker_mixin.py), and its counters rise when answers end.
func (r *reading) sglang(s sample) {
	var sum *float64
	switch string(s.name) {
	case "sglang:num_running_reqs":
		sum = &r.running
	case "sglang:num_queue_reqs",
		"sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_prefill_prealloc_queue_reqs", // one queue, renamed
		"sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs":
		sum = &r.waiting
	case "sglang:token_usage":
		most(&r.usage, s.value())
	case "sglang:max_total_num_tokens": // since 0.5.10
		sum = &r.tokens
	case "sglang:num_pages": // since 0.5.16
		sum = &r.blocks
	case "sglang:hicache_host_total_tokens":
		sum = &r.host.tokens
	case "sglang:load_back_bytes_total":
		sum = &r.host.loadedBytes
	case "sglang:load_back_tokens_total":
		sum = &r.host.loadedTokens
	case "sglang:load_back_duration_seconds_sum":
		sum = &r.host.seconds
	case "sglang:page_size":
		r.blockTokens = max(r.blockTokens, s.value())
	case "sglang:inter_token_latency_seconds_count": // from the tokenizer's process, without ranks
		add(&r.answers.gaps, s.value())
	case "sglang:inter_token_latency_seconds_sum":
		add(&r.answers.seconds, s.value())
	case "sglang:generation_tokens_total":
		add(&r.answers.generated, s.value())
	case "sglang:generation_tokens_histogram_count":
		add(&r.answers.answers, s.value())
	case "sglang:generation_tokens_histogram_sum":
		add(&r.answers.tokens, s.value())
	case "sglang:cache_config_info": // 0.5.10
		add(&r.blocks, s.number("num_pages"))
		r.blockTokens = max(r.blockTokens, s.number("page_size"))
	}
	if sum != nil && r.counts(s) {
		add(sum, s.value())
	}
}

// counts reports whether to add a sample: the first of its name from its data-parallel rank.
func (r *reading) counts(s sample) bool {
	tp, pp := s.label("tp_rank"), s.label("pp_rank")
	key := string(s.name) + "\x00" + s.label("dp_rank")
	if tp != "" && tp != "0" || pp != "" && pp != "0" || r.ranks[key] {
		return false
	}
	if r.ranks == nil {
		r.ranks = map[string]bool{}
	}
	r.ranks[key] = true
	return true
}

// trtllm reads tensorrt_llm/metrics/collector.py. Old servers (1.1.0rc5) export latencies only, which do not show
// load.
func (r *reading) trtllm(s sample) {
	switch string(s.name) {
	case "trtllm_num_requests_running":
		add(&r.running, s.value())
	case "trtllm_num_requests_waiting":
		add(&r.waiting, s.value())
	case "trtllm_kv_cache_utilization":
		most(&r.usage, s.value())
	case "trtllm_kv_cache_max_blocks":
		add(&r.blocks, s.value())
	case "trtllm_kv_cache_tokens_per_block":
		r.blockTokens = max(r.blockTokens, s.value())
	}
}

// triton reads the TensorRT-LLM back end of Triton (model server protocol of the Gateway API Inference Extension,
// 003).
func (r *reading) triton(s sample) {
	switch string(s.name) {
	case "nv_trt_llm_request_metrics":
		switch s.label("request_type") {
		case "scheduled":
			add(&r.running, s.value())
		case "waiting":
			add(&r.waiting, s.value())
		}
	case "nv_trt_llm_kv_cache_block_metrics":
		switch s.label("kv_cache_block_type") {
		case "fraction":
			most(&r.usage, s.value())
		case "max":
			add(&r.blocks, s.value())
		case "tokens_per":
			r.blockTokens = max(r.blockTokens, s.value())
		}
	}
}
