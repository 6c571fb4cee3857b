package main

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func aRun(rate, cpu float64, errors int) *report {
	plain, stream := testCase{Size: kb, Clients: 16, Endpoints: 4, Replicas: 1}, testCase{Size: kb, Stream: true, Clients: 16, Endpoints: 4, Replicas: 1}
	return &report{Machine: "m", Results: []result{
		{Case: plain, Name: plain.name(), Requests: 100, Errors: errors, PerSecond: rate, PerCore: 2 * rate, Latency: percentiles{P99: 12}, EnvoyCPU: cpu / 2, TandemCPU: cpu / 2},
		{Case: stream, Name: stream.name(), Requests: 10, FirstToken: percentiles{P50: 7, P99: 9}, BetweenTokens: percentiles{P50: 5.1}},
		{Name: "broken", Error: "no tool"},
	}}
}

func TestSummary(t *testing.T) {
	require.Equal(t, []string{
		"112 requests in 3 cases; 2 failed.",
		"1 case could not be run: the table says why.",
		"The highest rate was 500 requests a second over two hops, with a p99 of 12.00 ms (1 KB JSON, 16 clients, 4 endpoints, 1 replica). Engines and the load tool share the machine.",
		"At best, one core of Envoy and Tandem together carries 1000 requests a second (1 KB JSON, 16 clients, 4 endpoints, 1 replica).",
		"Streams: first token after 7.00 ms (p50) and 9.00 ms (p99), then one each 5.10 ms (p50); the engine makes one each 5 ms (1 KB SSE, 16 clients, 4 endpoints, 1 replica).",
	}, aRun(500, 1, 2).summary())
}

func pageOf(t *testing.T, r *report, dir string) string {
	t.Helper()
	file, err := r.write(dir)
	require.NoError(t, err)
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	return string(page)
}

// The report has what is needed to run a case again: every file and every command line, once for all cases that share
// them.
func TestExactConfiguration(t *testing.T) {
	s := &stand{
		of:        testCase{Endpoints: 2, Replicas: 2, Stream: true},
		configs:   []string{"extProc: {listen: a}\npools: [<x>]\n", "extProc: {listen: b}\npools: [<x>]\n"},
		bootstrap: "static_resources: {listeners: [8080]}\n",
	}
	s.Dir = t.TempDir()
	defer s.stop()
	for _, args := range [][]string{{"--role", "prefill"}, {"--concurrency", "2", "--save", ""}} {
		_, err := s.Start(args[0][2:], nil, "true", args...)
		require.NoError(t, err)
	}
	r := aRun(500, 1, 0)
	r.keepConfig(s)
	r.keepConfig(s)
	s.of.Stream = false
	r.keepConfig(s)
	require.Len(t, r.Configs, 2, "engines of streams take their time")
	require.Equal(t, configText{
		Of: "2 endpoints, 2 replicas, SSE", YAML: s.configs[0], Others: []string{"extProc: {listen: b}\n"},
		Envoy: s.bootstrap, Commands: []string{"true --role prefill", "true --concurrency 2 --save ''"},
	}, r.Configs[0])
	page := pageOf(t, r, t.TempDir())
	for _, want := range []string{
		"<details><summary>2 endpoints, 2 replicas, SSE</summary>", "pools: [&lt;x&gt;]", "Tandem, replica 2: the lines that differ</h3><pre>extProc: {listen: b}",
		"true --role prefill\ntrue --concurrency 2 --save &#39;&#39;", "static_resources: {listeners: [8080]}",
	} {
		require.Contains(t, page, want)
	}
}
