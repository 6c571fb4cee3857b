package e2e

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// vLLM's dialects in which P sends and D waits for it.

func TestPushPairs(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"mooncake", "nixl-push", "moriio"} {
		for _, shape := range []struct{ prefills, decodes int }{{2, 2}, {3, 1}} {
			t.Run(fmt.Sprintf("%s %dP%dD", dialect, shape.prefills, shape.decodes), func(t *testing.T) {
				f := start(t, options{dialect: dialect, prefills: shape.prefills, decodes: shape.decodes})
				f.knowsPrefills()
				for _, api := range apis {
					for _, stream := range []bool{false, true} {
						t.Run(fmt.Sprintf("%s stream=%t", api.name, stream), func(t *testing.T) {
							body := api.body
							if stream {
								body = streamed(body)
							}
							id := fmt.Sprintf("push-%s-%t", api.name, stream)
							got := f.post(api.path, body, "x-request-id", id)
							require.Equal(t, 200, got.status, got.body)
							require.Equal(t, id, got.header.Get("x-request-id"), "the client's own")
							p, d := f.hopsLike(id)
							require.Equal(t, p.RequestID, d.RequestID, "both engines see one id")
							require.Equal(t, "prefill", p.Leg)
							require.Equal(t, "decode", d.Leg)
							require.Equal(t, 1, p.CompletionTokens)
							require.Positive(t, d.ExternalTokens)
							if !stream {
								require.Equal(t, alone(t, f, api.path, body), text(t, got.body))
								rest := d.Body
								if dialect == "nixl-push" && api.name == "responses" {
									rest = without(t, rest, "request_id")
								}
								_, rest = cutMember(t, rest)
								require.Equal(t, body, rest)
							}
						})
					}
				}
				require.Positive(t, metric(t, f.admins[0], "tandem_decisions_total", `route="pair"`))
			})
		}
	}
}

// knowsPrefills sends requests until every P has answered one, which makes it known to Tandem.
func (f *fleet) knowsPrefills() {
	f.t.Helper()
	for i := 0; slices.ContainsFunc(f.prefills, func(p *engine) bool { return len(f.requests("", p)) == 0 }); i++ {
		require.Less(f.t, i, 200, "an endpoint is never asked")
		require.Equal(f.t, 200, f.post("/v1/chat/completions", strings.Replace(pairBody, "A prompt", fmt.Sprintf("Prompt %d", i), 1)).status)
	}
}

// hopsLike returns the one prefill and the one decode request whose id begins with the client's.
func (f *fleet) hopsLike(id string) (prefill, decode seen) {
	f.t.Helper()
	of := func(engines []*engine) (out []seen) {
		for _, s := range f.requests("", engines...) {
			if s.RequestID == id || strings.HasPrefix(s.RequestID, id+".") {
				out = append(out, s)
			}
		}
		return out
	}
	p, d := of(f.prefills), of(f.decodes)
	require.Len(f.t, p, 1, "prefill requests of %s", id)
	require.Len(f.t, d, 1, "decode requests of %s", id)
	return p[0], d[0]
}

// If P's leg fails, it is sent again, because D waits for these very blocks; if that fails too, both are planned
// again. D's blocks are free at the end, which requires that P has sent.
func TestPushFailures(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"mooncake", "nixl-push", "moriio"} {
		t.Run(dialect, func(t *testing.T) {
			t.Parallel() // mostly waits
			f := start(t, options{dialect: dialect, pool: "  prefillTimeout: {base: 30s}\n",
				// P keeps blocks that no D fetches: Mooncake for 480 s, NIXL for its lease. P cannot learn that D is
				// gone.
				engineArgs: []string{"--lease", "10s", "--transfer-timeout", "10s"}})
			for range 8 {
				require.Equal(t, 200, f.post("/v1/chat/completions", pairBody).status)
			}
			for _, failure := range []struct{ leg, rule string }{
				{"prefill", `{"mode":"status","status":500,"count":1}`}, {"prefill", `{"mode":"status","status":503,"count":2}`},
				{"prefill", `{"mode":"reset-before-headers","count":1}`}, {"prefill", `{"mode":"slow","delay":"500ms","count":2}`},
				{"decode", `{"mode":"status","status":500,"count":2}`}, {"decode", `{"mode":"reset-before-headers","count":2}`}, {"decode", `{"mode":"refuse","delay":"1s"}`},
			} {
				for _, stream := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s %s stream=%t", failure.leg, failure.rule, stream), func(t *testing.T) {
						body, bad := pairBody, f.prefills[0]
						if stream {
							body = streamed(body)
						}
						if failure.leg == "decode" {
							bad = f.decodes[0]
						}
						f.breaks(bad, failure.rule)
						for range 8 {
							got := f.post("/v1/chat/completions", body)
							require.Equal(t, 200, got.status, got.body)
							require.NotContains(t, got.body, "error")
						}
						f.heal(bad)
					})
				}
			}
		})
	}
}

