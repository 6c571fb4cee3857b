package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/picker"
)

// The next turn of a session finds the prompt and the answer before it to the token, where the answer was written, and
// the prompt alone where only that was computed.
func TestAnswersAreKept(t *testing.T) {
	var c Clock
	var computed []int
	on := counting(map[*Job]int{}, map[*Job]int{})
	on.Started = func(_ *Job, _, computes int) { computed = append(computed, computes) }
	on.Prefilled = func(*Job) {}
	d := New(&c, picker.DefaultModel(), 8192, on)
	p := New(&c, picker.DefaultModel(), 8192, on)
	first := func() *Job { return &Job{Input: 600, Output: 100, Blocks: []uint64{1, 2}, Kept: []uint64{1, 2}} }
	next := func() *Job { return &Job{Input: 1100, Output: 1, Blocks: []uint64{1, 2, 3}, Kept: []uint64{1, 2, 3}} }
	for _, e := range []*Engine{d, p} {
		leg := Both
		if e == p {
			leg = Prefill
		}
		for _, j := range []*Job{first(), next()} {
			e.Add(j, leg)
			play(&c)
		}
	}
	require.Equal(t, []int{600, 1100 - 700, 600, 1100 - 600}, computed)
	require.Equal(t, 2, p.Held([]uint64{1, 2, 3}), "two whole blocks")
}

// What the KV memory has lost comes from host memory, if there is some, and takes its time.
func TestHostMemory(t *testing.T) {
	run := func(host float64) (seconds float64, e *Engine) {
		var c Clock
		m := picker.DefaultModel()
		m.KVTokens = 4096
		e = New(&c, m, 8192, counting(map[*Job]int{}, map[*Job]int{}))
		if host > 0 {
			Host(e, host, 1024)
		}
		prompt := func(from uint64) *Job {
			return &Job{Input: 2560, Output: 1, Blocks: []uint64{from, from + 1, from + 2, from + 3, from + 4}}
		}
		for _, from := range []uint64{10, 20} {
			e.Add(prompt(from), Both)
			play(&c)
		}
		began := c.Now
		e.Add(prompt(10), Both)
		play(&c)
		require.Equal(t, 5, e.Held(prompt(10).Blocks))
		empty(t, e)
		return c.Now - began, e
	}
	_, without := run(0)
	require.Zero(t, without.Loaded)
	require.Greater(t, without.Computed, 2*2560)
	seconds, with := run(100_000)
	require.Positive(t, with.Loaded)
	require.Equal(t, 2*2560+1, with.Computed)
	require.Greater(t, seconds, float64(with.Loaded)/1024)
}

// A request whose client goes away gives its memory back, wherever it is, and those behind it go on.
func TestCancel(t *testing.T) {
	var c Clock
	m := picker.DefaultModel()
	m.KVTokens = 8192
	done := map[*Job]int{}
	on := counting(map[*Job]int{}, done)
	on.Prefilled = func(*Job) {}
	p, d := New(&c, m, 512, on), New(&c, m, 512, on)
	computes := &Job{Input: 4000, Output: 9, Blocks: []uint64{1, 2, 3, 4, 5, 6, 7, 8}}
	waits := &Job{Input: 4096, Output: 9, Blocks: []uint64{11, 12, 13, 14, 15, 16, 17, 18}}
	last := &Job{Input: 4000, Output: 9, Blocks: []uint64{21, 22, 23, 24, 25, 26, 27, 28}}
	for _, j := range []*Job{computes, waits, last} {
		d.Add(j, Both)
	}
	c.Step()
	require.True(t, d.Cancel(computes))
	require.True(t, d.Cancel(waits))
	require.False(t, d.Cancel(waits))
	play(&c)
	require.Equal(t, map[*Job]int{last: 1}, done)
	require.False(t, d.Cancel(last))
	empty(t, d)

	moves := &Job{Input: 1000, Output: 9, Blocks: []uint64{1, 2}}
	p.Add(moves, Prefill)
	play(&c)
	large := &Job{Input: 8000, Output: 200, Blocks: []uint64{31}}
	d.Add(large, Both)
	d.Add(moves, Decode)
	require.True(t, d.Cancel(moves), "it waits for memory")
	play(&c)
	empty(t, p)
	empty(t, d)
}
