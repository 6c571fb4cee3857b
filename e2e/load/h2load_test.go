package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestReadLog(t *testing.T) {
	var r result
	require.NoError(t, r.readLog("1000000\t200\t1000\n1500000\t200\t3000\n1600000\t503\t50\n1700000\t200\t-1\n2000000\t200\t2000\n"))
	require.Equal(t, 3, r.Requests)
	require.Equal(t, 2, r.Errors)
	require.Equal(t, percentiles{2, 3, 3, 3}, r.Latency)
	require.InDelta(t, 3/1.002, r.PerSecond, 0.001)
	require.Error(t, new(result).readLog(""))
	require.Error(t, new(result).readLog("x\t200\t1\n"))
}

func TestReadExport(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "profile_export_aiperf.json"), []byte(`{"request_count":{"unit":"requests","avg":40.0},
		"request_throughput":{"avg":8.5},"time_to_first_token":{"p50":6.5,"p90":7,"p99":9,"max":10},"inter_token_latency":{"p50":5.1},
		"start_time":"2026-11-21T17:00:00.250000","end_time":"2026-11-21T17:00:05"}`), 0o600))
	var r result
	require.NoError(t, r.readExport(dir))
	require.Equal(t, 40, r.Requests)
	require.Zero(t, r.Errors)
	require.Equal(t, percentiles{6.5, 7, 9, 10}, r.FirstToken)
	require.Equal(t, 4750*time.Millisecond, r.to.Sub(r.from))
	require.Error(t, r.readExport(t.TempDir()))
}

func TestUsageBetween(t *testing.T) {
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	var samples []timedUsage
	for i := range 20 {
		samples = append(samples, timedUsage{at(i * 100), usage{envoy: time.Duration(i)}})
	}
	before, after := between(samples, at(350), at(1010))
	require.EqualValues(t, 3, before.envoy)
	require.EqualValues(t, 12, after.envoy, "100 ms later")
	before, after = between(samples, at(-5), at(99999))
	require.EqualValues(t, 0, before.envoy)
	require.EqualValues(t, 19, after.envoy)
}

// Bodies have their case's size, and are JSON.
func TestRequestBody(t *testing.T) {
	for _, n := range []int{kb, 220 * kb, mb} {
		body := requestBody(n, 16)
		require.Len(t, body, n)
		require.True(t, json.Valid(body))
	}
}

// The report has a row for every case, and names what could not be run.
func TestReport(t *testing.T) {
	dir := t.TempDir()
	r := &report{Missing: []string{"aiperf <is> not installed"}, Results: []result{
		{Name: "1 KB", Requests: 10, PerSecond: 5, Latency: percentiles{1, 2, 3, 4}, EnvoyCPU: 0.5, TandemCPU: 0.25}, {Name: "broken", Error: "no answer"}}}
	file, err := r.write(dir)
	require.NoError(t, err)
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, want := range []string{"aiperf &lt;is&gt; not installed", "<td>1 KB", "no answer", "<td>0.500</td><td>0.250</td>"} {
		require.Contains(t, string(text), want)
	}
	require.FileExists(t, filepath.Join(dir, "report.json"))
}
