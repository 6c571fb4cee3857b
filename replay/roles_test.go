package replay

import (
	"bytes"
	"io"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/picker"
	"tandem/picker/roles"
	"tandem/replay/traces"
)

// When prompts come back after a time of reasoning, words change to prefill within 20 s. Every request is served, and all end sooner than with half of the engines for either leg.
func TestWordsFollowTraffic(t *testing.T) {
	c := DefaultConfig()
	c.Both, c.Roles = 4, true
	trace, err := Prepare("seq:reasoning:agent", 1000, 1, .8, c)
	require.NoError(t, err)
	type change struct {
		at   float64
		word kvstate.Role
	}
	var changes []change
	c.Changed = func(at float64, w roles.Change) { changes = append(changes, change{at, w.Word}) }
	r, err := Run(t.Context(), trace, "tandem", c)
	require.NoError(t, err)
	require.Zero(t, r.Stuck)
	require.True(t, slices.ContainsFunc(changes, func(c change) bool { return c.at > 0 && c.at < 60 && c.word == kvstate.RoleDecode }))
	require.True(t, slices.ContainsFunc(changes, func(c change) bool {
		return c.at > phaseSeconds && c.at < phaseSeconds+20 && c.word == kvstate.RolePrefill
	}), "%v", changes)
	again, err := Run(t.Context(), trace, "tandem", c)
	require.NoError(t, err)
	require.Equal(t, r, again, "the same run, the same numbers")
	c.Both, c.Prefill, c.Decode = 0, 2, 2
	fixed, err := Run(t.Context(), trace, "tandem", c)
	require.NoError(t, err)
	require.Greater(t, r.Goodput, fixed.Goodput-.03)
	require.Less(t, r.EndToEnd.Mean, .95*fixed.EndToEnd.Mean)
}

// Several replicas have the same words.
func TestReplicasHaveTheSameWords(t *testing.T) {
	c := DefaultConfig()
	c.Both, c.Roles = 4, true
	trace, err := Prepare("mixed", 1500, 1, .7, c)
	require.NoError(t, err)
	one, err := Run(t.Context(), trace, "tandem", c)
	require.NoError(t, err)
	c.Replicas, c.Sharing = 4, .005
	four, err := Run(t.Context(), trace, "tandem", c)
	require.NoError(t, err)
	require.InEpsilon(t, one.TTFT.Mean, four.TTFT.Mean, .15)
}

// Engines of both roles whose memory is short do not wait for each other for ever, whatever Tandem uses them for, and
// words do not cost what they should bring.
func TestShortMemory(t *testing.T) {
	for _, test := range []struct {
		trace   string
		engines int
		kv      float64
		goodput [2]float64 // without words, with words: at least
	}{
		{"mixed", 2, 100_000, [2]float64{.7, .85}},
		{"agent", 3, 200_000, [2]float64{.85, .93}},
	} {
		for i, words := range []bool{false, true} {
			c := DefaultConfig()
			c.Both, c.Engine.KVTokens, c.Roles, c.Seed = test.engines, test.kv, words, 21
			trace, err := Prepare(test.trace, 600, 1, .8, c)
			require.NoError(t, err)
			r, err := Run(t.Context(), trace, "tandem", c)
			require.NoError(t, err)
			require.Zero(t, r.Stuck, test)
			require.Greater(t, r.Goodput, test.goodput[i], "%v, words: %v", test, words)
		}
	}
}

// Traces that shift have the load that was asked for in each phase, and no block of one part is in another.
func TestShiftingTraces(t *testing.T) {
	c := DefaultConfig()
	c.Both = 4
	for _, name := range []string{"seq:agent:mixed", "wave:rag:agent", "day:mixed"} {
		require.True(t, shifts(name))
		tr, err := Prepare(name, 500, 1, .5, c)
		require.NoError(t, err)
		require.True(t, slices.IsSortedFunc(tr.Requests, traces.ByArrival))
		require.Greater(t, len(tr.Requests), 500, name)
	}
	seq, err := Prepare("seq:agent:agent", 500, 1, .5, c)
	require.NoError(t, err)
	require.InDelta(t, 2*phaseSeconds, seq.Duration(), 10)
	private := map[uint64]bool{}
	for _, q := range seq.Requests {
		for _, b := range q.Blocks {
			if q.Arrival < phaseSeconds {
				private[b] = b >= 1<<32
			} else {
				require.False(t, private[b], "block %x of the first phase", b)
			}
		}
	}
	for _, name := range []string{"wave:agent", "day:agent:mixed", "seq:nonsense"} {
		_, err := Prepare(name, 500, 1, .5, c)
		require.Error(t, err, name)
	}
	_, err = Prepare("seq:agent:mixed", 500, 1, 0, c)
	require.ErrorContains(t, err, "needs a load")
}

// Engines that serve both legs can fill each other's memory for ever if nothing keeps them from it. Such a run ends, and
// its requests count as missed.
func TestStuckFleetsEnd(t *testing.T) {
	c := DefaultConfig()
	c.Both, c.Split, c.Late = 2, picker.SplitAlways, false
	c.Engine.KVTokens = 20_000
	var requests []traces.Request
	for i := range 40 {
		requests = append(requests, traces.Request{Arrival: float64(i) / 100, Input: 6000, Output: 50, Blocks: blocksFrom(uint64(100*i), 12)})
	}
	r, err := Run(t.Context(), &traces.Trace{Name: "by hand", Requests: requests}, "least-requests", c)
	require.NoError(t, err)
	require.Positive(t, r.Stuck)
	require.LessOrEqual(t, r.Goodput, 1-float64(r.Stuck)/40)
}

func blocksFrom(first uint64, n int) (out []uint64) {
	for i := range n {
		out = append(out, first+uint64(i))
	}
	return out
}

// Routers that never split serve a fleet of equal engines.
func TestAggregatedPeers(t *testing.T) {
	c := DefaultConfig()
	c.Both = 4
	tr, err := Prepare("agent", 400, 1, .5, c)
	require.NoError(t, err)
	for _, name := range aggregated() {
		r, err := Run(t.Context(), tr, name, c)
		require.NoError(t, err)
		require.InDelta(t, 1, r.Alone, 0, name)
		require.Zero(t, r.Stuck)
		require.Greater(t, r.HitShare, .3, name)
	}
}

// Engines count the KV that they fetch, and Tandem learns from it: behind a slow link decode computes more prompts.
func TestSlowLinksAreLearned(t *testing.T) {
	m := picker.DefaultModel()
	alone := func(tokenBytes, bandwidth float64) float64 {
		tr, c := small(t, "mixed", .5)
		c.Split, c.Engine.TokenBytes, c.Engine.Bandwidth = picker.SplitAuto, tokenBytes, bandwidth
		r, err := Run(t.Context(), tr, "tandem", c)
		require.NoError(t, err)
		return r.Alone
	}
	require.Greater(t, alone(320e3, 2e9), alone(m.TokenBytes, m.Bandwidth))
}

func TestRolesSuite(t *testing.T) {
	var out bytes.Buffer
	p := rolePlan{engines: []int{2}, steady: []string{"agent"}, loads: []float64{.5}, seeds: []uint64{1}, requests: 200}
	require.NoError(t, rolesSuite(t.Context(), p, &out, io.Discard))
	require.Contains(t, out.String(), "| agent, 2, 50 % | 1+1: ")
	require.Contains(t, out.String(), "Over the steady traces:\n\n- 50 %: goodput of `roles: auto` less the best ratio's ")
	require.NotContains(t, out.String(), "NaN")
}
