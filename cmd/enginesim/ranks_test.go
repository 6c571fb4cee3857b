package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// ask posts a chat with a data-parallel rank; "" names none.
func (e *simulator) ask(t *testing.T, id, rank, body string) reply {
	t.Helper()
	req, err := http.NewRequest(http.MethodPost, e.url+chatPath, strings.NewReader(body))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", id)
	if rank != "" {
		req.Header.Set("X-Data-Parallel-Rank", rank)
	}
	return read(t, req)
}

// TestRanks: each rank has a cache, a side channel and an engine id of its own, and the header chooses it.
func TestRanks(t *testing.T) {
	p, d := startEngine(t, "-role", "prefill", "-dp-size", "2", "-engine-id", "p"), startEngine(t, "-role", "decode", "-dp-size", "2")
	want := d.post(t, chatPath, "plain", chat(longPrompt, `"max_tokens":9,"cache_salt":"reference"`)).content()
	ports := map[int]bool{}
	for rank := range 2 {
		for turn, cached := range []bool{false, true} {
			id := fmt.Sprint("r", rank, turn)
			legs := p.ask(t, id, fmt.Sprint(rank), chat(longPrompt, prefillMembers))
			require.Equal(t, fmt.Sprint("p_dp", rank), legs.str("kv_transfer_params", "remote_engine_id"))
			require.Equal(t, cached, legs.num("usage", "prompt_tokens_details", "cached_tokens") > 0, "the other rank's cache is not this one's")
			ports[legs.num("kv_transfer_params", "remote_port")] = true
			got := d.ask(t, id, fmt.Sprint(1-rank), chat(longPrompt, `"max_tokens":9`, decodeMembers(legs.params())))
			require.Equal(t, want, got.content(), got)
		}
	}
	require.Len(t, ports, 2)
	ranks := map[int]int{}
	for range 4 {
		require.Equal(t, 200, p.ask(t, "x", "x", chat("not a number: to each in turn", `"max_tokens":1`)).status)
	}
	for _, rec := range p.Records.Last(4, "") {
		ranks[rec.Rank]++
	}
	require.Equal(t, map[int]int{0: 2, 1: 2}, ranks)
	page := p.get(t, "/metrics").String()
	require.Contains(t, page, `vllm:num_requests_running{engine="0"`)
	require.Contains(t, page, `vllm:num_requests_running{engine="1"`)
	p.quiet(t)
	d.quiet(t)
}