// If a client leaves, only D's answer is cancelled: P's leg runs to its end, and so D gets its blocks back.
func TestPushClientLeaves(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"mooncake", "nixl-push", "moriio"} {
		t.Run(dialect, func(t *testing.T) {
			f := start(t, options{dialect: dialect, engineArgs: []string{"--lease", "10s"}})
			f.knowsPrefills() // an unknown one has its leg alone, which ends with its client
			for _, p := range f.prefills {
				f.inject(p, `{"mode":"slow","delay":"5s"}`)
			}
			var all sync.WaitGroup
			for i := range 6 {
				all.Go(func() {
					ctx, leave := context.WithCancel(t.Context())
					defer leave()
					body, id, ended := pairBody, fmt.Sprintf("leaves-%d", i), make(chan error, 1)
					if i%2 == 0 {
						body = streamed(body)
					}
					go func() {
						_, err := f.try(ctx, http.MethodPost, "/v1/chat/completions", body, "x-request-id", id)
						ended <- err
					}()
					soon(t, "its prefill is under way", func() bool {
						return slices.ContainsFunc(f.requests("", f.prefills...), func(s seen) bool { return strings.HasPrefix(s.RequestID, id) && s.Body != "" })
					})
					leave()
					require.ErrorIs(t, <-ended, context.Canceled)
				})
			}
			all.Wait()
			for _, p := range f.prefills {
				for _, s := range f.requests("", p) {
					require.NotEqual(t, "aborted", s.Outcome, "a prefill was cut")
				}
			}
		})
	}
}

// MoRIIO's mode READ: D pulls with parameters of P's answer, one leg after the other.
func TestMoRIIORead(t *testing.T) {
	t.Parallel()
	for _, shape := range []struct{ prefills, decodes int }{{2, 2}, {3, 1}} {
		t.Run(fmt.Sprintf("%dP%dD", shape.prefills, shape.decodes), func(t *testing.T) {
			t.Parallel() // mostly waits
			f := start(t, options{dialect: "moriio-read", prefills: shape.prefills, decodes: shape.decodes, engineArgs: []string{"--transfer-timeout", "10s"}})
			f.pulls(t)
			f.inject(f.prefills[0], `{"mode":"status","status":500,"count":3}`)
			f.inject(f.decodes[0], `{"mode":"reset-before-headers","leg":"decode","count":1}`)
			for range 6 {
				got := f.post("/v1/chat/completions", pairBody)
				require.Equal(t, 200, got.status, got.body)
			}
			f.survivesLeaving()
		})
	}
}

// pulls sends a request of every API, streamed and not, and checks its two hops.
func (f *fleet) pulls(t *testing.T) {
	for _, api := range apis {
		for _, stream := range []bool{false, true} {
			body, id := api.body, fmt.Sprintf("pull-%s-%t", api.name, stream)
			if stream {
				body = streamed(body)
			}
			got := f.post(api.path, body, "x-request-id", id)
			require.Equal(t, 200, got.status, got.body)
			_, d := f.hops(id)
			require.Positive(t, d.ExternalTokens, id)
			if !stream {
				require.Equal(t, alone(t, f, api.path, body), text(t, got.body))
			}
		}
	}
}
