package replay

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/replay/engine"
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
		{"llm-d-in-flight/8192", 20000, 19 * BlockTokens * 2, true},
		{"llm-d-in-flight/512", 20000, 39 * BlockTokens, true},
		{"llm-d-in-flight/512", 20000, 38 * BlockTokens, false},
		{"dynamo/2048", 1000, 0, false}, // less than 2,048, but all of the prompt
		{"dynamo/2048", 2000, 2 * BlockTokens, true},
		{"dynamo/2048", 10000, 14 * BlockTokens, false},
		{"trtllm/2048", 1000, 0, false}, // nothing is there
		{"trtllm/2048", 1000, BlockTokens, true},
		{"trtllm/2048", 4096, BlockTokens, false},
		{"vllm-router/256", 256, 0, true},
		{"vllm-router/256", 257, 0, false},
	} {
		config := DefaultConfig()
		config.Prefill, config.Decode = 2, 1
		jobs := []job{{Job: engine.Job{Input: c.input, Output: 1}, prefill: -1, decode: -1}}
		j := &jobs[0]
		for b := range blocksOf(c.input) {
			j.Blocks = append(j.Blocks, uint64(b+1))
		}
		f := newFleet(config, jobs, rand.New(rand.NewPCG(1, 1)))
		p, err := newPolicy(c.policy, f, config)
		require.NoError(t, err)
		f.policy = p
		f.decodes[0].Add(&engine.Job{Input: max(c.held, 1), Output: 1, Blocks: j.Blocks[:c.held/BlockTokens]}, engine.Both)
		p.arrive(j)
		require.Equal(t, c.alone, j.alone, "%s: %d tokens, %d of them there", c.policy, c.input, c.held)
	}
}
