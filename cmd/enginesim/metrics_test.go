package main

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// scrape reads /metrics: series to value.
func scrape(t *testing.T, e *simulator) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for line := range strings.SplitSeq(e.get(t, "/metrics").String(), "\n") {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			var v float64
			_, err := fmt.Sscan(line[i+1:], &v)
			require.NoError(t, err)
			out[line[:i]] = v
		}
	}
	return out
}

// moved asserts that each series that changed in the recording changed here in the same direction.
func moved(t *testing.T, recorded, before, after map[string]float64) {
	t.Helper()
	require.NotEmpty(t, recorded)
	for series, delta := range recorded {
		if strings.Contains(series, "kv_cache_usage_perc") {
			continue // a gauge: the recording caught it falling
		}
		require.Containsf(t, after, series, "series missing")
		require.Equalf(t, delta > 0, after[series] > before[series], "%s: %v there, %v here", series, delta, after[series]-before[series])
	}
}

// TestMetricsNames: the simulator's metrics under vllm: have the recorded names, types and labels.
func TestMetricsNames(t *testing.T) {
	b, err := os.ReadFile("testdata/vllm-0.32.0/metrics.txt")
	require.NoError(t, err)
	recorded, types := map[string]bool{}, map[string]string{}
	for line := range strings.SplitSeq(strings.TrimSpace(string(b)), "\n") {
		if f := strings.Fields(line); strings.HasPrefix(line, "# TYPE ") {
			types[f[2]] = f[3]
		} else if line[0] != '#' {
			recorded[line] = true
		}
	}
	e := startEngine(t, "-connector", "none") // as the recorded one
	e.post(t, chatPath, "x", chat("hello"))
	for series := range scrape(t, e) {
		if !strings.HasPrefix(series, "vllm:") || strings.HasPrefix(series, "vllm:nixl_") || strings.Contains(series, "_bucket{") ||
			strings.HasPrefix(series, "vllm:cache_config_info") { // its labels are the configuration
			continue
		}
		require.Truef(t, recorded[series], "%s is not in the recording", series)
	}
	for line := range strings.SplitSeq(e.get(t, "/metrics").String(), "\n") {
		if f := strings.Fields(line); strings.HasPrefix(line, "# TYPE vllm:") && !strings.HasPrefix(f[2], "vllm:nixl_") {
			require.Equal(t, types[f[2]], f[3], line)
		}
	}
	for _, name := range []string{"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_hits_total", "prompt_tokens_by_source_total", "cache_config_info", "request_success_total"} {
		require.Contains(t, e.get(t, "/metrics").String(), "\nvllm:"+name+"{")
	}
}
