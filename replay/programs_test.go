package replay

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/replay/engine"
	"tandem/replay/traces"
)

// turn is a request of a program, which has the blocks of its earlier turns.
func turn(program uint64, at float64, input, output int) traces.Request {
	return traces.Request{Arrival: at, Input: input, Output: output, Program: program,
		Blocks: blocksFrom(program<<32, (input+engine.BlockTokens-1)/engine.BlockTokens)}
}

// script plays requests until all have ended. It returns them, and a line for each: when it began, where, whether its
// blocks were cached, and when it ended.
func script(t *testing.T, name string, c Config, requests ...traces.Request) ([]*job, policy, string) {
	t.Helper()
	tr := &traces.Trace{Name: "by hand", Requests: requests}
	tr.MarkLast()
	jobs := newJobs(tr)
	f := newFleet(c, jobs, rand.New(rand.NewPCG(1, 1)))
	var err error
	f.policy, err = newPolicy(name, f, c)
	require.NoError(t, err)
	for i := range jobs {
		f.After(jobs[i].Arrival, func() { f.policy.arrive(jobs[i]) })
	}
	for more := true; more && f.ended < len(jobs); {
		more = f.Step()
	}
	var out strings.Builder
	for _, j := range jobs {
		fmt.Fprintf(&out, "program %d, %.0fk tokens at %.0f s: first token at %.0f s\n", j.asked.Program, float64(j.Input)/1000, j.Arrival, j.firstAt)
	}
	return jobs, f.policy, out.String()
}

// wholeFleet is engines of 100,000 tokens of KV that serve both legs.
func wholeFleet(engines int) Config {
	c := DefaultConfig()
	c.Both, c.Engine.KVTokens = engines, 100_000
	return c
}

// ThunderAgent gives an engine no more programs than its memory has room for: the fourth waits. When the first has grown
// too much, at 15 s, the smallest of those whose tools run is paused, and goes on when the third has ended.
func TestThunderAgent(t *testing.T) {
	_, _, out := script(t, "thunderagent", wholeFleet(1),
		turn(1, 0, 30_000, 20), turn(2, 0, 28_000, 20), turn(3, 0, 30_000, 20), turn(4, 1, 30_000, 20),
		turn(1, 11, 38_000, 20), turn(2, 16, 28_600, 20), turn(3, 22, 30_600, 20), turn(1, 31, 38_600, 20))
	require.Equal(t, `program 1, 30k tokens at 0 s: first token at 3 s
program 2, 28k tokens at 0 s: first token at 5 s
program 3, 30k tokens at 0 s: first token at 7 s
program 4, 30k tokens at 1 s: first token at 33 s
program 1, 38k tokens at 11 s: first token at 12 s
program 2, 29k tokens at 16 s: first token at 25 s
program 3, 31k tokens at 22 s: first token at 22 s
program 1, 39k tokens at 31 s: first token at 35 s
`, out)
}

// Autellix prefers the program that was served least, and Continuum the one that came first.
func TestOrderOfPrograms(t *testing.T) {
	requests := []traces.Request{
		turn(1, 0, 20_000, 400),                        // served for 6 s
		turn(2, 10, 99_000, 2),                         // keeps the engine busy for 12 s
		turn(1, 20, 21_000, 2), turn(3, 20, 20_000, 2), // wait for it
	}
	for name, want := range map[string]string{
		"autellix": `program 1, 21k tokens at 20 s: first token at 26 s
program 3, 20k tokens at 20 s: first token at 24 s
`, "continuum": `program 1, 21k tokens at 20 s: first token at 24 s
program 3, 20k tokens at 20 s: first token at 26 s
`} {
		_, _, out := script(t, name, wholeFleet(1), requests...)
		require.Equal(t, `program 1, 20k tokens at 0 s: first token at 2 s
program 2, 99k tokens at 10 s: first token at 23 s
`+want, out, name)
	}
}

// The time to live that gains most covers the short tools, and not the long one. It is 0 where prefill is cheap.
func TestTimeToLive(t *testing.T) {
	c := continuum{tools: []float64{4, 2, 3, 300}}
	for _, test := range []struct{ saves, share, want float64 }{
		{10, .2, 4}, {1000, .2, 300}, {1, .2, 4}, {.1, .2, 0}, {10, 2, 4},
	} {
		require.InDelta(t, test.want, c.live(test.saves, test.share), 0, "%+v", test)
	}
}

