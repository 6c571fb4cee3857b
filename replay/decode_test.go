package replay

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/picker"
)

// An engine whose answers outgrow its memory preempts the youngest: all of them end, written tokens stay written, and
// its memory is empty at the end.
func TestPreemption(t *testing.T) {
	play := func(kv float64) (preempted int, end float64, d *decoder) {
		var c clock
		m := picker.DefaultModel()
		m.KVTokens = kv
		first, done := map[*job]int{}, map[*job]int{}
		d = newDecoder(&c, m, 2048, func(j *job) { first[j]++ }, func(j *job) { done[j]++ })
		for i := range 4 {
			d.add(&job{Request: &Request{Input: 1000, Output: 2000, Blocks: []uint64{1, uint64(10 + i)}}})
		}
		for c.step() {
		}
		require.Len(t, first, 4)
		require.Len(t, done, 4)
		for j := range done {
			require.Equal(t, 1, first[j], "one first token")
			require.Equal(t, 1, done[j])
		}
		require.Zero(t, d.kv)
		require.Zero(t, d.held)
		require.EqualValues(t, 4, d.written.Answers)
		require.EqualValues(t, 8000, d.written.Tokens)
		return d.preempted, c.now, d
	}
	none, soon, roomy := play(100_000)
	some, later, tight := play(8000)
	require.Zero(t, none)
	require.Positive(t, some)
	require.Greater(t, later, soon)
	require.Zero(t, roomy.computed)
	require.Positive(t, tight.computed, "what was thrown away is computed again")
}

// A prompt that decode computes gets the part of a step that the answers leave.
func TestLocalPrefillComesInChunks(t *testing.T) {
	ends := func(local int) float64 {
		var c clock
		d := newDecoder(&c, picker.DefaultModel(), local, func(*job) {}, func(*job) {})
		d.add(&job{Request: &Request{Input: 8000, Output: 1}, alone: true})
		d.add(&job{Request: &Request{Input: 10, Output: 1000}}) // beside an answer each chunk shares a step
		for d.computed == 0 || len(d.prompts) > 0 {
			require.True(t, c.step())
		}
		return c.now
	}
	m := picker.DefaultModel()
	require.Greater(t, ends(1024), ends(8192)+5*m.DecodeStep)
}

// Engines count the KV that they fetch, and Tandem learns from it: behind a slow link decode computes more prompts.
func TestSlowLinksAreLearned(t *testing.T) {
	var c clock
	m := picker.DefaultModel()
	d := newDecoder(&c, m, 2048, func(*job) {}, func(*job) {})
	for i := range 2 {
		d.add(&job{Request: &Request{Input: 1000, Output: 2, Blocks: []uint64{uint64(2 * i), uint64(2*i + 1)}}})
	}
	for c.step() {
	}
	require.Equal(t, kvstate.TransferCounters{
		Transfers: 2, Tokens: 2000, Bytes: int64(2000 * m.TokenBytes),
		Time: 2 * kvstate.Seconds(m.TransferLag+1000*m.TokenBytes/m.Bandwidth),
	}, d.moved)
	alone := func(tokenBytes, bandwidth float64) float64 {
		tr, c := small(t, "mixed", .5)
		c.Split, c.Engine.TokenBytes, c.Engine.Bandwidth = picker.SplitAuto, tokenBytes, bandwidth
		r, err := Run(t.Context(), tr, "tandem", c)
		require.NoError(t, err)
		return r.Alone
	}
	require.Greater(t, alone(320e3, 6e9), alone(m.TokenBytes, m.Bandwidth))
}
