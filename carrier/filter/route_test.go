package filter

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/names"
	"tandem/extproc/pass"
)

// named is well, with answers of P's that name it.
func named(at string, body []byte) engineAnswer {
	a := well(at, body)
	host, _, _ := strings.Cut(at, ":")
	a.body = strings.Replace(a.body, `"remote_host":"10.0.1.1"`, `"remote_host":"`+host+`"`, 1)
	return a
}

// On another's route P's leg is a call to the cluster that is named, and D's leg stays on the route.
func TestAnothersRoute(t *testing.T) {
	for name, tt := range map[string]struct {
		route *Route
		calls string // the cluster of P's leg
	}{
		"one cluster":                  {&Route{}, "httproute/ns/chat/rule/0"},
		"a rule of the same HTTPRoute": {&Route{Rule: "1"}, "httproute/ns/chat/rule/1"},
		"a cluster by its name":        {&Route{Cluster: "backend/x", Rule: "1", Strict: true}, "backend/x"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, always)
			c := newClient(t, f, named, chat)
			c.route = tt.route
			for _, name := range []string{"x-tandem-leg", "x-tandem-pair", "x-gateway-destination-endpoint"} {
				c.SetHeader(name, "10.9.9.9:1")
			}
			c.run()
			require.Equal(t, 200, c.status, c.reply)
			require.Equal(t, []string{tt.calls}, slices.Compact(c.called))
			require.Len(t, c.sent, 1)
			require.Contains(t, c.sent[0], "10.0.2.")
			require.Contains(t, string(c.got), `"do_remote_prefill":true`)
			for _, h := range c.headers {
				require.False(t, steers(h.Name), h.Name)
			}
		})
	}
}

// An operator who asks gets the decision in a header of the answer, whoever wrote that, and every client its request's id:
// no other filter makes a header of the metadata there, removes an engine's own, or has to set the id.
func TestAnswerHeadersOnAnothersRoute(t *testing.T) {
	final := strings.Replace(answered, `"length"`, `"stop"`, 1)
	for name, tt := range map[string]struct {
		fleet   *fleet
		prefill string // P's answer; "": one that D continues
		body    string
	}{
		"D's":      {newFleet(t, always), "", chat},
		"P's":      {newFleet(t, dialect("trtllm")), final, chat},
		"a pair's": {newFleet(t, dialect("nixl-push")), "", chat},
		"a stream": {insuredFleet(t, longAfter), "", insuredChat},
	} {
		t.Run(name, func(t *testing.T) {
			for _, token := range []string{"operator", "guess"} {
				f := tt.fleet
				f.Passes.Operator = func(token []byte) bool { return string(token) == "operator" }
				c := newClient(t, f, func(at string, body []byte) engineAnswer {
					if prefills(at) && tt.prefill != "" {
						return engineAnswer{status: 200, body: tt.prefill}
					}
					return named(at, body)
				}, tt.body)
				c.route, c.explained = &Route{Strict: true}, "an engine's own"
				if tt.prefill != "" || tt.body == insuredChat {
					c.explained = "" // the filter leaves them out
				}
				c.SetHeader(names.HeaderExplain, token)
				if tt.body == insuredChat {
					c.play = func(u *startedLeg) { u.pieces = writes(t, len(c.legs), u.body) }
					c.stream()
				} else {
					c.run()
				}
				require.Equal(t, 200, c.status, c.reply)
				require.Equal(t, token == "operator", strings.HasPrefix(c.explained, `{"`), c.explained)
				require.Equal(t, token == "guess", c.explained == "", c.explained)
				require.Equal(t, "r-1", c.named)
				if len(c.sent) > 0 {
					require.Empty(t, c.header(names.HeaderExplain), "the token goes no further")
				}
				require.NotContains(t, c.told, explanation)
			}
		})
	}
}

// A decode endpoint that the route's cluster lacks gets nothing, and is not chosen again for a while. The request begins
// again on the route that it came on, although that has given it another path by then, and gets the route's headers
// once.
func TestTheRoutesClusterLacksAnEndpoint(t *testing.T) {
	f := newFleet(t, always)
	ask := func() *client {
		c := newClient(t, f, named, chat)
		c.route, c.lacks, c.rewrite = &Route{Strict: true}, []string{"10.0.2.1:8000"}, "/elsewhere"
		for _, name := range []string{"x-team", "accept-encoding", names.HeaderRank, names.HeaderPerTry, names.HeaderTraceparent} {
			c.SetHeader(name, "client")
		}
		c.adds = []Header{{"x-team", "route"}, {"x-route", "chat"}}
		c.run()
		var ofRoute []Header
		for _, h := range c.headers {
			if h.Name == "x-team" || h.Name == "x-route" {
				ofRoute = append(ofRoute, h)
			}
		}
		require.Equal(t, append([]Header{{"x-team", "client"}}, c.adds...), ofRoute)
		require.Equal(t, 200, c.status, c.reply)
		require.Equal(t, "10.0.2.2:8000", c.sent[len(c.sent)-1])
		return c
	}
	tries := 0
	var others []Header
	for range 20 {
		c := ask()
		tries += len(c.sent)
		c.RemoveHeader("content-length") // P's answers differ
		slices.SortFunc(c.headers, func(a, b Header) int { return strings.Compare(a.Name+a.Value, b.Name+b.Value) })
		if others == nil {
			others = c.headers
		}
		require.Equal(t, others, c.headers, "as a request has that was not planned again")
	}
	require.Equal(t, 21, tries, "the one that asked it first was planned again")
	e := f.state.Pool("chat").Endpoint("10.0.2.1:8000")
	require.Contains(t, e.Refusing(f.Passes.Now()), "the cluster of the gateway's route lacks 10.0.2.1:8000")
}

