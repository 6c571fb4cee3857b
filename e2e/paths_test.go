package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A request to an engine's other paths reaches it only if the path is for clients, however it is spelled, and only
// with a body that was checked, or that no engine reads as JSON.
func TestEnginesControlSurface(t *testing.T) {
	t.Parallel()
	const hostile = `{"text":"a","bootstrap_host":"127.0.0.1","bootstrap_port":1,"bootstrap_room":7}`
	f := start(t, options{dialect: "sglang", envoyFields: `, pathPrefixes: ["/llm"]`})
	for i, tt := range []struct {
		method, path, headers, body string
		status                      int
	}{
		{"POST", "/pause_generation", "content-type: application/json\r\n", `{}`, 404},
		{"POST", "/pd_role_switch", "content-type: application/json\r\n", `{}`, 404},
		{"POST", "/begin_weight_update", "content-type: application/json\r\n", `{}`, 404},
		{"PUT", "/hicache/storage-backend", "content-type: application/json\r\n", `{}`, 404},
		{"GET", "/flush_cache", "", "", 404},
		{"GET", "/llm/metrics", "", "", 404},
		{"POST", "/llm/flush_cache", "content-type: application/json\r\n", `{}`, 404},
		{"GET", "/llm/llm/metrics", "", "", 404},
		{"GET", "/other/health", "", "", 404},
		{"GET", "/%6detrics", "", "", 404},
		{"GET", "//metrics", "", "", 404},
		{"GET", "/health/../metrics", "", "", 404},
		{"GET", "/health/%2e%2e/metrics", "", "", 404},
		{"GET", "/health%2f..%2fmetrics", "", "", 404},
		{"GET", "/METRICS", "", "", 404},
		{"GET", "/metrics;/health", "", "", 404},
		{"PUT", "/generate", "content-type: application/json\r\n", hostile, 404},
		{"POST", "/vertex_generate", "content-type: application/json\r\n", `{"instances":[{"text":"a"}],"parameters":` + hostile + `}`, 404},
		{"POST", "/invocations", "content-type: application/x+json\r\n", hostile, 415},
		{"POST", "/invocations", "content-type: text/json\r\n", hostile, 415},
		{"POST", "/invocations", "", hostile, 415},
		{"POST", "/invocations", "content-type: text/plain\r\n", hostile, 415},
		{"POST", "/invocations", "content-type: application/json\r\ncontent-encoding: gzip\r\n", hostile, 415},
		{"POST", "/encode", "", hostile, 415},
		{"POST", "/generate", "", hostile, 415},
		{"POST", "/generate", "content-type: application/x+json\r\n", hostile, 415},
		{"POST", "/classify", "content-type: application/x-www-form-urlencoded\r\n", hostile, 415},
	} {
		id := fmt.Sprintf("control-%d", i)
		got := raw(t, f, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: h\r\nx-request-id: %s\r\ncontent-length: %d\r\n%s\r\n%s", tt.method, tt.path, id, len(tt.body), tt.headers, tt.body))
		require.Contains(t, got, fmt.Sprintf("HTTP/1.1 %d ", tt.status), "%s %s", tt.method, tt.path)
		require.Empty(t, f.requests(id, f.engines()...), "%s %s", tt.method, tt.path)
	}
	got := f.post("/invocations", strings.Replace(hostile, `"text":"a"`, `"model":"tiny","messages":[{"role":"user","content":"x"}]`, 1), "x-request-id", "scanned")
	require.Less(t, got.status, 500, got.body)
	for _, s := range f.requests("scanned", f.engines()...) {
		require.NotContains(t, s.Body, "bootstrap_host")
	}
}

// A gateway's path prefix is removed: requests are split as without it, and engines see known paths.
func TestPrefixOfAGateway(t *testing.T) {
	t.Parallel()
	f := start(t, options{envoyFields: `, pathPrefixes: ["/llm"]`})
	for _, api := range apis {
		id := "prefix-" + api.name
		got := f.post("/llm"+api.path+"?a=b", api.body, "x-request-id", id)
		require.Equal(t, 200, got.status, got.body)
		p, d := f.hops(id)
		require.Equal(t, []string{api.path + "?a=b", api.path + "?a=b"}, []string{p.Path, d.Path})
		require.Positive(t, d.ExternalTokens)
	}
	got := f.post("/llm/tokenize", `{"model":"tiny","prompt":"a"}`, "x-request-id", "prefix-tokenize")
	require.Equal(t, 200, got.status, got.body)
	require.Equal(t, "/tokenize", f.requests("prefix-tokenize", f.decodes...)[0].Path)
	requireError(t, f.post("/llm/sleep", `{}`), "path_not_served")
	requireError(t, f.post("/llmx/v1/completions", apis[1].body), "path_not_served")
	require.Equal(t, 200, f.post("/v1/completions", apis[1].body).status, "without the prefix too")
}
