package e2e

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// No client gets an engine's redirect, which names an address inside the fleet. It counts as a failure: another endpoint
// is asked, and where none is left the client gets an error, the same beside Envoy and inside.
func TestEnginesRedirects(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]options{
		"nixl": {dialect: "nixl"}, "sglang": {dialect: "sglang"}, "mooncake": {dialect: "mooncake"},
		"rewritten": {dialect: "nixl", pool: "  cachedTokens: prefill\n"},
		"continued": {dialect: "nixl", pool: insurance},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // mostly waits
			if o.pool == insurance && !runsInside() {
				t.Skip("inside only")
			}
			o.prefills, o.decodes = 1, 2
			f := start(t, o)
			f.lenient = true
			body := pairBody
			if o.pool == insurance {
				body = pairBody[:len(pairBody)-1] + `,"stream":true}`
			}
			embeddings := asked{path: "/v1/embeddings", body: `{"model":"tiny","input":"x"}`}
			alone := 200 // what decode alone answers
			if name == "sglang" {
				alone = 503
			}
			for _, status := range []int{301, 302, 303, 307, 308} {
				for _, tt := range []struct {
					at        string
					of        []*engine
					chat      int
					embedding []int
				}{
					{"P", f.prefills, alone, []int{200}}, {"a D", f.decodes[:1], 200, []int{200, 502}}, {"every D", f.decodes, 503, []int{502}},
				} {
					for _, e := range tt.of {
						f.inject(e, fmt.Sprintf(`{"mode":"status","status":%d}`, status))
					}
					chat, embedded := f.post("/v1/chat/completions", body), f.post(embeddings.path, embeddings.body)
					for _, e := range tt.of {
						f.clear(e)
					}
					require.Equal(t, tt.chat, chat.status, "%d of %s: %s", status, tt.at, chat.body)
					require.Contains(t, tt.embedding, embedded.status, "%d of %s: %s", status, tt.at, embedded.body)
					if chat.status != 200 {
						requireError(t, chat, "endpoint_failed")
					}
					if embedded.status != 200 { // it is sent once
						requireError(t, embedded, "endpoint_redirected")
					}
					require.Empty(t, chat.header.Get("Location")+embedded.header.Get("Location"))
				}
			}
		})
	}
}
