package e2e

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// What P refuses of the body that Tandem made for it is no answer to the client: decode alone decides, and P serves the
// next request.
func TestDecodeDecidesWhatPrefillRefuses(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "mooncake"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			f := start(t, options{dialect: dialect, prefills: 2, decodes: 1})
			f.lenient = true // D of a pair waits for blocks that P does not send
			const path, forced = "/v1/chat/completions", `{"model":"tiny","tool_choice":"required","max_tokens":4,` +
				`"tools":[{"type":"function","function":{"name":"now","parameters":{}}}],"messages":[{"role":"user","content":"hi"}]}`
			for _, status := range []int{400, 422, 500, 501} {
				for _, p := range f.prefills {
					f.inject(p, fmt.Sprintf(`{"mode":"status","status":%d,"leg":"prefill"}`, status))
				}
				for i := range 4 { // more in a row than an engine may fail
					id := fmt.Sprintf("forced-%d-%d", status, i)
					got := f.post(path, forced, "x-request-id", id)
					require.Equal(t, 200, got.status, "%d: %s", status, got.body)
					if dialect == "nixl" { // P's leg of a pair is sent again after a 500: D may wait for it
						require.Len(t, f.requests(id, f.prefills...), 1)
					}
				}
				for _, p := range f.prefills {
					f.clear(p)
				}
			}
			f.noneLeftOut()
		})
	}
}

// An engine that really refuses a forced tool with one token (vLLM before 0.18): P is asked for one, D for what the client
// wants.
func TestOldEnginesRefuseForcedTools(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 2, decodes: 1, engineArgs: []string{"--old-forced-tools"}})
	for i, r := range []asked{
		{path: "/v1/chat/completions", body: `{"model":"tiny","tool_choice":"required","max_tokens":40,` +
			`"tools":[{"type":"function","function":{"name":"now","parameters":{}}}],"messages":[{"role":"user","content":"hi"}]}`},
		{path: "/v1/messages", body: `{"model":"tiny","tool_choice":{"type":"any"},"max_tokens":40,` +
			`"tools":[{"name":"now","input_schema":{"type":"object"}}],"messages":[{"role":"user","content":"hi"}]}`},
		{path: "/v1/responses", body: `{"model":"tiny","tool_choice":"required","store":false,"max_output_tokens":40,` +
			`"tools":[{"type":"function","name":"now","parameters":{}}],"input":"hi"}`},
	} {
		for n := range 4 { // more in a row than an engine may fail
			id := fmt.Sprintf("old-%d-%d", i, n)
			got := f.post(r.path, r.body, "x-request-id", id)
			require.Equal(t, 200, got.status, "%s: %s", r.path, got.body)
			require.Len(t, f.requests(id, f.prefills...), 1)
			require.GreaterOrEqual(t, f.requests(id, f.prefills...)[0].Status, 400, r.path)
		}
	}
	f.noneLeftOut()
}

// split: always falls back to decode alone when no prefill endpoint is left.
func TestSplitAlwaysFallsBack(t *testing.T) {
	t.Parallel()
	f := start(t, options{prefills: 1, decodes: 1, split: "always"})
	require.Equal(t, 200, f.post(apis[0].path, apis[0].body).status)
	f.prefills[0].stop(syscall.SIGKILL)
	f.lenient = true
	for range 5 {
		got := f.post(apis[0].path, apis[0].body)
		require.Equal(t, 200, got.status, got.body)
	}
}
