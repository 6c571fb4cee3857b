//go:build vllm

package vllm

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/realengines"
)

// odd are the decode engines that run.sh starts with MISTAKES: one of other blocks, without a prefix cache, that does not
// look at leases; and one of another dtype and another model.
func odd(t *testing.T) (blocks, model engine) {
	t.Helper()
	if os.Getenv("TANDEM_VLLM_ODD") == "" {
		t.Skip("engines without mistakes: MISTAKES=1")
	}
	all := enginesFrom(t, "TANDEM_VLLM_ODD")
	require.Len(t, all, 2)
	return all[0], all[1]
}

// What people get wrong most often is said by the check, in words, and by nothing else: each of these pools was "valid", or
// refused each request.
func TestRealMistakes(t *testing.T) {
	s := runningEngines(t)
	blocks, model := odd(t)
	p, d := s.prefill[0].addr, s.decode[0].addr
	const lease = "nixl: {lease: 120s, declineExpired: true}"
	for _, tt := range []struct {
		name, settings, prefill, more, decode string
		says                                  string // "": nothing is wrong
		warns                                 bool
	}{
		{"none", lease, p, "", d, "", false},
		{"roles exchanged", lease, d, "", p, "role: is prefill here, and the engine runs with kv_role kv_consumer", false},
		{"another model", lease, p, "", model.addr, "the engine's model is ", false},
		{"another dtype", lease, p, "", model.addr, "the engine's dtype is bfloat16 and that of pools[0].endpoints[0] is float32", false},
		{"another block size", lease, p, "", blocks.addr, "the engine's block size is 64 and that of pools[0].endpoints[0] is 32", false},
		{"another lease", "nixl: {lease: 600s, declineExpired: true}", p, "", d, "the engine frees KV after 2m0s", false},
		{"no look at leases", lease, p, "", blocks.addr, "the engine does not look at when leases end", false},
		{"another parallel size", lease, p, ", transfer: {tensorParallelSize: 2}", d, "is 2 here, and the engine says 1", false},
		{"no prefix cache", lease, p, "", blocks.addr, "the engine's prefix cache is off", true},
		{"no connector", lease, p, "", s.reference.addr, "the engine runs without a KV connector", false},
		{"no side channel", lease, p, ", transfer: {host: 127.0.0.2}", d, "the engine's side channel 127.0.0.2:", false},
		{"another connector", "", p, "", d, "the engine runs with NixlConnector, and the pool's kvTransfer is mooncake", false},
		{"a wrong name", lease + ", models: [tini]", p, "", d, `"tini": no endpoint serves it`, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dialect := "nixl"
			if tt.name == "another connector" {
				dialect = "mooncake"
			}
			file := filepath.Join(t.TempDir(), "tandem.yaml")
			require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "pools:\n- {name: tiny, kvTransfer: %s, %s, endpoints: "+
				"[{role: prefill, address: %q%s}, {role: decode, address: %q}]}\n",
				dialect, strings.TrimPrefix(tt.settings+", split: always", ", "), tt.prefill, tt.more, tt.decode), 0o600))
			said, failed := realengines.Check(t, file)
			if tt.says == "" {
				require.False(t, failed, said)
				return
			}
			require.Contains(t, said, tt.says)
			require.True(t, failed || tt.warns, said)
		})
	}
}

// Engines of other block sizes answered 100 of 100 requests wrongly, with a 200, and the wrong KV stayed in D's prefix
// cache. Tandem does not pair them: D computes the prompts, and P, with a D of its own size, goes on computing for that.
func TestRealBlockSizes(t *testing.T) {
	s := runningEngines(t)
	other, _ := odd(t)
	s.decode = []engine{other}
	front, admin := realengines.Serve(t, s.pool(), "usage: {}")
	suite := &suite{stack: s, prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}}
	s.front.addr, s.admin = front, admin
	for range 30 {
		suite.both(t, request{api: chat, prompt: suite.prompts.words(60), tokens: 12})
	}
	require.Zero(t, promptTokens(t, other).transferred, "KV of other blocks was fetched")

	s.decode = append(s.decode, enginesFrom(t, "TANDEM_VLLM_DECODE")...)
	s.front.addr, s.admin = realengines.Serve(t, s.pool(), "usage: {}")
	before := promptTokens(t, s.decode...)
	for range 30 {
		suite.both(t, request{api: completions, prompt: suite.prompts.words(60), tokens: 12})
	}
	require.Zero(t, promptTokens(t, other).transferred, "KV of other blocks was fetched")
	require.Positive(t, promptTokens(t, s.decode...).minus(before).transferred, "nothing was split")
}

// A real engine that compiles for the first request with log probabilities stands still for seconds, and is no reason to
// fail a request: not that one, and not those behind it.
func TestRealCompiles(t *testing.T) {
	s := newStack(t)
	odd(t)
	suite := &suite{stack: s, prompts: prompts{rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))}, report: &report{}}
	suite.both(t, request{api: chat, prompt: suite.prompts.words(30), tokens: 4})
	started := time.Now()
	for i := range 6 {
		r := request{api: chat, prompt: suite.prompts.words(30), tokens: 4, extra: `,"logprobs":true,"top_logprobs":3`}
		if i%2 == 1 {
			r.extra = `,"min_tokens":2,"repetition_penalty":1.2,"logit_bias":{"500":3}`
		}
		a, err := send(t.Context(), s.front.addr, r, 0)
		require.NoError(t, err, "%s", r)
		require.Equal(t, 200, a.status, "%s after %s: %s", r, time.Since(started), a.raw)
	}
}
