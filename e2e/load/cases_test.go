package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Every suite has each case once, an open loop after the closed one whose rate it takes, and the two large ones have 1,
// 4 and 8 replicas.
func TestCases(t *testing.T) {
	for _, suite := range []string{"quick", "full", "replicas"} {
		all, err := cases(suite)
		require.NoError(t, err)
		var names []string
		var replicas []int
		for _, c := range all {
			require.NotContains(t, names, c.name(), suite)
			if c.Share > 0 {
				require.Contains(t, names, c.like(), suite)
			}
			names = append(names, c.name())
			replicas = append(replicas, c.Replicas)
		}
		if suite != "quick" {
			slices.Sort(replicas)
			require.Equal(t, []int{1, 4, 8}, slices.Compact(replicas), suite)
		}
	}
	_, err := cases("some")
	require.Error(t, err)
}
