package e2e

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A header that decides something must have one value: with two, an engine, Envoy's log or a rate limit may read the other
// one. Beside Envoy, inside, and behind a gateway that asks an endpoint picker the answer is the same.
func TestHeadersThatComeTwice(t *testing.T) {
	t.Parallel()
	const pool = "  session: {header: x-session, cookie: sid}\n  labelHeader: x-label\n  objectives: {fromHeaders: true}\n"
	for name, o := range map[string]options{
		"two hops": {top: "usage: {tenantHeader: x-tenant}\n", pool: pool},
		"picker": {extProcFields: ", protocol: endpointPicker", pool: "  handoff: direct\n" + pool,
			bootstrap: gatewayTo()},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if runsInside() && o.bootstrap != nil {
				t.Skip("an endpoint picker is beside")
			}
			o.prefills, o.decodes = 1, 1
			f := start(t, o)
			for header, want := range map[string]int{
				"x-session: a, x-session: b": 400, "x-session: a, x-session: a": 200, "x-label: , x-label: ": 200,
				"x-session: , x-session: b": 200, // one is empty
				"x-label: a, x-label: b":    400,
				"x-llm-d-inference-objective: a, x-llm-d-inference-objective: b":       400,
				"x-llm-d-inference-objective: a, x-gateway-inference-objective: b":     400,
				"x-llm-d-inference-objective: a, x-gateway-inference-objective: a":     200,
				"x-gateway-inference-fairness-id: a, x-llm-d-inference-fairness-id: b": 400,
				"x-llm-d-slo-ttft-ms: 60000, x-llm-d-slo-ttft-ms: 50000":               400,
				"x-llm-d-slo-tpot-ms: 60000, x-llm-d-slo-tpot-ms: 50000":               400,
				"tandem-explain: a, tandem-explain: b":                                 400,
				"content-encoding: identity, content-encoding: gzip":                   0, // Envoy may join them: 400 or 415
				"x-other: a, x-other: b":                                               200,
				"cookie: sid=a, cookie: sid=b":                                         200, // HTTP/2 splits it
				"x-tenant: a, x-tenant: b":                                             0,
			} {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(pairBody))
				require.NoError(t, err)
				r.Header.Set("Content-Type", "application/json")
				for line := range strings.SplitSeq(header, ", ") {
					name, value, _ := strings.Cut(line, ": ")
					r.Header.Add(name, value)
				}
				resp, err := client.Do(r)
				require.NoError(t, err)
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				require.NoError(t, err)
				switch {
				case header == "x-tenant: a, x-tenant: b" && o.top != "":
					want = 400
				case strings.HasPrefix(header, "x-tenant"):
					want = 200
				case want == 0:
					require.Contains(t, []int{400, 415}, resp.StatusCode, header)
					continue
				}
				require.Equal(t, want, resp.StatusCode, "%s: %s", header, body)
				if want == 400 {
					require.Contains(t, string(body), `"code":"duplicate_header"`, header)
				}
			}
		})
	}
}
