package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/picker"
	"tandem/replay/traces"
)

// small returns a short generated trace at a load on a small fleet.
func small(t *testing.T, trace string, load float64) (*traces.Trace, Config) {
	t.Helper()
	c := DefaultConfig()
	c.Prefill, c.Decode = 2, 2
	tr, err := Prepare(trace, 300, 1, load, c)
	require.NoError(t, err)
	return tr, c
}

// one plays the given requests.
func one(t *testing.T, policy string, change func(*Config), requests ...traces.Request) *Result {
	t.Helper()
	c := DefaultConfig()
	c.Prefill, c.Decode, c.Split = 1, 1, picker.SplitAlways
	if change != nil {
		change(&c)
	}
	r, err := Run(t.Context(), &traces.Trace{Name: "by hand", Requests: requests}, policy, c)
	require.NoError(t, err)
	return r
}

// A single request takes the model's time: its prefill in steps, the transfer, and a decode step for each token.
func TestOneRequest(t *testing.T) {
	m := picker.DefaultModel()
	r := one(t, "random", nil, traces.Request{Input: 10000, Output: 3, Blocks: make([]uint64, 20)})
	prefill := 2*m.PrefillStep + 10000*m.PrefillToken + m.PrefillContext*10000*5000
	transfer := m.TransferLag + 10000*m.TokenBytes/m.Bandwidth
	step := m.DecodeStep + m.DecodeAnswer + 10000*m.DecodeToken
	require.InDelta(t, prefill+transfer+step, r.TTFT.Mean, 1e-9)
	require.InDelta(t, step, r.TPOT.Mean, 1e-6)
	require.Zero(t, r.HitShare)
}

// Alone there is no transfer, and the first token comes with the prefill.
func TestOneRequestAlone(t *testing.T) {
	m := picker.DefaultModel()
	r := one(t, "tandem", func(c *Config) { c.Split = picker.SplitNever }, traces.Request{Input: 1000, Output: 2, Blocks: make([]uint64, 2)})
	require.InDelta(t, m.PrefillStep+1000*m.PrefillToken+m.PrefillContext*1000*500, r.TTFT.Mean, 1e-9)
	require.InDelta(t, 1, r.Alone, 0)
}

// Cached tokens are not computed again, except for the last token.
func TestPrefixIsComputedOnce(t *testing.T) {
	q := traces.Request{Input: 2048, Output: 1, Blocks: []uint64{1, 2, 3, 4}}
	later := q
	later.Arrival = 100
	longer := traces.Request{Arrival: 200, Input: 2148, Output: 1, Blocks: []uint64{1, 2, 3, 4, 5}}
	r := one(t, "dynamo", nil, q, later, longer)
	require.InDelta(t, (2047.0+2048)/(2048+2048+2148), r.HitShare, 1e-9)
}

// Every token of every prompt is either found or computed, every request ends, and the same seed gives the same
// numbers.
func TestEveryPolicyServesAll(t *testing.T) {
	for _, trace := range []string{"conversation", "agent", "mixed"} {
		tr, c := small(t, trace, .8)
		for _, name := range Policies() {
			r, err := Run(t.Context(), tr, name, c)
			require.NoError(t, err)
			require.Equal(t, 300, r.Requests)
			require.LessOrEqual(t, r.HitShare, tr.Bound()+1e-9, "%s: more hits than there can be", name)
			require.Greater(t, r.TTFT.Mean, .01)
			require.GreaterOrEqual(t, r.EndToEnd.P50, r.TTFT.P50)
			require.GreaterOrEqual(t, r.TPOT.P50, c.Engine.DecodeStep)
			again, err := Run(t.Context(), tr, name, c)
			require.NoError(t, err)
			require.Equal(t, r, again, "%s: the same run, the same numbers", name)
		}
	}
}

