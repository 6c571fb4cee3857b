package filter

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/internal/memory"
	"tandem/kvstate"
)

const (
	chat = `{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":9}`
	// params are P's, as vLLM's NIXL connector has them.
	params = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2]],"remote_engine_id":"e",` +
		`"remote_request_id":"r","remote_host":"10.0.1.1","remote_port":5600,"tp_size":1}`
	answered = `{"id":"c","choices":[{"index":0,"message":{"content":" a"},"finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":12,"completion_tokens":1},"kv_transfer_params":` + params + `}`
)

// well is two engines of each role that serve everything.
func well(endpoint string, body []byte) engineAnswer {
	if prefills(endpoint) {
		_, ids, _ := strings.Cut(string(body), `"prompt_token_ids":[`)
		ids, _, continues := strings.Cut(ids, "]")
		if continues {
			tokens := fmt.Sprintf(`"prompt_tokens":%d`, strings.Count(ids, ",")+1)
			return engineAnswer{status: 200, body: strings.Replace(answered, `"prompt_tokens":12`, tokens, 1)}
		}
		return engineAnswer{status: 200, body: answered}
	}
	return engineAnswer{status: 200, body: `{"answer":true}`}
}

func prefills(endpoint string) bool { return strings.HasPrefix(endpoint, "10.0.1.") }

// always splits every request.
func always(p *pass.Policy) { p.Place.Split = 1 }

func TestSplit(t *testing.T) {
	f := newFleet(t, always)
	var prefill string
	c := newClient(t, f, func(at string, body []byte) engineAnswer {
		if prefills(at) {
			prefill = string(body)
		}
		return well(at, body)
	}, chat)
	c.run()
	require.Equal(t, 200, c.status, c.reply)
	require.JSONEq(t, `{"answer":true}`, c.reply)
	require.Contains(t, prefill, `"do_remote_decode":true`)
	require.Contains(t, prefill, `"max_tokens":1`)
	require.Len(t, c.sent, 1)
	require.Equal(t, `{"kv_transfer_params":`+params+`,`+chat[1:], string(c.got), "the client's body, and P's parameters")
	require.Equal(t, "decode", c.header("x-tandem-leg"))
	require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
}

func TestDecisionsAreTold(t *testing.T) {
	f := newFleet(t, always)
	f.Decisions = true
	c := newClient(t, f, well, chat)
	c.run()
	require.Subset(t, c.told, []string{"pool", "route", "decode"})
}

// What engines and Envoy answer, and what the client gets.
func TestAnswers(t *testing.T) {
	for name, tt := range map[string]struct {
		policy  func(*pass.Policy)
		body    string
		engines func(at string, tries int) engineAnswer // tries of D so far
		status  int
		reply   string // a part of it
		sent    int    // to decode endpoints
		filters int
	}{
		"decode alone": {
			policy: func(p *pass.Policy) { p.Split = false }, status: 200, reply: "answer", sent: 1, filters: 1,
		},
		"P refuses the request, and D does not": {
			engines: func(at string, _ int) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 400, body: `{"error":{"message":"bad"}}`}
				}
				return well(at, nil)
			}, status: 200, reply: "answer", sent: 1, filters: 1,
		},
		"both refuse the request": {
			engines: func(string, int) engineAnswer {
				return engineAnswer{status: 400, body: `{"error":{"message":"bad"}}`}
			}, status: 400, reply: `"message":"bad"`, sent: 1, filters: 1,
		},
		"P refuses the request, and D must not be alone": {
			policy: func(p *pass.Policy) { p.Alone = plan.AloneNever },
			engines: func(string, int) engineAnswer {
				return engineAnswer{status: 400, body: `{"error":{"message":"bad","kv_transfer_params":{"do_remote_decode":true}}}`}
			}, status: 400, reply: `"message":"bad"`, filters: 1,
		},
		"D does not serve the model, nor does another": {
			policy: func(p *pass.Policy) { p.Split = false },
			engines: func(string, int) engineAnswer {
				return engineAnswer{status: 404, body: `{"error":{"message":"no such model"}}`}
			}, status: 404, reply: "no such model", sent: 3, filters: 3,
		},
		"D does not serve the model, and another does": {
			policy: func(p *pass.Policy) { p.Split = false },
			engines: func(at string, tries int) engineAnswer {
				if tries == 0 {
					return engineAnswer{status: 404, body: `{"error":{"message":"no such model"}}`}
				}
				return well(at, nil)
			}, status: 200, reply: "answer", sent: 2, filters: 2,
		},
		"P is out": {
			engines: func(at string, _ int) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 503, body: "reset reason: connection failure", local: "upstream_reset_before_response_started{connection_failure}"}
				}
				return well(at, nil)
			}, status: 200, reply: "answer", sent: 1, filters: 1,
		},
		"P answers nonsense": {
			engines: func(at string, _ int) engineAnswer {
				if prefills(at) {
					return engineAnswer{status: 200, body: `{"kv_transfer_params":7}`}
				}
				return well(at, nil)
			}, status: 200, reply: "answer", sent: 1, filters: 1,
		},
		"D is full once": {
			engines: func(at string, tries int) engineAnswer {
				if !prefills(at) && tries == 0 {
					return engineAnswer{status: 503, body: "full"}
				}
				return well(at, nil)
			}, status: 200, reply: "answer", sent: 2, filters: 2,
		},
		"D refuses the connection": {
			engines: func(at string, tries int) engineAnswer {
				if !prefills(at) && tries == 0 {
					return engineAnswer{status: 503, local: "upstream_reset_before_response_started{connection_failure}"}
				}
				return well(at, nil)
			}, status: 200, reply: "answer", sent: 2, filters: 2,
		},
		"D never serves": {
			engines: func(at string, _ int) engineAnswer {
				if !prefills(at) {
					return engineAnswer{status: 500, body: "no"}
				}
				return well(at, nil)
			}, status: 503, reply: "endpoint_failed", sent: 3, filters: 4,
		},
		"D refuses the request": {
			engines: func(at string, _ int) engineAnswer {
				if !prefills(at) {
					return engineAnswer{status: 422, body: "no such thing"}
				}
				return well(at, nil)
			}, status: 422, reply: "no such thing", sent: 1, filters: 1,
		},
		"another filter answers for D": { // as a rate limit: no endpoint is at fault, and none is tried again
			engines: func(at string, _ int) engineAnswer {
				if !prefills(at) {
					return engineAnswer{status: 429, body: "too many tokens", local: "request_rate_limited"}
				}
				return well(at, nil)
			}, status: 429, reply: "too many tokens", sent: 1, filters: 1,
		},
		"no JSON":           {body: "hello", status: 400, reply: "invalid", filters: 1},
		"too large":         {body: strings.Repeat(" ", 2<<20) + chat, status: 413, reply: "body_too_large", filters: 1},
		"larger than split": {body: strings.Repeat(" ", 1<<20) + chat, status: 200, reply: "answer", sent: 1, filters: 1},
		"control fields": {
			body:   `{"kv_transfer_params":{"do_remote_prefill":true},` + chat[1:],
			status: 200, reply: "answer", sent: 1, filters: 1,
		},
		"a panic": {
			engines: func(at string, _ int) engineAnswer { return well(at, nil) },
			policy:  func(p *pass.Policy) { p.Dialect.ReadAnswer = nil }, status: 500, reply: "internal_error", filters: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, func(p *pass.Policy) {
				always(p)
				if tt.policy != nil {
					tt.policy(p)
				}
			})
			tries := 0
			c := newClient(t, f, func(at string, body []byte) (a engineAnswer) {
				if a = well(at, body); tt.engines != nil {
					a = tt.engines(at, tries)
				}
				if !prefills(at) {
					require.NotContains(t, string(body), `"do_remote_prefill":true},`, "the client's own parameters")
					tries++
				}
				return a
			}, chat)
			if tt.body != "" {
				c.body = []byte(tt.body)
				c.RemoveHeader("content-length")
			}
			c.run()
			require.Equal(t, tt.status, c.status, c.reply)
			require.Contains(t, c.reply, tt.reply)
			require.NotContains(t, c.reply, "do_remote_decode", "P's leg")
			require.Len(t, c.sent, tt.sent)
			require.Equal(t, tt.filters, c.started)
			require.Equal(t, c.wakers, c.closed, "every waker is closed once")
			require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
			require.Empty(t, f.restarts)
			require.Empty(t, f.waiting)
			require.Zero(t, f.Memory.Load(), "bytes of the budget")
		})
	}
}

// A client may leave at any moment: nothing stays.
func TestClientsLeave(t *testing.T) {
	for steps := range 5 {
		f := newFleet(t, always)
		c := newClient(t, f, func(at string, body []byte) engineAnswer {
			if prefills(at) {
				return well(at, body)
			}
			return engineAnswer{never: true}
		}, chat)
		c.begin()
		for range steps {
			if !c.answer.never {
				c.step()
			}
		}
		c.answer = engineAnswer{local: "downstream_remote_disconnect"}
		c.end()
		require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond, steps)
		require.Empty(t, f.waiting)
		require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond, steps)
	}
}

// A client may leave while the second pass waits for a decode endpoint: what P keeps is not fetched, which is counted.
// Likewise if the second pass is refused.
func TestNobodyFetches(t *testing.T) {
	for name, tt := range map[string]struct {
		leaves, late bool
		why          string
	}{
		"the client leaves":     {leaves: true, why: "client_gone"},
		"no endpoint gets free": {why: "no_decode"},
		"both at once":          {late: true, why: "no_decode"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet(t, func(p *pass.Policy) { p.Place.Split, p.Place.Late = 1, tt.leaves })
				c := newClient(t, f, well, chat)
				c.begin()
				for len(c.calls) == 0 {
					c.step()
				}
				for _, d := range f.state.Pool("chat").Endpoints() {
					if d.Role == kvstate.RoleDecode {
						require.True(t, f.state.Health.MarkFull(d, 503, time.Minute))
					}
				}
				c.step() // P answers
				if tt.leaves {
					c.step() // the second pass begins, and waits
					synctest.Wait()
					c.gone = true
				} else {
					for c.status == 0 {
						c.step()
					}
					require.Equal(t, 503, c.status)
				}
				c.gone = c.gone || tt.late
				c.end()
				synctest.Wait()
				require.InDelta(t, 1, f.orphaned(tt.why), 0, "orphaned")
				require.InDelta(t, 1, f.orphaned("client_gone")+f.orphaned("no_decode"), 0, "once")
				require.Zero(t, f.reserved())
			})
		})
	}
}

// An answer of P's that is cut after it had begun: P has computed the prompt, and nobody can name the blocks it keeps.
func TestPrefillIsCut(t *testing.T) {
	f := newFleet(t, always)
	cut := 0
	c := newClient(t, f, func(at string, body []byte) engineAnswer {
		if prefills(at) {
			cut++
			return engineAnswer{breaks: true}
		}
		return well(at, body)
	}, chat)
	c.run()
	require.Equal(t, 200, c.status, c.reply)
	require.InDelta(t, cut, f.orphaned("answer_cut"), 0)
	require.NotZero(t, cut)
}

// P reports its load along with its answer: alone, and as one of two legs at once.
func TestPrefillReportsItsLoad(t *testing.T) {
	for name, policy := range map[string]func(*pass.Policy){"one by one": always, "at once": dialect("sglang")} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, policy)
			var at string
			c := newClient(t, f, func(endpoint string, body []byte) engineAnswer {
				a := well(endpoint, body)
				if prefills(endpoint) {
					if name == "at once" {
						a = pairWell(endpoint)
					}
					at, a.load = endpoint, `JSON {"named_metrics":{"kv_cache_usage_perc":0.5,"num_requests_waiting":3}}`
				}
				return a
			}, chat)
			c.run()
			require.NotEmpty(t, at)
			require.Eventually(t, func() bool {
				var v kvstate.View
				f.state.View(f.state.Pool("chat"), nil, &v)
				return slices.ContainsFunc(v.Endpoints, func(c kvstate.Candidate) bool {
					return c.Endpoint.Addr == at && c.Signals != nil && c.Signals.KVUsage == .5
				})
			}, time.Minute, time.Millisecond)
		})
	}
}

// An endpoint that was found to have failed is not waited for.
func TestLostAnswersArePlannedAgain(t *testing.T) {
	f := newFleet(t, always)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	first := true
	c := newClient(t, f, func(at string, body []byte) engineAnswer {
		if !prefills(at) && first {
			first = false
			return engineAnswer{never: true}
		}
		return well(at, body)
	}, chat)
	c.begin()
	for !c.answer.never {
		c.step()
	}
	c.filter.hop.ticket.Expires = c.filter.hop.ticket.Expires.Add(-time.Minute) // it was sent a minute ago
	e := f.state.Pool("chat").Endpoint(c.sent[0])
	f.state.Health.Mark(e, true, kvstate.CauseTimeLimit, "")
	go f.Run(ctx)
	c.answer = engineAnswer{}
	for c.status == 0 {
		c.step()
	}
	c.end()
	require.Equal(t, 200, c.status, c.reply)
	require.NotEqual(t, c.sent[0], c.sent[1])
	require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
}

func TestPathsAndModels(t *testing.T) {
	for name, tt := range map[string]struct {
		method, path, kind, body string
		status                   int
		reply                    string
	}{
		"models":     {"GET", "/v1/models", "", "", 200, "object"},
		"not served": {"POST", "/metrics", "", "", 404, ""},
		"tokenize":   {"POST", "/tokenize", "application/json", `{"prompt":"x"}`, 200, "answer"},
		"empty":      {"POST", "/v1/completions", "application/json", "", 400, "empty_body"},
		"not JSON":   {"POST", "/v1/completions", "text/plain", "x", 415, ""},
		"an upload":  {"POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=x", "--x--", 200, "answer"},
		"a large upload": {"POST", "/v1/audio/transcriptions", "multipart/form-data; boundary=x",
			strings.Repeat("x", 3<<20), 200, "answer"},
		"JSON by stealth": {"POST", "/v1/audio/transcriptions", "text/plain", "{}", 415, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, nil)
			c := newClient(t, f, well, tt.body)
			c.SetHeader(":method", tt.method)
			c.SetHeader(":path", tt.path)
			c.RemoveHeader("content-type")
			if tt.kind != "" {
				c.SetHeader("content-type", tt.kind)
			}
			c.run()
			require.Equal(t, tt.status, c.status, c.reply)
			require.Contains(t, c.reply, tt.reply)
			require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

// A request that begins again, and finds no memory, leaves nothing reserved for the hop that failed.
func TestNoMemoryToBeginAgain(t *testing.T) {
	f := newFleet(t, always)
	c := newClient(t, f, func(at string, body []byte) engineAnswer {
		if prefills(at) {
			return well(at, body)
		}
		f.Memory = memory.New(1)
		return engineAnswer{status: 500, body: "no"}
	}, chat)
	c.run()
	require.Equal(t, 503, c.status, c.reply)
	require.Equal(t, "tandem_server_busy", c.details)
	require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
}

// Envoy may end a request that begins again before a filter has it (it is overloaded). Nothing stays reserved for the hop
// that failed.
func TestNobodyBeginsAgain(t *testing.T) {
	for name, policy := range map[string]func(*pass.Policy){"nixl": always, "sglang": dialect("sglang")} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, policy)
			c := newClient(t, f, func(at string, body []byte) engineAnswer {
				switch {
				case name == "nixl" && prefills(at):
					return well(at, body)
				case prefills(at):
					return engineAnswer{status: 200, body: "no KV"}
				case name == "sglang":
					return engineAnswer{never: true}
				}
				return engineAnswer{status: 500, body: "no"}
			}, chat)
			c.overloaded, c.patient = true, true
			for c.begin(); c.status == 0; {
				c.step()
			}
			require.Equal(t, "overload", c.details)
			require.Eventually(t, func() bool { return f.reserved() == 0 }, 5*time.Second, time.Millisecond)
			require.Zero(t, f.Memory.Load())
		})
	}
}
