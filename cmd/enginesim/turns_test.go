package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// idsOf returns n token ids that differ by seed.
func idsOf(n, seed int) (ids []uint32) {
	for i := range n {
		ids = append(ids, uint32(seed*100_000+i))
	}
	return ids
}

func idsBody(t *testing.T, ids []uint32, members string) string {
	t.Helper()
	text, err := json.Marshal(ids)
	require.NoError(t, err)
	return fmt.Sprintf(`{"model":"tiny","prompt":%s,%s}`, text, members)
}

// twoTurns returns a prefill and a decode engine that have answered the first turn of a conversation: the prompt of a
// possible next turn, and the decode engine's description of the blocks it keeps.
func twoTurns(t *testing.T, more ...string) (p, d *simulator, next []uint32, kept json.RawMessage) {
	t.Helper()
	args := append([]string{"-bidirectional"}, more...)
	p = startEngine(t, append([]string{"-role", "prefill"}, args...)...)
	d = startEngine(t, append([]string{"-role", "decode"}, args...)...)
	prompt := idsOf(100, 1)
	answer := turn(t, p, d, "t1", prompt, `{"do_remote_decode":true}`)
	require.Equal(t, 200, answer.status, answer)
	var v struct {
		Choices []struct {
			IDs []uint32 `json:"token_ids"`
		}
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal(answer.body, &v))
	require.Len(t, v.Choices[0].IDs, 90)
	return p, d, slices.Concat(prompt, v.Choices[0].IDs, idsOf(40, 2)), v.Params
}

// turn sends one request through both engines; params are the prefill leg's parameters. If prefill refuses, it returns
// that answer.
func turn(t *testing.T, p, d *simulator, xid string, prompt []uint32, params string) reply {
	t.Helper()
	answer := p.post(t, "/v1/completions", xid, idsBody(t, prompt, `"max_tokens":1,"kv_transfer_params":`+params))
	if answer.status != 200 {
		return answer
	}
	var v struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal(answer.body, &v))
	return d.post(t, "/v1/completions", xid, idsBody(t, prompt, `"max_tokens":90,"return_token_ids":true,"kv_transfer_params":`+string(v.Params)))
}

// TestTurns: prefill fetches the blocks that decode keeps (prompt and answer without its last token), and computes the
// rest; the answer is that of a single engine, and the kept blocks are freed.
func TestTurns(t *testing.T) {
	p, d, next, kept := twoTurns(t)
	require.Positive(t, d.Ledger.Held.Load(), "decode keeps the first turn")
	other := startEngine(t, "-role", "prefill", "-bidirectional") // with an empty cache
	answer := turn(t, other, d, "t2", next, string(kept))
	require.Equal(t, 200, answer.status, answer)
	require.EqualValues(t, 189, other.Metrics.External.Load())
	require.EqualValues(t, len(next)-189, other.Metrics.LocalCompute.Load())
	alone := startEngine(t, "-connector", "none").post(t, "/v1/completions", "t2", idsBody(t, next, `"max_tokens":90`))
	require.Equal(t, alone.str("choices", "0", "text"), answer.str("choices", "0", "text"))
	require.EqualValues(t, 1, d.Ledger.Fetched.Load())

	var again struct {
		Params json.RawMessage `json:"kv_transfer_params"`
	}
	require.NoError(t, json.Unmarshal(answer.body, &again))
	require.Contains(t, string(again.Params), `"do_remote_decode":true`)
	require.NotEqual(t, string(kept), string(again.Params), "the second turn is kept as well")
	_ = p
}