// A call that may reach another engine than the one that it names: P's answer has to name it, or is not used.
func TestAnotherEngineAnswersForP(t *testing.T) {
	f := newFleet(t, always)
	tried := map[string]int{}
	c := newClient(t, f, func(at string, body []byte) engineAnswer {
		tried[at]++
		return named(at, body)
	}, chat)
	c.route, c.lacks, c.instead = &Route{}, []string{"10.0.1.1:8000", "10.0.1.2:8000"}, "10.0.1.2:8000"
	for _, e := range f.state.Pool("chat").Endpoints() {
		if e.Addr == "10.0.1.2:8000" {
			f.state.Health.MarkFailed(e)
		}
	}
	c.run()
	require.Equal(t, 200, c.status, c.reply)
	require.Equal(t, 1, tried["10.0.1.2:8000"])
	require.NotContains(t, string(c.got), "kv_transfer_params", "D computes the prompt")
	e := f.state.Pool("chat").Endpoint("10.0.1.1:8000")
	require.NotEmpty(t, e.Refusing(f.Passes.Now()))
}

// Envoy's client breaks a call off that has a body and has to wait until an endpoint is looked up: one without goes before it.
func TestACallWithoutABodyGoesFirst(t *testing.T) {
	for name, change := range map[string]func(*pass.Policy){"nixl": always, "sglang": dialect("sglang"), "moriio": dialect("moriio")} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, change)
			route := &Route{Strict: true}
			firsts := map[string]int{}
			for range 10 {
				c := newClient(t, f, named, chat)
				c.route = route
				c.run()
				require.Equal(t, 200, c.status, c.reply)
				for _, at := range c.firsts {
					firsts[at]++
				}
			}
			require.NotEmpty(t, firsts)
			for at, n := range firsts {
				require.True(t, prefills(at))
				require.Equal(t, 1, n, at)
			}
		})
	}
}

// What a call that is not strict must not be used for.
func TestCallsThatAreNotStrict(t *testing.T) {
	for _, strict := range []bool{false, true} {
		f := newFleet(t, dialect("sglang"))
		c := newClient(t, f, well, chat)
		c.route = &Route{Strict: strict}
		c.run()
		if strict {
			require.Equal(t, 200, c.status, c.reply)
			require.Empty(t, c.header("x-tandem-pair"), "no filter behind the router would take it away")
			continue
		}
		require.Equal(t, 503, c.status)
		require.Contains(t, c.reply, "route_not_strict")
		require.Contains(t, c.reply, "DynamicResolver")
		require.Empty(t, c.sent)
		require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
	}
}

// A route without a retry policy keeps no body, so the request cannot begin again: without a word it would hang.
func TestARouteWithoutARetryPolicy(t *testing.T) {
	f := newFleet(t, func(p *pass.Policy) { p.Split = false })
	c := newClient(t, f, func(string, []byte) engineAnswer {
		return engineAnswer{status: 503, local: "upstream_reset_before_response_started{connection_failure}"}
	}, chat)
	well := newClient(t, f, well, chat)
	well.route, well.forgets = &Route{Strict: true}, true
	require.Empty(t, well.route.Problems())
	well.run()
	require.Equal(t, 200, well.status)
	require.Contains(t, well.route.Problems(), noRetries, "it is said before a request needs it")

	refused := newClient(t, f, func(string, []byte) engineAnswer {
		return engineAnswer{status: 403, local: "rbac_access_denied_matched_policy[none]"}
	}, chat)
	refused.route = well.route
	refused.run()
	require.Equal(t, 403, refused.status)
	require.Contains(t, well.route.Problems(), noRetries, "Envoy has the body of a request that its router has not seen")

	c.route, c.forgets = &Route{Strict: true}, true
	c.run()
	require.Equal(t, 503, c.status)
	require.Contains(t, c.reply, "BackendTrafficPolicy")
	require.Equal(t, 1, c.started)
	require.Contains(t, c.route.Problems(), noRetries)
	require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
	require.True(t, f.state.Pool("chat").Endpoint(c.sent[0]).Failed(), "the endpoint is known to have failed all the same")
}

// A filter behind Tandem's that refuses requests whose prompts have been computed is said, once; one that refuses a
// request for which nothing was computed costs nothing.
func TestAFilterBehindRefuses(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*pass.Policy)
		wrong  int
	}{
		"one leg after the other": {always, 1},
		"both legs at once":       {dialect("sglang"), 1},
		"decode alone":            {func(p *pass.Policy) { p.Split = false }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, tt.change)
			route := &Route{Strict: true}
			for range 3 {
				c := newClient(t, f, func(at string, body []byte) engineAnswer {
					if prefills(at) {
						return named(at, body)
					}
					return engineAnswer{status: 403, body: "RBAC: access denied", local: "rbac_access_denied_matched_policy[none]"}
				}, chat)
				c.route = route
				c.run()
				require.Equal(t, 403, c.status, "the other filter's answer is the client's")
				require.Equal(t, "RBAC: access denied", c.reply)
				require.Len(t, c.sent, 1)
			}
			require.Len(t, route.Problems(), tt.wrong)
			if tt.wrong > 0 {
				require.Contains(t, route.Problems()[0], "(403, rbac_access_denied_matched_policy[none])")
			}
			require.Eventually(t, func() bool { return f.reserved() == 0 }, time.Minute, time.Millisecond)
		})
	}
}