// Replicas that share within milliseconds decide as one would, except for ties, also about the next of the waiting
// requests; without sharing they do worse.
func TestReplicas(t *testing.T) {
	c := DefaultConfig()
	c.Prefill, c.Decode, c.Late, c.Split = 8, 8, false, picker.SplitAlways
	tr, err := Prepare("mooncake", 0, 1, .8, c)
	require.NoError(t, err)
	tr.Requests = tr.Requests[:4000]
	play := func(replicas int, sharing float64) float64 {
		c.Replicas, c.Sharing = replicas, sharing
		r, err := Run(t.Context(), tr, "tandem", c)
		require.NoError(t, err)
		return r.TTFT.Mean
	}
	for _, late := range []bool{false, true} {
		c.Late = late
		alone := play(1, 0)
		require.InEpsilon(t, alone, play(4, .005), .05, "late: %v", late)
		require.Greater(t, play(4, -1), 1.2*alone)
	}
	c.Late, c.Routed = true, true
	alone := play(1, 0)
	require.InEpsilon(t, alone, play(4, .005), .1, "without engines' events")
}

// However long the queues of prefill are, only a decode endpoint's own requests count as its load: otherwise long
// queues would keep it from helping out.
func TestQueuesOfPrefillFillNoDecode(t *testing.T) {
	tr, c := small(t, "agent", 1.1)
	c.Late = false
	jobs := newJobs(tr)
	f := newFleet(c, jobs, rand.New(rand.NewPCG(c.Seed, 3)))
	p := newTandem(f, c)
	f.policy = p
	for i := range jobs {
		f.After(jobs[i].Arrival, func() { p.arrive(jobs[i]) })
	}
	longest := 0
	for f.Step() && f.ended < len(jobs) {
		for _, e := range f.prefills {
			_, prompts := e.Requests()
			longest = max(longest, prompts)
		}
		v := p.replicas[0].Fleet()
		for i, d := range f.decodes {
			answers, prompts := d.Requests()
			require.EqualValues(t, answers+prompts, v.Endpoints[c.Prefill+i].Requests)
		}
	}
	require.Greater(t, longest, 10)
}

// A system prompt that nine in ten share is copied to every endpoint in the first seconds: requests do not queue for
// its first holder. However it binds and splits, no policy that only balances load is faster, from cold caches on.
func TestSharedPrefixesSpread(t *testing.T) {
	c := DefaultConfig()
	tr, err := Prepare("hot", 1500, 1, .8, c)
	require.NoError(t, err)
	best := math.Inf(1)
	for _, who := range []string{"least-requests", "dynamo", "mooncake"} {
		r, err := Run(t.Context(), tr, who, c)
		require.NoError(t, err)
		best = min(best, r.TTFT.Mean)
	}
	for _, who := range ours() {
		c.Late, c.Split = who.late, who.split
		r, err := Run(t.Context(), tr, who.policy, c)
		require.NoError(t, err)
		require.Less(t, r.TTFT.Mean, 1.05*best, who.name)
	}
}

// What requests ask for between tokens is held in the 99th percentile, though decode endpoints compute prompts as well;
// what they do not ask for is not.
func TestTPOTIsHeld(t *testing.T) {
	for _, name := range []string{"agent", "mixed"} {
		c := DefaultConfig()
		trace, err := Prepare(name, 2000, 1, .8, c)
		require.NoError(t, err)
		tpot := func(ask float64, split picker.Split) float64 {
			c.AskTPOT, c.Split = ask, split
			r, err := Run(t.Context(), trace, "tandem", c)
			require.NoError(t, err)
			return r.TPOT.P99
		}
		const ask = 0.025
		require.Less(t, tpot(0, picker.SplitAlways), ask, name)
		require.Greater(t, tpot(0, picker.SplitAuto), 1.2*ask, name)
		require.Less(t, tpot(ask, picker.SplitAuto), 1.1*ask, name)
	}
}

func TestLoadIsWhatWasAskedFor(t *testing.T) {
	for _, trace := range []string{"mooncake", "agent"} {
		c := DefaultConfig()
		tr, err := Prepare(trace, 2000, 1, .7, c)
		require.NoError(t, err)
		p, d, err := Load(tr, c)
		require.NoError(t, err)
		require.InDelta(t, .7, max(p, d), .1)
	}
}

// The public trace has the properties that its README lists.
func TestPublicTrace(t *testing.T) {
	tr, err := traces.Open("mooncake", 0, 1)
	require.NoError(t, err)
	require.Len(t, tr.Requests, 12031)
	require.InDelta(t, .374, tr.Bound(), .001)
	require.InDelta(t, 3540, tr.Duration(), 70)
	require.True(t, slices.IsSortedFunc(tr.Requests, traces.ByArrival))
}

