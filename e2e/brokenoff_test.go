package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An answer that breaks off counts as a failure, whatever status was sent before: alerts use these metrics.
func TestAnswersThatBreakOffAreFailures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		options
		plain int // status of a plain answer that breaks off
	}{
		"nixl":   {options{dialect: "nixl"}, 200},
		"sglang": {options{dialect: "sglang"}, 200},
		// Envoy keeps a plain answer until it is whole, to cut its KV parameters, so the client has no headers yet.
		"nixl, expired KV is declined": {options{dialect: "nixl", pool: "  nixl: {lease: 120s, declineExpired: true}\n",
			engineArgs: []string{"--lease", "120s", "--bidirectional"}}, 502},
	} {
		t.Run(name, func(t *testing.T) {
			o := c.options
			o.prefills, o.decodes, o.engineArgs = 1, 1, append(o.engineArgs, "--decode-step", "20ms")
			f := start(t, o)
			f.lenient = true
			// Its tokens come one after the other: an answer that breaks before its headers were sent is another
			// engine's to give.
			body := `{"model":"tiny","messages":[{"role":"user","content":"A prompt."}],"max_tokens":16}`
			require.Equal(t, 200, f.post("/v1/chat/completions", streamed(body)).status)
			whole := 1.0
			if c.plain == 502 { // P's clock is known a moment after the first request
				soon(t, "D gets KV", func() bool {
					const outdated = "tandem_kv_outdated_total"
					before := metric(t, f.admins[0], outdated, `reason="unknown"`)
					require.Equal(t, 200, f.post("/v1/chat/completions", streamed(body)).status)
					whole++
					return metric(t, f.admins[0], outdated, `reason="unknown"`) == before
				})
			}
			for i, rule := range []string{`{"mode":"stream-reset-after","events":6,"count":1}`, `{"mode":"reset-mid-body","count":1}`} {
				f.inject(f.decodes[0], rule)
				if i == 0 {
					body = streamed(body)
				} else {
					body = strings.Replace(body, `"stream":true,`, "", 1)
				}
				got, err := f.try(t.Context(), "POST", "/v1/chat/completions", body)
				require.True(t, err != nil || !strings.Contains(got.body, "[DONE]"), "%d %s", got.status, got.body)
				for _, name := range []string{"tandem_request_duration_seconds_count", "tandem_hop_duration_seconds_count"} {
					labels := []string{`result="failed"`}
					if strings.Contains(name, "hop") {
						labels = append(labels, `hop="decode"`, f.decodes[0].addr)
					}
					require.Eventually(t, func() bool { return metric(t, f.admins[0], name, labels...) == float64(i+1) }, patience, 20*time.Millisecond, fmt.Sprint(name, rule))
				}
			}
			var cut []row
			require.NoError(t, getJSON(f.admins[0]+"/debug/requests?failed=true", &cut))
			require.Len(t, cut, 2, "and not the one that was complete")
			var ended []string
			for _, r := range cut {
				ended = append(ended, fmt.Sprint(r.Status, " ", r.Ended, " ", r.Decode))
				require.Positive(t, r.Took)
			}
			how, broke := "200 cut ", 2
			if c.plain == 502 {
				how, broke = "502 failed ", 1
			}
			require.ElementsMatch(t, []string{"200 cut " + f.decodes[0].addr, how + f.decodes[0].addr}, ended)
			log, err := os.ReadFile(f.tandems[0].log)
			require.NoError(t, err)
			require.Equal(t, broke, strings.Count(string(log), `msg="an answer broke off" request_id=`))
			require.InDelta(t, whole, metric(t, f.admins[0], "tandem_request_duration_seconds_count", `result="ok"`), 0)
		})
	}
}

// Envoy answers 503 for an engine that breaks a connection. It does not count as the engine's own 503, which means that
// the engine is full. The Retry-After of a full engine is kept.
func TestBrokenConnectionsAreNoRefusals(t *testing.T) {
	t.Parallel()
	const body = `{"model":"tiny","messages":[{"role":"user","content":"A prompt of a few words."}],"max_tokens":4}`
	for _, dialect := range []string{"nixl", "mooncake", "sglang"} {
		for _, role := range []string{"prefill", "decode"} {
			t.Run(dialect+" "+role, func(t *testing.T) {
				t.Parallel()
				f := start(t, options{dialect: dialect, prefills: 1, decodes: 2, split: "always\n  decodeAlone: never"})
				f.lenient = true
				require.Equal(t, 200, f.post("/v1/chat/completions", body).status)
				engines := f.decodes
				if role == "prefill" {
					engines = f.prefills
				}
				said := func(text string) bool {
					log, err := os.ReadFile(f.tandems[0].log)
					require.NoError(t, err)
					return strings.Contains(string(log), text)
				}
				for _, e := range engines {
					f.inject(e, `{"path":"/v1/chat/completions","mode":"reset-before-headers"}`)
				}
				got, err := f.try(t.Context(), "POST", "/v1/chat/completions", body)
				require.NoError(t, err)
				require.Equal(t, 503, got.status)
				require.NotContains(t, got.body, "503", "what no engine answered")
				require.Contains(t, got.body, engines[0].addr)
				require.False(t, said("an endpoint is full"))
				for _, e := range engines {
					f.clear(e)
					f.inject(e, `{"path":"/v1/chat/completions","mode":"status","status":429,"retry_after":7}`)
				}
				soon(t, "the engine's Retry-After is known", func() bool {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second) // it waits for the engine
					defer cancel()
					_, _ = f.try(ctx, "POST", "/v1/chat/completions", body)
					return said(`status=429 retry_after=7s`)
				})
				require.False(t, said("retry_after=0s"))
			})
		}
	}
}
