package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A run is compared with the last one, replaces what it measured again, and leaves the rest.
func TestPublish(t *testing.T) {
	file := filepath.Join(t.TempDir(), "figures", "floor.json")
	one, other := key{Shape: "json1k", Clients: 1, Stack: "tandem"}, key{Shape: "json1k", Clients: 16, Stack: "tandem"}
	fleet := key{Shape: "json1k", Replicas: 4}
	var out bytes.Buffer
	require.NoError(t, publish(&out, file, origin{Date: "2026-11-01"}, []figures{
		{key: one, CPU: 4.5}, {key: other, CPU: 4}, {key: fleet, Fleet: &fleetCost{One: 2}},
	}))
	out.Reset()
	require.NoError(t, publish(&out, file, origin{Date: "2026-11-02"}, []figures{
		{key: other, CPU: 5}, {key: fleet, Fleet: &fleetCost{One: 1.5}},
	}))
	require.Contains(t, out.String(), "| json1k | 16 | tandem | 5.00 (4.00) | 0.00 (-) |")
	require.Contains(t, out.String(), "| fleet | | 4 replicas | 1.50 (2.00) |")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var all []figures
	require.NoError(t, json.Unmarshal(text, &all))
	require.Equal(t, []figures{
		{key: one, origin: origin{Date: "2026-11-01"}, CPU: 4.5},
		{key: other, origin: origin{Date: "2026-11-02"}, CPU: 5},
		{key: fleet, origin: origin{Date: "2026-11-02"}, Fleet: &fleetCost{One: 1.5}},
	}, all)
	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))
	require.Error(t, publish(&out, file, origin{}, nil))
}

// Ratios are to the floor, those of a second Tandem to the first, too.
func TestFiguresOf(t *testing.T) {
	of := func(envoy, router int) []round {
		ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
		return []round{{envoy: ms(envoy), tandem: ms(router), took: []time.Duration{ms(envoy + router)}}}
	}
	k := key{Shape: "json1k", Clients: 1, Stack: "redis"}
	f := figuresOf(k, shape{}, of(4, 4), of(2, 0), of(2, 2))
	require.Equal(t, figures{
		key: k, CPU: 4, P50: 4, P99: 4, Tandem: 2, More: 4, Envoy: 4, Router: 4, P50ms: 8, P99ms: 8, P999ms: 8,
	}, f)
	k.Stack = floorName
	require.Zero(t, figuresOf(k, shape{}, of(2, 0), of(2, 0), nil).CPU)
}
