package replay

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replay/engine"
	"tandem/replay/traces"
)

// Policies that may decode alone do so if their own decode endpoint lacks only a few of the prompt's tokens.
func TestPeersThatMayDecodeAlone(t *testing.T) {
	for _, c := range []struct {
		policy      string
		input, held int // tokens of the prompt, and of those on decode
		alone       bool
	}{
		{"llm-d-in-flight/2048", 2047, 0, true},
		{"llm-d-in-flight/2048", 2048, 0, false},
		{"llm-d-in-flight/8192", 20000, 19 * engine.BlockTokens * 2, true},
		{"llm-d-in-flight/512", 20000, 39 * engine.BlockTokens, true},
		{"llm-d-in-flight/512", 20000, 38 * engine.BlockTokens, false},
		{"dynamo/2048", 1000, 0, false}, // less than 2,048, but all of the prompt
		{"dynamo/2048", 2000, 2 * engine.BlockTokens, true},
		{"dynamo/2048", 10000, 14 * engine.BlockTokens, false},
		{"trtllm/2048", 1000, 0, false}, // nothing is there
		{"trtllm/2048", 1000, engine.BlockTokens, true},
		{"trtllm/2048", 4096, engine.BlockTokens, false},
		{"vllm-router/256", 256, 0, true},
		{"vllm-router/256", 257, 0, false},
	} {
		config := DefaultConfig()
		config.Prefill, config.Decode = 2, 1
		j := newJob(0, &traces.Request{Input: c.input, Output: 1})
		for b := range (c.input + engine.BlockTokens - 1) / engine.BlockTokens {
			j.Blocks = append(j.Blocks, uint64(b+1))
		}
		f := newFleet(config, []*job{j}, rand.New(rand.NewPCG(1, 1)))
		p, err := newPolicy(c.policy, f, config)
		require.NoError(t, err)
		f.policy = p
		f.decodes[0].Add(&engine.Job{Input: max(c.held, 1), Output: 1, Blocks: j.Blocks[:c.held/engine.BlockTokens]}, engine.Both)
		p.arrive(j)
		require.Equal(t, c.alone, j.alone, "%s: %d tokens, %d of them there", c.policy, c.input, c.held)
	}
}

// Kairos sends the prompt with the least slack first, and those that are too late last.
func TestKairos(t *testing.T) {
	c := DefaultConfig()
	c.Prefill, c.Decode = 1, 1
	blocks := func(i int) []uint64 { return blocksFrom(uint64(1000*i), 64) }
	tr := &traces.Trace{Name: "by hand", Requests: []traces.Request{
		{Arrival: 0, Input: 100_000, Output: 2, Blocks: blocks(1)},   // computed for 12 s
		{Arrival: .1, Input: 16_000, Output: 2, Blocks: blocks(2)},   // too late by then
		{Arrival: 10, Input: 8000, Output: 2, Blocks: blocks(3)},     // in time
		{Arrival: 10.1, Input: 20_000, Output: 2, Blocks: blocks(4)}, // likewise, with less slack
	}}
	jobs := newJobs(tr)
	f := newFleet(c, jobs, rand.New(rand.NewPCG(1, 1)))
	var err error
	f.policy, err = newPolicy("kairos", f, c)
	require.NoError(t, err)
	for i := range jobs {
		f.After(jobs[i].Arrival, func() { f.policy.arrive(jobs[i]) })
	}
	for f.Step() {
	}
	require.Less(t, jobs[3].firstAt, jobs[2].firstAt)
	require.Less(t, jobs[2].firstAt, jobs[1].firstAt)
}

// Deflection sends a prompt to decode when prefill is busy, but not where answers leave no time.
func TestDeflection(t *testing.T) {
	c := DefaultConfig()
	c.Prefill, c.Decode = 1, 1
	jobs := newJobs(&traces.Trace{Requests: []traces.Request{
		{Input: 60_000, Output: 2, Blocks: blocksFrom(1, 100)}, {Input: 4000, Output: 2, Blocks: blocksFrom(5000, 8)},
		{Input: 4000, Output: 2, Blocks: blocksFrom(6000, 8)},
	}})
	f := newFleet(c, jobs, rand.New(rand.NewPCG(1, 1)))
	p, err := newPolicy("deflection", f, c)
	require.NoError(t, err)
	f.policy = p
	p.arrive(jobs[0])
	p.arrive(jobs[1])
	require.Equal(t, []bool{false, true}, []bool{jobs[0].alone, jobs[1].alone})
	p.(*peer).kv[0] = 999_000
	p.arrive(jobs[2])
	require.False(t, jobs[2].alone, "no room")
}
