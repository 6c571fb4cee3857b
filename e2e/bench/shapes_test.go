package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// Requests have the size of their shape, and as many of their first bytes in common as their documents say. Both bodies
// of the floor's client are the same prompt.
func TestBodies(t *testing.T) {
	sh, err := findShape("json400k")
	require.NoError(t, err)
	common := func(documents int, one, other uint64) int {
		a, b := newBody(sh, documents).clone(), newBody(sh, documents).clone()
		a.number(one)
		b.number(other)
		require.Len(t, a.client, sh.size)
		require.NotEqual(t, a.client, b.client)
		require.True(t, bytes.Contains(a.prefill, a.first[0]) && bytes.Contains(a.prefill, a.last[0]))
		n := 0
		for a.client[n] == b.client[n] {
			n++
		}
		return n
	}
	require.Greater(t, common(1, 1, 2), sh.size*9/10, "one document: all but the end is the same")
	require.Greater(t, common(3, 1, 4), sh.size*9/10, "the same of three")
	require.Less(t, common(3, 1, 2), 200, "another of three")
	require.Less(t, common(0, 1, 2), 200, "all new")
}