func TestConfigErrors(t *testing.T) {
	tr, good := small(t, "agent", .5)
	for _, change := range []func(*Config){
		func(c *Config) { c.Prefill = 0 }, func(c *Config) { c.Decode = -1 }, func(c *Config) { c.Replicas = 65 }, func(c *Config) { c.TPOT = 0 },
	} {
		c := good
		change(&c)
		_, err := Run(t.Context(), tr, "tandem", c)
		require.Error(t, err)
	}
	_, err := Run(t.Context(), tr, "best", good)
	require.ErrorContains(t, err, `"best" is not a policy: one of [tandem random`)
	require.NoError(t, CheckPolicies(Policies()))
	require.Error(t, CheckPolicies([]string{"tandem", ""}))
	stopped, stop := context.WithCancel(t.Context())
	stop()
	long, err := Prepare("agent", 2000, 1, .5, good)
	require.NoError(t, err)
	_, err = Run(stopped, long, "random", good)
	require.ErrorIs(t, err, context.Canceled)
}

// The JSON output has exactly the documented members.
func TestJSON(t *testing.T) {
	r := one(t, "random", nil, traces.Request{Input: 10, Output: 2})
	text, err := json.Marshal(r)
	require.NoError(t, err)
	var got map[string]any
	require.NoError(t, json.Unmarshal(text, &got))
	keys := slices.Sorted(func(yield func(string) bool) {
		for k := range got {
			if !yield(k) {
				return
			}
		}
	})
	require.Equal(t, []string{"goodput", "hitShare", "maxMeanLoad", "policy", "requests", "tpot", "ttft"}, keys)
	require.Len(t, got["ttft"], 5)
}

func TestAboutWritesNumbersAsPeopleDo(t *testing.T) {
	tr, c := small(t, "agent", .5)
	for tokens, want := range map[float64]string{1e6: "1,000,000", 950: "950", 123456.7: "123,457", math.Inf(1): "endless"} {
		c.Engine.KVTokens = tokens
		require.Contains(t, strings.Join(About(tr, c), "\n"), ", "+want+" tokens of KV each; seed")
	}
}

// The suite prints its tables, for one scenario.
func TestSuiteTables(t *testing.T) {
	s := &played{plan: plan{[]scenario{{trace: "agent", prefill: 2, decode: 2}}, []float64{.3, .8}, []uint64{1}, 120}, results: map[string][]*Result{}}
	for _, load := range s.loads {
		require.NoError(t, s.play(t.Context(), s.scenarios[0], load, 1, everybody(), func() {}))
	}
	s.complete = 1
	var out bytes.Buffer
	s.print(&out)
	require.NotContains(t, out.String(), "NaN")
	require.Contains(t, out.String(), "| agent 2+2 |")
	require.Contains(t, out.String(), "| 80 % |")
}

// No request waits longer than the server's limit: a long prompt that short ones overtake is bound after that time.
func TestWaitEnds(t *testing.T) {
	requests := []traces.Request{{Input: 100_000, Output: 1}, {Arrival: 0.1, Input: 110_000, Output: 1}}
	for i := range 600 {
		requests = append(requests, traces.Request{Arrival: 0.2 + 0.06*float64(i), Input: 1000, Output: 1})
	}
	longest := func(wait float64) float64 {
		r := one(t, "tandem", func(c *Config) { c.MaxWait = wait }, requests...)
		return r.ttft[len(r.ttft)-1]
	}
	first := longest(1)
	require.Less(t, first, 35.0) // the one before it, its own work, and a second
	require.Greater(t, longest(math.Inf(1)), first+10)
}

// If more arrive than may wait, the first makes space.
func TestFullQueue(t *testing.T) {
	requests := make([]traces.Request, 5000)
	for i := range requests {
		requests[i] = traces.Request{Arrival: 1e-6 * float64(i), Input: 200, Output: 1}
	}
	r := one(t, "tandem", func(c *Config) { c.MaxWait = math.Inf(1) }, requests...)
	require.Equal(t, len(requests), r.Requests)
}
