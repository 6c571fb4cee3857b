package status

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The operator is told that memory is what lacks, and how much would end it.
func TestMemoryThatLacksIsSaid(t *testing.T) {
	said := func(m Memory) (texts []string) {
		s := Status{Ready: true, Now: time.Now(), Sharing: Sharing{Replicas: 1}, Pools: []Pool{{Name: "agents", Memory: m}}}
		for _, n := range attention(&s, nil) {
			texts = append(texts, n.Text)
		}
		return texts
	}
	m := Memory{Conversations: 90, Expected: 7e6, Keeps: 8e6, Lacks: 3.04e6, Had: 5e6, Evicted: 1.4e6, Elsewhere: 1e5}
	require.Equal(t, []string{"agents: engines compute 28 % of what conversations had again, since KV memory is short: " +
		"host memory for 3.0M tokens each would hold them all."}, said(m))
	m.Waiting = 1
	require.Contains(t, said(m)[0], "Meanwhile 1 cold prompt waits for room.")

	few, little, enough := m, m, m
	few.Had, few.Evicted = 1e5, 5e4
	little.Evicted = 1e5
	enough.Lacks = 0
	for _, m := range []Memory{{}, few, little, enough} {
		require.Empty(t, said(m))
	}
}

func TestMemoryOfReplicas(t *testing.T) {
	m := Memory{Conversations: 90, Expected: 7e6, Keeps: 8e6, Engines: 8, Had: 5e6, Evicted: 1e6, Waiting: 2}
	m.add(&Memory{Conversations: 80, Expected: 6e6, Keeps: 8e6, Engines: 8, Had: 3e6, Evicted: 1e6, Elsewhere: 8e4, Waiting: 1})
	require.Equal(t, Memory{Conversations: 90, Expected: 7e6, Keeps: 8e6, Engines: 8, Had: 8e6, Evicted: 2e6,
		Elsewhere: 8e4, Waiting: 3}, m)
	var out bytes.Buffer
	printMemory(&out, &m)
	require.Equal(t, "  conversations: 90, 7.0M tokens expected back, memory for 8.0M; computed again 25.0 % (evicted), "+
		"1.0 % (elsewhere); 3 cold prompts wait for room\n", out.String())
	out.Reset()
	printMemory(&out, &Memory{Conversations: 4})
	require.Empty(t, out.String(), "none has come back")
}

func TestRounded(t *testing.T) {
	for want, tokens := range map[string]float64{
		"0": 0, "994": 994, "1.0k": 996, "9.9k": 9_900, "10k": 9_960, "3.0M": 3.04e6, "1.0G": 999e6,
	} {
		require.Equal(t, want, rounded(tokens))
	}
}
