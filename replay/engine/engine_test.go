package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/picker"
)

// play runs the engines of a clock until nothing happens any more.
func play(c *Clock) {
	for c.Step() {
	}
}

// counting returns events that count first and last tokens.
func counting(first, done map[*Job]int) Events {
	return Events{First: func(j *Job) { first[j]++ }, Done: func(j *Job) { done[j]++ }}
}

// empty requires that an engine has given all its memory back.
func empty(t *testing.T, e *Engine) {
	t.Helper()
	require.Zero(t, e.kv)
	require.Zero(t, e.requests)
	require.Zero(t, e.loose)
	require.Zero(t, e.held)
	require.Empty(t, e.cache.pins)
	require.Empty(t, e.pending)
}

// An engine whose answers outgrow its memory preempts the youngest: all of them end, written tokens stay written, and
// its memory is empty at the end.
func TestPreemption(t *testing.T) {
	run := func(kv float64) (end float64, e *Engine) {
		var c Clock
		m := picker.DefaultModel()
		m.KVTokens = kv
		first, done := map[*Job]int{}, map[*Job]int{}
		e = New(&c, m, 2048, counting(first, done))
		for i := range 4 {
			e.Add(&Job{Input: 1000, Output: 2000, Blocks: []uint64{1, uint64(10 + i)}}, Decode)
		}
		play(&c)
		require.Len(t, first, 4)
		require.Len(t, done, 4)
		for j := range done {
			require.Equal(t, 1, first[j], "one first token")
			require.Equal(t, 1, done[j])
		}
		empty(t, e)
		require.EqualValues(t, 4, e.Written.Answers)
		require.EqualValues(t, 8000, e.Written.Tokens)
		return c.Now, e
	}
	soon, roomy := run(100_000)
	later, tight := run(8000)
	require.Zero(t, roomy.Preempted)
	require.Positive(t, tight.Preempted)
	require.Greater(t, later, soon)
	require.Zero(t, roomy.Computed)
	require.Positive(t, tight.Computed, "what was thrown away is computed again")
}

// A prompt beside answers gets the part of a step that they leave, and makes their steps longer.
func TestPromptsBesideAnswersComeInChunks(t *testing.T) {
	ends := func(tokens int) float64 {
		var c Clock
		e := New(&c, picker.DefaultModel(), tokens, counting(map[*Job]int{}, map[*Job]int{}))
		e.Add(&Job{Input: 10, Output: 1000}, Decode)
		c.Step() // its KV is here
		e.Add(&Job{Input: 8000, Output: 1}, Both)
		for e.Computed == 0 || len(e.prompts) > 0 {
			require.True(t, c.Step())
		}
		require.Positive(t, e.Lost)
		require.Zero(t, e.Alone)
		return c.Now
	}
	m := picker.DefaultModel()
	require.Greater(t, ends(1024), ends(8192)+5*m.DecodeStep)
}

// Engines count the KV that they fetch.
func TestTransfersAreCounted(t *testing.T) {
	var c Clock
	m := picker.DefaultModel()
	e := New(&c, m, 2048, counting(map[*Job]int{}, map[*Job]int{}))
	for i := range 2 {
		e.Add(&Job{Input: 1000, Output: 2, Blocks: []uint64{uint64(2 * i), uint64(2*i + 1)}}, Decode)
	}
	play(&c)
	require.Equal(t, kvstate.TransferCounters{
		Transfers: 2, Tokens: 2000, Bytes: int64(2000 * m.TokenBytes),
		Time: 2 * kvstate.Seconds(m.TransferLag+1000*m.TokenBytes/m.Bandwidth),
	}, e.Moved)
}

// Where an engine polls, an answer joins the step after the one in which its KV is noticed: its first token comes a step
// later, unless nothing else runs.
func TestPoll(t *testing.T) {
	m := picker.DefaultModel()
	firstAfter := func(polls, busy bool) float64 {
		var c Clock
		first := 0.0
		fetched := &Job{Input: 100, Output: 2}
		e := New(&c, m, 2048, Events{First: func(j *Job) {
			if j == fetched {
				first = c.Now
			}
		}, Done: func(*Job) {}})
		if polls {
			Poll(e)
		}
		if busy {
			e.Add(&Job{Input: 10, Output: 100}, Both)
		}
		c.After(.1, func() { e.Add(fetched, Decode) })
		play(&c)
		empty(t, e)
		return first - .1
	}
	step := m.DecodeStep + m.DecodeAnswer
	require.InDelta(t, step, firstAfter(true, true)-firstAfter(false, true), .1*step)
	require.InDelta(t, firstAfter(false, false), firstAfter(true, false), 1e-9)
}