// TestTurnsThatAreViolations has reads that vLLM would make silently.
func TestTurnsThatAreViolations(t *testing.T) {
	for name, c := range map[string]struct {
		change func(next []uint32) []uint32
		Params map[string]string
		kind   string
	}{
		"another token in the answer": {func(n []uint32) []uint32 { n[150]++; return n }, nil, "other_prompt"},
		"another token in the prompt": {func(n []uint32) []uint32 { n[0]++; return n }, nil, "other_prompt"},
		"the last token of all":       {func(n []uint32) []uint32 { n[188]++; return n }, nil, "other_prompt"},
		"a prompt that ends there":    {func(n []uint32) []uint32 { return n[:189] }, nil, "turn_not_longer"},
		"another request's":           {nil, map[string]string{"remote_request_id": `"cmpl-nobody"`}, "unknown_request"},
		"fewer blocks":                {nil, map[string]string{"remote_block_ids": `[[1]]`}, "fewer_blocks"},
		"without a host":              {nil, map[string]string{"remote_host": "-"}, "incomplete_params"},
		"without a count":             {nil, map[string]string{"remote_num_tokens": "-"}, "incomplete_params"},
	} {
		t.Run(name, func(t *testing.T) {
			_, d, next, kept := twoTurns(t)
			p := startEngine(t, "-role", "prefill", "-bidirectional")
			if c.change != nil {
				next = c.change(next)
			}
			answer := turn(t, p, d, "t2", next, string(edit(t, kept, c.Params)))
			require.Equal(t, 500, answer.status, answer)
			require.Contains(t, answer.String(), c.kind)
		})
	}
	t.Run("twice", func(t *testing.T) {
		_, d, next, kept := twoTurns(t)
		for i, want := range []int{200, 500} {
			p := startEngine(t, "-role", "prefill", "-bidirectional")
			answer := turn(t, p, d, fmt.Sprint("t", i), next, string(kept))
			require.Equal(t, want, answer.status, answer)
			require.Equal(t, want == 500, bytesContain(answer, "read_twice"))
		}
	})
	t.Run("too late", func(t *testing.T) {
		_, d, next, kept := twoTurns(t, "-decoder-ttl", "50ms")
		require.Eventually(t, func() bool { return d.Ledger.Held.Load() == 0 }, patience, time.Millisecond)
		untold := edit(t, kept, map[string]string{"remote_blocks_expiry_time": "null"})
		answer := turn(t, startEngine(t, "-role", "prefill", "-bidirectional"), d, "t2", next, string(untold))
		require.Equal(t, 500, answer.status, answer)
		require.Contains(t, answer.String(), "expired")
	})
	t.Run("an engine that does not do it", func(t *testing.T) {
		_, d, next, kept := twoTurns(t)
		answer := turn(t, startEngine(t, "-role", "prefill"), d, "t2", next, string(kept))
		require.Contains(t, answer.String(), "stale_blocks_on_prefill")
	})
	t.Run("decode's blocks on decode", func(t *testing.T) {
		_, _, next, kept := twoTurns(t)
		other := startEngine(t, "-role", "decode", "-bidirectional")
		answer := other.post(t, "/v1/completions", "t2", idsBody(t, next, `"max_tokens":5,"kv_transfer_params":`+
			string(edit(t, kept, map[string]string{"do_remote_prefill": "true", "do_remote_decode": "false"}))))
		require.Equal(t, 500, answer.status, answer)
	})
}

func bytesContain(r reply, text string) bool { return strings.Contains(r.String(), text) }

// TestTurnsFallBack: if the decode engine has restarted, the load fails, or with recompute costs only time; if the
// cache lacks only a few tokens, they are computed, and decode is notified to free its blocks.
func TestTurnsFallBack(t *testing.T) {
	_, d, next, kept := twoTurns(t)
	reborn := edit(t, kept, map[string]string{"remote_engine_id": `"another"`})
	answer := turn(t, startEngine(t, "-role", "prefill", "-bidirectional"), d, "t2", next, string(reborn))
	require.Equal(t, 500, answer.status)
	require.NotContains(t, answer.String(), "Violation")
	answer = turn(t, startEngine(t, "-role", "prefill", "-bidirectional", "-kv-load-failure", "recompute"), d, "t3", next, string(reborn))
	require.Equal(t, 200, answer.status, answer)

	p := startEngine(t, "-role", "prefill", "-bidirectional")
	require.Equal(t, 200, p.post(t, "/v1/completions", "warm", idsBody(t, next[:150], `"max_tokens":1`)).status)
	answer = turn(t, p, d, "t4", next, string(kept))
	require.Equal(t, 200, answer.status, answer)
	require.Zero(t, p.Metrics.External.Load(), "189 tokens, of which the cache has 144")
	require.EqualValues(t, 1, d.Ledger.Freed.Load())
}