// Continuum keeps a prefix while a tool runs, whatever others need, until its time to live ends.
func TestKeptPrefixes(t *testing.T) {
	var requests []traces.Request
	for i := range 10 { // of a program whose tools take about a second
		requests = append(requests, turn(1, 4*float64(i), 40_000, 20))
	}
	requests = append(requests, turn(3, 30, 1000, 2000), turn(2, 37.5, 90_000, 2), turn(1, 39.5, 40_000, 2))
	_, _, out := script(t, "continuum", wholeFleet(1), requests...)
	require.Contains(t, out, `program 2, 90k tokens at 38 s: first token at 51 s
program 1, 40k tokens at 40 s: first token at 40 s
`)
}

// smg 1.13 leaves a prefix only when its endpoint has far more requests than the mean, and refuses what finds no place
// in a batch for 30 s.
func TestSmg113(t *testing.T) {
	c := DefaultConfig()
	c.Prefill, c.Decode = 2, 2
	tr := &traces.Trace{Requests: []traces.Request{turn(1, 0, 4000, 2)}}
	f := newFleet(c, newJobs(tr), rand.New(rand.NewPCG(1, 1)))
	s := &smg113{peer: &peer{fleet: f}}
	ready(s.peer)
	j := f.jobs[0]
	f.prefills[1].Add(&engine.Job{Input: 4000, Output: 1, Blocks: j.Blocks}, engine.Prefill)
	for _, test := range []struct{ booked, want int }{{0, 1}, {64, 1}, {128, 1}, {129, 0}} {
		s.booked[1] = test.booked
		require.Equal(t, test.want, s.prefill(j), "%d requests there", test.booked)
	}

	c.Prefill, c.Decode, c.Engine.MaxAnswers = 1, 1, 1
	jobs, _, _ := script(t, "smg-1.13", c, turn(1, 0, 1000, 4000), turn(2, 1, 1000, 2), turn(3, 30, 1000, 2))
	require.Equal(t, []bool{false, true, false}, []bool{jobs[0].refused(), jobs[1].refused(), jobs[2].refused()})
	require.InDelta(t, 31, jobs[1].endAt, 1e-9)
	require.Greater(t, jobs[2].firstAt, jobs[0].endAt)
}

// Dynamo's planner gives prompts and answers the engines that their rates need, and an engine whose role changes ends
// what it has, starts again in a minute, and has no cache then.
func TestDynamoPlanner(t *testing.T) {
	c := DefaultConfig()
	c.Both = 8
	plan := func(requests, prompts, misses, out float64) int {
		a := newPlanner(&peer{fleet: newFleet(c, nil, nil)}, c)
		a.since = interval{requests, requests * prompts, requests * misses, requests * out}
		return a.wanted()
	}
	for _, test := range []struct {
		rate, prompt, miss, out float64
		want                    int // of 8
	}{
		{4, 8000, 8000, 100, 6}, {4, 8000, 800, 100, 4}, {4, 1000, 1000, 3000, 2}, {40, 8000, 8000, 100, 7},
		{.1, 100_000, 100_000, 10, 6}, // one prompt takes longer than is promised
	} {
		require.Equal(t, test.want, plan(test.rate*planEvery, test.prompt, test.miss, test.out), "%+v", test)
	}

	c.Both = 3 // one prefills
	var requests []traces.Request
	for i := range 20 {
		requests = append(requests, turn(uint64(i+1), 8*float64(i), 60_000, 2))
	}
	for _, test := range []struct {
		at   float64 // of a last request
		word kvstate.Role
		held int // blocks of the first prompts on the second engine
	}{{170, kvstate.RoleDecode, 118}, {230, 0, 118}, {250, kvstate.RolePrefill, 0}} {
		_, p, _ := script(t, "dynamo-planner", c, append(requests, turn(50, test.at, 100, 1))...)
		a := p.(*planner)
		require.Equal(t, []kvstate.Role{kvstate.RolePrefill, test.word, kvstate.RoleDecode}, a.words, "%+v", test)
		held := 0
		for i := range 10 {
			held = max(held, a.decodes[1].Held(requests[i].Blocks))
		}
		require.Equal(t, test.held, held, "%+v", test)
	}
}
