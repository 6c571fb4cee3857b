package e2e

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// Some clients send their key in the query. No span has it, Envoy's or Tandem's: collectors keep spans for long, and
// many people read them.
func TestSpansHoldNoQuery(t *testing.T) {
	t.Parallel()
	const secret = "xyzzy-plugh-31337"
	for _, dialect := range []string{"nixl", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel()
			c := startCollector(t)
			f := start(t, options{dialect: dialect, prefills: 1, decodes: 1,
				top: "usage: {}\ntracing: {endpoint: \"" + c.addr + "\", sampleRatio: 0}\n"})
			for i, r := range []struct{ method, path, body string }{
				{"POST", "/v1/chat/completions", pairBody}, {"POST", "/v1/embeddings", `{"model":"tiny","input":"x"}`},
				{"GET", "/v1/models", ""}, {"POST", "/v1/nothing", `{}`},
			} {
				trace, id := traceOf(i)
				_, err := f.try(t.Context(), r.method, r.path+"?api_key="+secret, r.body,
					"x-request-id", id, "traceparent", "00-"+trace+"-"+clientsSpan+"-01")
				require.NoError(t, err)
				soon(t, "the span of the whole request", func() bool {
					return slices.ContainsFunc(c.of(trace), func(s span) bool { return runsInside() || s.parent == clientsSpan })
				})
			}
			c.mu.Lock()
			defer c.mu.Unlock()
			for _, s := range c.spans {
				require.NotContains(t, s.name, secret)
				for key, value := range s.attributes {
					require.NotContains(t, value, secret, "%s %s %s", s.service, s.name, key)
				}
			}
		})
	}
}
