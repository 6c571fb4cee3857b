package scrape

import (
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

func page(t testing.TB, name string) []byte {
	t.Helper()
	text, err := os.ReadFile("testdata/" + name)
	require.NoError(t, err)
	return text
}

// The engine and the figures of a page. The page of vLLM 0.32 was recorded; the others are composed of lines of the
// releases named in engines.go.
func TestRead(t *testing.T) {
	unknown := kvstate.UnknownSignals()
	for name, tt := range map[string]struct {
		page, engine string
		want         kvstate.Signals
	}{
		"vLLM 0.32": {string(page(t, "vllm-0.32.0.txt")), "vllm", kvstate.Signals{Work: 1240, KVTokens: 16384, Answers: kvstate.AnswerCounters{Answers: 8, Tokens: 72, Gaps: 64, GapTime: 118992884, Generated: 72}}},
		"vLLM that has not worked yet": {`
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 0.0
`, "vllm", kvstate.Signals{Work: 1, Waiting: -1, KVUsage: -1, KVTokens: -1}},
		"vLLM, two engines behind one server": {`
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="1",model_name="m",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
`, "vllm", kvstate.Signals{Running: 7, Waiting: 2, KVUsage: .5, KVTokens: 32000}},
		"vLLM, a decode engine with NIXL, two ranks of data": {`
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 12.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 7000.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="external_kv_transfer"} 500.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 3.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 300.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 4.5
vllm:inter_token_latency_seconds_count{engine="1",model_name="m"} 20.0
vllm:inter_token_latency_seconds_sum{engine="1",model_name="m"} 0.5
vllm:generation_tokens_total{engine="0",model_name="m"} 350.0
vllm:generation_tokens_total{engine="1",model_name="m"} 21.0
vllm:request_generation_tokens_bucket{engine="0",le="1.0",model_name="m"} 5.0
vllm:request_generation_tokens_bucket{engine="0",le="2.0",model_name="m"} 5.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 8.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 308.0
vllm:request_generation_tokens_sum{engine="1",model_name="m"} 21.0
vllm:nixl_xfer_time_seconds_bucket{engine="0",le="0.005",model_name="m"} 3.0
vllm:nixl_xfer_time_seconds_count{engine="0",model_name="m"} 5.0
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m"} 0.25
vllm:nixl_xfer_time_seconds_count{engine="1",model_name="m"} 1.0
vllm:nixl_xfer_time_seconds_sum{engine="1",model_name="m"} 0.125
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 5.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 1.2e+12
vllm:nixl_bytes_transferred_sum{engine="1",model_name="m"} 16384.0
`, "vllm", kvstate.Signals{Work: 385, Running: 1, KVTokens: -1, Transfers: kvstate.TransferCounters{Transfers: 6, Bytes: 1_200_000_016_384, Time: 375 * time.Millisecond, Tokens: 7500}, Answers: kvstate.AnswerCounters{Answers: 3, Tokens: 324, Gaps: 320, GapTime: 5 * time.Second, Generated: 371}}},
		"vLLM with KV in CPU memory": {`
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:cache_config_info{block_size="16",engine="0",kv_offloading_backend="native",kv_offloading_size="8.0",num_gpu_blocks="1000"} 1.0
vllm:kv_offload_total_bytes_total{engine="0",transfer_type="GPU_to_CPU"} 9e+09
vllm:kv_offload_total_bytes_total{engine="0",transfer_type="CPU_to_GPU"} 3e+09
vllm:kv_offload_total_time_total{engine="0",transfer_type="GPU_to_CPU"} 2.0
vllm:kv_offload_total_time_total{engine="0",transfer_type="CPU_to_GPU"} 0.25
`, "vllm", kvstate.Signals{Running: 1, KVUsage: -1, KVTokens: 16000, Host: kvstate.HostMemory{Bytes: 8 << 30, LoadedBytes: 3e9, LoadTime: 250 * time.Millisecond}}},
		"vLLM with the newer names of loads beside the former": {`
vllm:num_requests_running{engine="0"} 1.0
vllm:num_requests_waiting{engine="0"} 0.0
vllm:kv_offload_total_bytes_total{engine="0",transfer_type="CPU_to_GPU"} 3e+09
vllm:kv_offload_load_bytes_total{engine="0"} 3e+09
vllm:kv_offload_load_time_total{engine="0"} 0.5
`, "vllm", kvstate.Signals{Running: 1, KVUsage: -1, KVTokens: -1, Host: kvstate.HostMemory{LoadedBytes: 3e9, LoadTime: 500 * time.Millisecond}}},
		"SGLang with HiCache": {`
sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 8.0
sglang:num_queue_reqs{dp_rank="0",tp_rank="0"} 2.0
sglang:max_total_num_tokens{dp_rank="0",tp_rank="0"} 100000.0
sglang:hicache_host_total_tokens{dp_rank="0",tp_rank="0"} 400000.0
sglang:hicache_host_total_tokens{dp_rank="0",tp_rank="1"} 400000.0
sglang:load_back_tokens_total{dp_rank="0",tp_rank="0"} 5000.0
sglang:load_back_tokens_total{dp_rank="0",tp_rank="1"} 5000.0
sglang:load_back_duration_seconds_sum{dp_rank="0",tp_rank="0"} 0.125
`, "sglang", kvstate.Signals{Running: 8, Waiting: 2, KVUsage: -1, KVTokens: 100000, Host: kvstate.HostMemory{Tokens: 400000, LoadedTokens: 5000, LoadTime: 125 * time.Millisecond}}},
		"vLLM before 0.9.2": {`vllm:num_requests_running{model_name="m"} 1.0
vllm:num_requests_waiting{model_name="m"} 5.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.75
vllm:time_per_output_token_seconds_count{model_name="m"} 10.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 0.2
vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0
`, "vllm", kvstate.Signals{Running: 1, Waiting: 5, KVUsage: .75, KVTokens: -1, Answers: kvstate.AnswerCounters{Gaps: 10, GapTime: 200 * time.Millisecond}}},
		"SGLang 0.5.23, tensor-parallel, two data-parallel ranks": {`
sglang:num_running_reqs{dp_rank="0",engine_type="unified",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 8.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",moe_ep_rank="0",pp_rank="0",tp_rank="1"} 8.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",moe_ep_rank="1",pp_rank="0",tp_rank="0"} 8.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",moe_ep_rank="0",pp_rank="0",tp_rank="0"} 1.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",pp_rank="0",tp_rank="0"} 2.0
sglang:token_usage{dp_rank="0",pp_rank="0",tp_rank="0"} 0.9
sglang:token_usage{dp_rank="1",pp_rank="0",tp_rank="0"} 0.1
sglang:max_total_num_tokens{dp_rank="0",pp_rank="0",tp_rank="0"} 100000.0
sglang:max_total_num_tokens{dp_rank="1",pp_rank="0",tp_rank="0"} 100000.0
sglang:inter_token_latency_seconds_count{engine_type="unified",model_name="m"} 183.0
sglang:inter_token_latency_seconds_sum{engine_type="unified",model_name="m"} 3.5
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m"} 274.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m"} 204.0
sglang:generation_tokens_histogram_count{engine_type="unified",model_name="m"} 42.0
sglang:generation_tokens_histogram_sum{engine_type="unified",model_name="m"} 467.0
`, "sglang", kvstate.Signals{Running: 9, Waiting: 2, KVUsage: .9, KVTokens: 200000, Answers: kvstate.AnswerCounters{Answers: 42, Tokens: 467, Gaps: 183, GapTime: 3500 * time.Millisecond, Generated: 478}}},
		"SGLang prefill": {`sglang:num_running_reqs{engine_type="prefill",tp_rank="0"} 1.0
sglang:num_queue_reqs{engine_type="prefill",tp_rank="0"} 2.0
sglang:num_prefill_bootstrap_queue_reqs{engine_type="prefill",tp_rank="0"} 4.0
sglang:num_pages{engine_type="prefill",tp_rank="0"} 500.0
sglang:page_size{engine_type="prefill",tp_rank="0"} 64.0
`, "sglang", kvstate.Signals{Running: 1, Waiting: 6, KVUsage: -1, KVTokens: 32000}},
		"SGLang 0.5.10 decode": {`sglang:num_running_reqs{tp_rank="0"} 1.0
sglang:num_queue_reqs{tp_rank="0"} 0.0
sglang:num_decode_prealloc_queue_reqs{tp_rank="0"} 3.0
sglang:num_decode_transfer_queue_reqs{tp_rank="0"} 2.0
sglang:token_usage{tp_rank="0"} 0.5
sglang:cache_config_info{num_pages="100",page_size="16"} 1.0
`, "sglang", kvstate.Signals{Running: 1, Waiting: 5, KVUsage: .5, KVTokens: 1600}},
		"TensorRT-LLM": {`trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 4.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 1.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.125
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 2048.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 32.0
`, "trtllm", kvstate.Signals{Running: 4, Waiting: 1, KVUsage: .125, KVTokens: 65536}},
		"TensorRT-LLM 1.1.0rc5, which tells no load": {"trtllm_request_success_total{model_name=\"m\"} 7.0\n", "", unknown},
		"Triton": {`nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 1
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.5
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 10
`, "triton", kvstate.Signals{Running: 2, Waiting: 1, KVUsage: .5, KVTokens: 640}},
		"statistics in JSON":        {`[{"iter":1,"gpuMemUsage":1}]`, "", unknown},
		"somebody else's":           {"go_goroutines 7\n", "", unknown},
		"a name inside a help text": {"# HELP x vllm:num_requests_running 3\n", "", unknown},
		"no numbers": {`vllm:num_requests_running{engine="0"} NaN
vllm:num_requests_waiting{engine="0"} -1
vllm:kv_cache_usage_perc{engine="0"} +Inf
`, "", unknown},
		"labels that are hard to read, a time stamp": {"vllm:num_requests_running{a=\"}\",b=\"\\\"{,\",engine=\"0\"} 6 1700000000000\n", "vllm",
			kvstate.Signals{Running: 6, Waiting: -1, KVUsage: -1, KVTokens: -1}},
	} {
		t.Run(name, func(t *testing.T) {
			engine, got, ok := Read([]byte(tt.page), "")
			require.Equal(t, tt.engine, engine)
			require.Equal(t, tt.engine != "", ok)
			require.Equal(t, tt.want, got)
		})
	}
}

// twin reads a line in a slow, obvious way.
func twin(line string) (name, labels string, value float64, ok bool) {
	m := regexp.MustCompile(`^([^{ \t]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)(?: +\S+)?[ \t]*$`).FindStringSubmatch(line)
	if m == nil {
		return "", "", 0, false
	}
	v, err := strconv.ParseFloat(m[3], 64)
	return m[1], m[2], v, err == nil
}

func FuzzParse(f *testing.F) {
	for line := range strings.Lines(string(page(f, "vllm-0.32.0.txt"))) {
		if strings.Contains(line, "num_requests") {
			f.Add(strings.TrimSuffix(line, "\n"))
		}
	}
	f.Add(`vllm:x{a="}",b="\"{,",engine="0"} 6 1700000000000`)
	f.Add(`vllm:x{a="b} 1`)
	f.Add(`vllm:x 0x1p-2`)
	f.Fuzz(func(t *testing.T, line string) {
		if strings.ContainsAny(line, "\n\r\v\f\u0085\u00a0") {
			return
		}
		Read([]byte(line), "") // does not panic
		name, labels, value, fine := twin(line)
		if !fine || !strings.HasPrefix(name, "vllm:") || name == "vllm:" {
			return
		}
		found := 0
		each([]byte(line), "vllm:", name[len("vllm:"):], func(s sample) {
			found++
			gotLabels, gotValue, ok := s.split()
			require.True(t, ok)
			require.Equal(t, name, string(s.name))
			require.Equal(t, labels, string(gotLabels))
			require.True(t, value == gotValue || value != value)
			s.label("engine")
		})
		require.Equal(t, 1, found)
	})
}

// BenchmarkRead reads one page of the engine with the longest pages.
func BenchmarkRead(b *testing.B) {
	text := page(b, "vllm-0.32.0.txt")
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, _, ok := Read(text, ""); !ok {
			b.Fatal("not read")
		}
	}
}

// One rank of several behind one port: its own series, and those without a rank.
func TestReadOfARank(t *testing.T) {
	const vllm = `vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 5
vllm:kv_cache_usage_perc{engine="0"} 0.9
vllm:kv_cache_usage_perc{engine="1"} 0.1
`
	const sglang = `sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3
sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 5
sglang:token_usage{dp_rank="1",tp_rank="0"} 0.1
sglang:page_size{tp_rank="0"} 16
`
	for _, page := range []string{vllm, sglang} {
		_, got, ok := Read([]byte(page), "1")
		require.True(t, ok)
		require.EqualValues(t, 5, got.Running)
		require.InDelta(t, .1, got.KVUsage, 1e-9)
		_, got, _ = Read([]byte(page), "")
		require.EqualValues(t, 8, got.Running)
	}
}
