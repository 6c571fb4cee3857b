package filter

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
)

// dialect returns a policy that splits every request, with a dialect.
func dialect(name string) func(p *pass.Policy) {
	return func(p *pass.Policy) {
		always(p)
		p.Dialect = kvtransfer.Named(name)
	}
}

// sent is P's answer by which D gets its blocks, of any dialect whose legs run at once.
const sent = `{"id":"c","choices":[{"index":0,"message":{"content":" a"},"finish_reason":"length"}],` +
	`"usage":{"prompt_tokens":12,"completion_tokens":1},"meta_info":{"prompt_tokens":12}}`

// Both legs at once: what becomes of the request when either leg fails, and in which order.
func TestPairs(t *testing.T) {
	const rejected = `{"error":{"message":"bad"}}`
	for name, tt := range map[string]struct {
		dialect string
		engines func(at string, tries int) engineAnswer // tries of D so far
		unsent  int                                     // calls that Envoy does not make, of the first
		body    string
		status  int
		reply   string // a part of it
		sent    int    // to decode endpoints
		filters int
	}{
		"sglang": {dialect: "sglang", status: 200, reply: "answer", sent: 1, filters: 1},
		"moriio": {dialect: "moriio", status: 200, reply: "answer", sent: 1, filters: 1},
		"P refuses the request": {dialect: "sglang", engines: func(at string, _ int) engineAnswer {
			if prefills(at) {
				return engineAnswer{status: 400, body: rejected}
			}
			return well(at, nil)
		}, status: 400, reply: "bad", sent: 1, filters: 1},
		"P refuses the request that goes on without it": {dialect: "moriio", engines: func(at string, tries int) engineAnswer {
			if prefills(at) {
				return engineAnswer{status: 400, body: rejected}
			}
			if tries == 0 {
				return engineAnswer{never: true} // it waits for P
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"P answers that it has given up": {dialect: "sglang", engines: func(at string, tries int) engineAnswer {
			switch {
			case prefills(at) && tries <= 1:
				return engineAnswer{status: 200, body: strings.Replace(sent, "length", "abort", 1)}
			case tries == 0:
				return engineAnswer{never: true}
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"D refuses the request": {dialect: "sglang", engines: func(at string, _ int) engineAnswer {
			if prefills(at) {
				return engineAnswer{status: 200, body: sent}
			}
			return engineAnswer{status: 400, body: `{"error":"bad","bootstrap_room":77}`}
		}, status: 400, reply: `"bad"`, sent: 1, filters: 1},
		"P fails once": {dialect: "sglang", engines: func(at string, tries int) engineAnswer {
			if prefills(at) && tries == 1 {
				return engineAnswer{status: 500, body: "no"}
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"P fails once, while D is silent": {dialect: "sglang", engines: func(at string, tries int) engineAnswer {
			switch {
			case prefills(at) && tries == 1:
				return engineAnswer{status: 500, body: "no"}
			case !prefills(at) && tries == 0:
				return engineAnswer{never: true}
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"P fails once, and is asked again": {dialect: "moriio", engines: func() func(at string, tries int) engineAnswer {
			asked := 0
			return func(at string, _ int) engineAnswer {
				if prefills(at) {
					if asked++; asked == 1 {
						return engineAnswer{status: 500, body: "no"}
					}
				}
				return well(at, nil)
			}
		}(), status: 200, reply: "answer", sent: 1, filters: 1},
		"P's leg cannot be sent, once": {dialect: "sglang", unsent: 1, status: 200, reply: "answer", sent: 1, filters: 1},
		"D is full once": {dialect: "sglang", engines: func(at string, tries int) engineAnswer {
			if !prefills(at) && tries == 0 {
				return engineAnswer{status: 503, body: "full"}
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"D fails once, and P does not": {dialect: "sglang", engines: func(at string, tries int) engineAnswer {
			if !prefills(at) && tries == 0 {
				return engineAnswer{status: 500, body: "no"}
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"D breaks off while it waits for P": {dialect: "moriio", engines: func(at string, tries int) engineAnswer {
			if !prefills(at) && tries == 0 {
				return engineAnswer{status: 200, body: "{", breaks: true}
			}
			return well(at, nil)
		}, status: 200, reply: "answer", sent: 2, filters: 2},
		"nobody serves": {dialect: "sglang", engines: func(string, int) engineAnswer {
			return engineAnswer{status: 500, body: "no"}
		}, status: 503, reply: "endpoint_failed", sent: 3, filters: 4},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, dialect(tt.dialect))
			tries := 0
			c := newClient(t, f, func(at string, body []byte) (a engineAnswer) {
				require.True(t, json.Valid(body), "%s", body)
				if a = pairWell(at); tt.engines != nil {
					if a = tt.engines(at, tries); prefills(at) && a.body == answered {
						a.body = sent
					}
				}
				if !prefills(at) {
					tries++
				}
				return a
			}, chat)
			c.patient, c.unsent = true, tt.unsent
			c.run()
			require.Equal(t, tt.status, c.status, c.reply)
			require.Contains(t, c.reply, tt.reply)
			require.NotContains(t, c.reply, "bootstrap_room", "D's leg")
			require.Len(t, c.sent, tt.sent)
			require.Equal(t, tt.filters, c.started)
			require.Equal(t, c.wakers, c.closed, "every waker is closed once")
			for range 3 { // legs that go on without the request
				select {
				case <-c.woken:
					c.woken <- struct{}{}
					c.step()
				case <-time.After(100 * time.Millisecond):
				}
			}
			require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
			require.Empty(t, f.restarts)
			require.Empty(t, f.waiting)
			require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond)
		})
	}
}

func pairWell(at string) engineAnswer {
	if prefills(at) {
		return engineAnswer{status: 200, body: sent}
	}
	return engineAnswer{status: 200, body: `{"answer":true}`}
}

// Whatever leg's body Envoy keeps, the client's own is made of it.
func TestPairsBodies(t *testing.T) {
	for _, name := range []string{"sglang", "moriio", "trtllm-first"} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, dialect(name))
			var bodies [][]byte
			failed := false
			c := newClient(t, f, func(at string, body []byte) engineAnswer {
				bodies = append(bodies, body)
				if !prefills(at) && !failed {
					failed = true
					return engineAnswer{status: 500, body: "no"}
				}
				return pairWell(at)
			}, chat)
			c.run()
			require.Equal(t, 200, c.status, c.reply)
			for _, b := range bodies {
				require.True(t, json.Valid(b), "%s", b)
				require.Contains(t, string(b), `"messages":[{"role":"user","content":"hello"}]`)
			}
		})
	}
}

// A client may leave at any moment: nothing stays.
func TestClientsLeavePairs(t *testing.T) {
	for _, name := range []string{"sglang", "moriio"} {
		for steps := range 5 {
			f := newFleet(t, dialect(name))
			c := newClient(t, f, func(at string, _ []byte) engineAnswer {
				if prefills(at) {
					return pairWell(at)
				}
				return engineAnswer{never: true}
			}, chat)
			c.begin()
			for range steps {
				if len(c.sent) == 0 || len(c.calls) > 0 || len(c.outside) > 0 {
					c.step()
				}
			}
			c.answer = engineAnswer{local: "downstream_remote_disconnect"}
			c.end()
			for len(c.outside) > 0 { // it goes on
				c.step()
			}
			require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond, steps)
			require.Empty(t, f.waiting)
			require.Eventually(t, func() bool { return f.Memory.Load() == 0 }, time.Minute, time.Millisecond, steps)
		}
	}
}
