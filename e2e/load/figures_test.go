package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A run replaces what it measured again, and leaves the rest.
func TestPublish(t *testing.T) {
	file := filepath.Join(t.TempDir(), "figures", "load.json")
	run := func(day int, cases ...testCase) []figures {
		r := &report{Began: time.Date(2026, 11, day, 0, 0, 0, 0, time.UTC), Machine: "m"}
		for _, c := range cases {
			r.Results = append(r.Results, result{
				Case: c, PerSecond: float64(day), Latency: percentiles{P50: 1, P99: 2}, FirstToken: percentiles{P50: 3, P99: 4},
			})
		}
		require.NoError(t, r.publish(file))
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var out []figures
		require.NoError(t, json.Unmarshal(text, &out))
		return out
	}
	one := testCase{Size: kb, Clients: 16, Endpoints: 4, Replicas: 1}
	eight := testCase{Size: kb, Stream: true, Clients: 16, Endpoints: 4, Replicas: 8, Redis: true}
	open, many := one, one
	open.Share, many.Endpoints = 0.5, 64
	require.Equal(t, []figures{
		{figureKey{kb, false, 16, 1, false}, "2026-11-01", "m", 1, 1, 2},
		{figureKey{kb, true, 16, 8, true}, "2026-11-01", "m", 1, 3, 4},
	}, run(1, one, eight, open, many))
	now := run(2, eight)
	require.Equal(t, "2026-11-01", now[0].Date)
	require.Equal(t, "2026-11-02", now[1].Date)
	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))
	require.Error(t, new(report).publish(file))
}