// The KV of a prompt that was computed for another engine is held until that one has fetched it. It is then still
// cached, and does not count as an answer.
func TestKVIsHeldUntilFetched(t *testing.T) {
	var c Clock
	m := picker.DefaultModel()
	m.KVTokens = 4096
	var computed []*Job
	p := New(&c, m, 8192, Events{Prefilled: func(j *Job) { computed = append(computed, j) }})
	d := New(&c, m, 8192, counting(map[*Job]int{}, map[*Job]int{}))
	first := &Job{Input: 2048, Output: 2, Blocks: []uint64{1, 2, 3, 4}}
	second := &Job{Input: 2048, Output: 2, Blocks: []uint64{5, 6, 7, 8}}
	p.Add(first, Prefill)
	p.Add(second, Prefill)
	play(&c)
	require.Equal(t, []*Job{first}, computed, "the other has no memory")
	require.Equal(t, 2048, p.Unfetched())
	require.Equal(t, 1, p.Waiting())
	d.Add(first, Decode)
	play(&c)
	require.Equal(t, []*Job{first, second}, computed)
	require.Equal(t, 2, p.Held(second.Blocks[:2]))
	require.Zero(t, p.Written)
	d.Add(second, Decode)
	play(&c)
	empty(t, p)
	empty(t, d)
}

// Two engines that both hold what the other shall fetch, and have no memory for what they shall fetch, wait for ever.
func TestCircularWait(t *testing.T) {
	var c Clock
	m := picker.DefaultModel()
	m.KVTokens = 4096
	var engines [2]*Engine
	done := 0
	for i := range engines {
		engines[i] = New(&c, m, 8192, Events{
			Prefilled: func(j *Job) { engines[1-i].Add(j, Decode) },
			First:     func(*Job) {}, Done: func(*Job) { done++ },
		})
	}
	for i := range uint64(4) {
		engines[i%2].Add(&Job{Input: 3000, Output: 2, Blocks: []uint64{10 * i, 10*i + 1, 10*i + 2, 10*i + 3, 10*i + 4, 10*i + 5}}, Prefill)
	}
	play(&c)
	require.Zero(t, done)
	require.Positive(t, engines[0].Unfetched())
	require.Positive(t, engines[1].Unfetched())
}

// Blocks that running requests share are in memory once.
func TestSharedBlocksCountOnce(t *testing.T) {
	var c Clock
	e := New(&c, picker.DefaultModel(), 8192, counting(map[*Job]int{}, map[*Job]int{}))
	for i := range uint64(10) {
		e.Add(&Job{Input: 1024, Output: 500, Blocks: []uint64{1, 100 + i}}, Decode)
	}
	for e.requests < 10 || len(e.batch) < 10 {
		require.True(t, c.Step())
	}
	require.InDelta(t, 11*BlockTokens, e.memory(), 100)
	require.InDelta(t, 10*1024, e.kv, 100, "each reads all of its KV")
}

// What prompts share of a block is cached when the first of them has been computed, if the blocks before are.
func TestSharedPartOfABlock(t *testing.T) {
	var c Clock
	cached := map[uint64]int{}
	e := New(&c, picker.DefaultModel(), 8192, Events{First: func(*Job) {}, Done: func(*Job) {},
		Started: func(j *Job, n, _ int) { cached[j.ID] = n }})
	part := Part{Behind: 1, Tokens: 100, ID: 7}
	for i := range uint64(3) {
		e.Add(&Job{ID: i, Input: 1500, Output: 2, Blocks: []uint64{1, 10 + i, 20 + i}, Part: part}, Both)
		play(&c)
	}
	e.Add(&Job{ID: 3, Input: 1500, Output: 2, Blocks: []uint64{2, 13, 23}, Part: part}, Both)
	play(&c)
	require.Equal(t, map[uint64]int{0: 0, 1: 612, 2: 612, 3: 0}, cached)
}
