package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFirstLogprobs: an engine that compiles for its first request with log probabilities answers nobody meanwhile, and
// all afterwards; the second such request waits for nothing.
func TestFirstLogprobs(t *testing.T) {
	e := startEngine(t, "-first-logprobs", "300ms")
	first := time.Now()
	compiles := e.later(t, "first", chat("x", `"max_tokens":4,"logprobs":true`))
	other := e.later(t, "other", chat("y", `"max_tokens":4`))
	require.Equal(t, 200, (<-other).status)
	require.Equal(t, 200, (<-compiles).status)
	require.GreaterOrEqual(t, time.Since(first), 300*time.Millisecond)
	e.failWith(t, `{"mode":"stall"}`)
	e.heal(t)
	require.Equal(t, 200, e.post(t, chatPath, "second", chat("x", `"max_tokens":4,"logprobs":true`)).status)
}

// TestDiesInAStream: a request that kills its engine takes all others there with it.
func TestDiesInAStream(t *testing.T) {
	e := startEngine(t, "-decode-step", "5ms", "-fail", `{"mode":"die-in-stream","events":3,"contains":"poison"}`)
	other := e.later(t, "other", chat("y", `"max_tokens":4000,"stream":true`))
	_, err := e.do("POST", chatPath, "poison", chat("poison", `"max_tokens":9,"stream":true`))
	require.Error(t, err)
	require.NotContains(t, string((<-other).body), "[DONE]")
	<-e.Died
}

// TestMemoryInTurn: where steps have chunks, prompts that wait for their turn have no memory yet, as at vLLM; else they
// keep what others would find in the cache.
func TestMemoryInTurn(t *testing.T) {
	for chunk, used := range map[string]string{"0": "0.75", "128": "0.25"} {
		e := startEngine(t, "-blocks", "101", "-prefill-speed", "200", "-chunk", chunk)
		var answers []<-chan reply
		for i := range 3 {
			prompt := strings.Repeat(fmt.Sprintf("%04d", i), 380)
			answers = append(answers, e.later(t, fmt.Sprint(i), chat(prompt, `"max_tokens":4`)))
		}
		require.Eventually(t, func() bool {
			text := e.counters(t)
			return strings.Contains(text, `vllm:num_requests_waiting{engine="0",model_name="tiny"} 2`) &&
				strings.Contains(text, `vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} `+used)
		}, 5*time.Second, 5*time.Millisecond, "chunk %s", chunk)
		for _, a := range answers {
			require.Equal(t, 200, (<-a).status)
		}
	}
}
