package main

import (
	"os"
	"path/filepath"
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

// A run is compared with the previous one; a change within the noise does not count, and another machine's run is
// ignored.
func TestChanges(t *testing.T) {
	dir := t.TempDir()
	last, err := readPrevious(dir)
	require.NoError(t, err)
	require.Nil(t, last)
	_, err = aRun(500, 1, 0).write(dir)
	require.NoError(t, err)
	now := aRun(600, .8, 1)
	require.Empty(t, now.changes(), "there is no last run")
	now.previous, err = readPrevious(dir)
	require.NoError(t, err)
	changes := now.changes()
	require.Len(t, changes, 2)
	c := changes[0]
	require.InDelta(t, 20, c.PerSecond, 1e-9)
	require.InDelta(t, -20, c.CPU, 1e-9)
	require.Equal(t, []bool{true, true}, []bool{c.Significant(), !c.Worse()})
	require.Equal(t, 1, c.ErrorsNow)
	now.Results[0].EnvoyCPU = .55
	require.False(t, now.changes()[0].Significant(), "5 % less CPU")
	now.Machine = "another"
	require.Empty(t, now.changes())

	now.Machine = "m"
	now.Configs = []configText{{"4 endpoints, 1 replica", "pools: [<x>]"}}
	file, err := now.write(dir)
	require.NoError(t, err)
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Contains(t, string(page), "111 requests in 3 cases; 1 failed.")
	require.Contains(t, string(page), "pools: [&lt;x&gt;]")
	require.Contains(t, string(page), "Beside the last run")

	require.NoError(t, os.WriteFile(filepath.Join(dir, "report.json"), []byte("{"), 0o600))
	_, err = readPrevious(dir)
	require.ErrorContains(t, err, "report.json")
}
