package paths

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPathsAllowWhatClientsUse(t *testing.T) {
	for _, tt := range []struct {
		engine, method, path string
		want                 bool
	}{
		{"vllm", "GET", "/health", true},
		{"vllm", "HEAD", "/health", true},
		{"vllm", "OPTIONS", "/v1/embeddings", true},
		{"vllm", "POST", "/health", false},
		{"vllm", "POST", "/tokenize", true},
		{"vllm", "POST", "/tokenize?a=b", true},
		{"vllm", "POST", "/tok%65nize", true},
		{"vllm", "POST", "/tok%2565nize", false},
		{"vllm", "POST", "/Tokenize", false},
		{"vllm", "POST", "//tokenize", false},
		{"vllm", "POST", "/./tokenize", false},
		{"vllm", "POST", "/v1/../tokenize", false},
		{"vllm", "POST", "/tokenize/", false},
		{"vllm", "POST", "/tokenize;a", false},
		{"vllm", "POST", "/tokenize%3Fa", false},
		{"vllm", "POST", "/tokenize%00", false},
		{"vllm", "POST", "/tokenize%20", false},
		{"vllm", "POST", "tokenize", false},
		{"vllm", "POST", "", false},
		{"vllm", "GET", "/v1/models/tiny", true},
		{"vllm", "GET", "/v1/models/", false},
		{"vllm", "GET", "/v1/models/a/b", true},
		{"vllm", "POST", "/v1/responses/resp_1/cancel", true},
		{"vllm", "POST", "/v1/responses/resp_1/other", false},
		{"vllm", "POST", "/v1/responses/..%2F..%2Fsleep/cancel", false},
		{"vllm", "POST", "/generate", false},
		{"vllm", "POST", "/fault_tolerance/apply", false},
		{"vllm", "POST", "/release_kv_cache_memory", false},
		{"vllm", "POST", "/sleep", false},
		{"vllm", "POST", "/v1/load_lora_adapter", false},
		{"vllm", "GET", "/metrics", false},
		{"vllm", "POST", "/inference/v1/abort_requests", false},
		{"vllm", "GET", "/server_info", false},
		{"vllm", "GET", "/docs", false},
		{"sglang", "POST", "/generate", true},
		{"sglang", "PUT", "/generate", false},
		{"sglang", "POST", "/vertex_generate", false},
		{"sglang", "POST", "/pause_generation", false},
		{"sglang", "POST", "/pd_role_switch", false},
		{"sglang", "POST", "/begin_weight_update", false},
		{"sglang", "PUT", "/hicache/storage-backend", false},
		{"sglang", "DELETE", "/hicache/storage-backend", false},
		{"sglang", "GET", "/flush_cache", false},
		{"sglang", "GET", "/get_server_info", false},
		{"sglang", "PUT", "/classify", false},
		{"sglang", "POST", "/classify", true},
		{"trtllm", "POST", "/tokenize", false},
		{"trtllm", "POST", "/v1/embeddings", true},
		{"trtllm", "GET", "/kv_cache_events", false},
		{"trtllm", "POST", "/_internal/x", false},
		{"any", "POST", "/tokenize", true},
		{"any", "POST", "/generate", true},
		{"any", "POST", "/vertex_generate", false},
	} {
		p, err := New(tt.engine, nil)
		require.NoError(t, err)
		require.Equal(t, tt.want, p.Allow(tt.method, tt.path), "%s: %s %s", tt.engine, tt.method, tt.path)
	}
}

func TestPathsByConfiguration(t *testing.T) {
	p, err := New("vllm", []string{"POST /v1/things/*", "PUT /tokenize"})
	require.NoError(t, err)
	require.True(t, p.Allow("POST", "/v1/things/7"))
	require.True(t, p.Allow("PUT", "/tokenize"))
	require.True(t, p.Allow("POST", "/tokenize"))
	require.False(t, p.Allow("POST", "/v1/things/7/8"))
	for _, wrong := range []string{"", "/path", "post /path", "POST path", "POST /a//b", "POST /a/../b", "POST /a?b", "POST /a%20b", " /a"} {
		_, err := New("vllm", []string{wrong})
		require.Error(t, err, wrong)
	}
}

func TestPrefixesOfGateways(t *testing.T) {
	for path, want := range map[string]string{
		"/llm/v1/completions?x=/llm/": "/v1/completions?x=/llm/", "/team/a/metrics": "/metrics", "/llm": "/llm", "/llmx/v1/completions": "/llmx/v1/completions",
		"/llm//v1/completions": "//v1/completions", "/llm/llm/v1/completions": "/llm/v1/completions", "/v1/completions": "/v1/completions", "": "",
	} {
		rest, ok := WithoutPrefix([]string{"/llm", "/team/a"}, []byte(path))
		require.Equal(t, want, string(rest), path)
		require.Equal(t, want != path, ok, path)
	}
}
