package e2e

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A request that can be split is decoded alone only if the pool allows it; otherwise it gets 503, which names the
// missing endpoints.
func TestDecodeAloneOnlyWhereThePoolAllowsIt(t *testing.T) {
	t.Parallel()
	const endpoints = ", endpoints: [{role: prefill, address: %P}, {role: decode, address: %D}]}\n"
	f := start(t, options{prefills: 1, decodes: 3, engineArgs: []string{"--model", "never", "--model", "fallback", "--model", "fail"}, pools: `pools:
- {name: never, models: [never], kvTransfer: nixl, split: always, decodeAlone: never` + endpoints + `- {name: fallback, models: [fallback], kvTransfer: nixl, split: always, endpoints: [{role: prefill, address: "127.0.0.1:1"}, {role: decode, address: %D}]}
- {name: fail, models: [fail], kvTransfer: nixl, onPrefillFailure: fail, endpoints: [{role: decode, address: %D}]}
`})
	ask := func(model, more string) answer {
		return f.post("/v1/completions", `{"model":"`+model+`","prompt":"whether alone","max_tokens":2`+more+`}`, "x-request-id", model+more[:min(len(more), 2)])
	}
	got := ask("never", "")
	require.Equal(t, 200, got.status, got.body)
	f.prefills[0].stop(syscall.SIGKILL)
	f.lenient = true
	for range 3 {
		got = f.post("/v1/completions", `{"model":"never","prompt":"not alone","max_tokens":2}`, "x-request-id", "not-alone")
		require.Equal(t, 503, got.status, got.body)
	}
	requireError(t, got, "no_prefill")
	require.Contains(t, got.body, "no prefill endpoint of pool never works: all 1 of its endpoints have failed")
	require.Empty(t, f.requests("not-alone", f.decodes...))

	got = f.post("/v1/completions", `{"model":"never","prompt":"cannot be split","n":2,"max_tokens":2}`)
	require.Equal(t, 200, got.status, got.body)
	got = ask("fallback", "")
	require.Equal(t, 200, got.status, got.body)

	got = ask("fail", "")
	require.Equal(t, 503, got.status, got.body)
	requireError(t, got, "no_prefill")
	require.Contains(t, got.body, "pool fail has no prefill endpoint: there is none in its endpoints")
}
