package extproc

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/latebinding"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/inferencepolicy"
	"tandem/picker"
)

// wishing is a pool whose requests say what they want.
func wishing(miss picker.OnMiss) pass.Policy {
	p := splitting()
	p.Objectives = pass.Objectives{FromHeaders: true, Miss: miss, Named: []pass.Objective{
		{Name: "batch", Priority: -1}, {Name: "gold", Priority: 5, TTFT: 500 * time.Millisecond},
	}}
	return p
}

// retryAfter is that header of an immediate response.
func (v *verdict) header(name string) string {
	for _, h := range v.immediate.GetHeaders().GetSetHeaders() {
		if h.GetHeader().GetKey() == name {
			return string(h.GetHeader().GetRawValue())
		}
	}
	return ""
}

// A request that nothing can serve in time is refused, with when to come again; one that does not mind goes on.
func TestTargetsShed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", wishing(picker.MissShed), "p1", "d1")
		end := s.busy("p1", 7*time.Second)
		c := newCrowd(s)
		c.send("a", 1000)
		c.send("b", 1000, names.HeaderTTFT, "2000")
		c.send("c", 1000, "x-llm-d-inference-objective", "gold")
		c.send("d", 1000, names.HeaderTTFT, "20000", names.HeaderTPOT, "50.5")
		c.group.Wait()
		require.ElementsMatch(t, []string{"a", "d"}, c.order)
		for id, after := range map[string]string{"b": "6", "c": "7"} {
			v := c.ended[id]
			require.Equal(t, http.StatusTooManyRequests, v.status())
			require.Equal(t, after, v.header("retry-after"), id)
			var body struct{ Error struct{ Code, Type string } }
			require.NoError(t, json.Unmarshal(v.immediate.GetBody(), &body))
			require.Equal(t, "target_missed", body.Error.Code)
			require.Equal(t, "rate_limit_error", body.Error.Type)
		}
		end()
		c.done("a")
		c.done("d")
		require.Zero(t, s.state.Bookings.Reservations())
	})
}

// With objectives.onMiss queue it waits, where waiting helps, until it can be served in time; others are not kept by it.
func TestTargetsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		s.pool("chat", wishing(picker.MissWait), "p1", "d1")
		s.busy("p1", 7*time.Second) // front of the queue: it is worked off as time goes by
		c := newCrowd(s)
		c.send("a", 1000, names.HeaderTTFT, "9000")
		require.Equal(t, []string{"a"}, c.order, "seven seconds and its own")
		c.done("a")
		c.send("b", 1000, names.HeaderTPOT, "1")
		require.Equal(t, []string{"a", "b"}, c.order, "not even an idle endpoint makes a token a millisecond")
		c.done("b")
		c.send("c", 1000, names.HeaderTTFT, "5000")
		c.send("d", 1000)
		require.Equal(t, []string{"a", "b", "d"}, c.order)
		c.done("d")
		time.Sleep(8 * time.Second)
		c.group.Wait()
		require.Contains(t, c.order, "c")
		require.Greater(t, c.after["c"], 2*time.Second, "when less is ahead, or it is too late for all")
		c.done("c")
		time.Sleep(2 * latebinding.Tick)
	})
}

// A client's objectives count only if the pool reads them, and are validated only then.
func TestTargetsCountOnlyWhereThePoolListens(t *testing.T) {
	s := newStand(t, core.Options{})
	policy := wishing(picker.MissShed)
	s.pool("chat", policy, "p1", "d1")
	for header, value := range map[string]string{names.HeaderTTFT: "soon", names.HeaderTPOT: "-1"} {
		for _, bad := range []string{value, "NaN", "1e300", "0"} {
			q := s.newRequest("/v1/chat/completions", "r1", chatBody)
			q.headers[header] = bad
			v := q.pass()
			require.Equal(t, 400, v.status(), bad)
			require.Contains(t, string(v.immediate.GetBody()), `"invalid_target"`)
		}
	}
	policy.Objectives.FromHeaders = false
	policy.Dialect = s.core.Settings().Pools["chat"].Dialect
	s.policy("chat", policy)
	q := s.newRequest("/v1/chat/completions", "r1", chatBody)
	q.headers[names.HeaderTTFT], q.headers["x-llm-d-inference-objective"] = "soon", "gold"
	require.Zero(t, q.pass().status())
}

// A full queue: what may be shed goes first, whoever came first. Priorities are the pool's own or the cluster's.
func TestShedFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, core.Options{})
		policy := wishing(picker.MissGoOn)
		policy.Place.Late, policy.Waiting = true, latebinding.Limits{Max: 2, MaxTime: 10 * time.Second}
		s.pool("chat", policy, "p1", "d1")
		s.state.Policies.SetInferencePolicy("chat", &inferencepolicy.Policy{Objectives: map[string]int32{"nightly": -7}})
		end := s.busy("p1", time.Hour)
		const objective = "x-llm-d-inference-objective"
		c := newCrowd(s)
		c.send("a", 1000, objective, "batch")
		c.send("b", 1000, objective, "nightly")
		c.send("c", 1000)
		require.Equal(t, 429, c.ended["b"].status())
		require.Contains(t, string(c.ended["b"].immediate.GetBody()), `"overloaded"`)
		c.send("d", 1000, objective, "nightly")
		require.Equal(t, 429, c.ended["d"].status(), "there is none below it")
		require.Equal(t, 2, c.waiting())
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.Equal(t, 429, c.ended["a"].status(), "its time is over")
		require.Equal(t, []string{"c"}, c.order)
		c.group.Wait()
		end()
		c.done("c")
		time.Sleep(2 * latebinding.Tick)
	})
}

// Engines that schedule by priority get it in the body of every leg, the same on both, and again after a failure; never
// the client's own.
func TestEnginesAreToldOfPriority(t *testing.T) {
	for name, tt := range map[string]struct {
		engine     plan.EnginePriority
		gold, none string
	}{
		"vllm":   {plan.VLLMPriority, `"priority":-2`, `"priority":`},
		"sglang": {plan.SGLangPriority, `"priority":5`, `"priority":0`},
		"none":   {plan.NoEnginePriority, ``, ``},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, core.Options{})
			policy := wishing(picker.MissGoOn)
			policy.Priorities = tt.engine
			s.pool("chat", policy, "p1", "d1")
			body := strings.Replace(chatBody, "{", `{"priority":77,`, 1)
			for objective, want := range map[string]string{"gold": tt.gold, "": tt.none} {
				q := s.newRequest("/v1/chat/completions", "r-"+objective, body)
				q.headers["x-llm-d-inference-objective"] = objective
				require.Zero(t, q.pass().status())
				require.Contains(t, string(q.body), want)
				require.Equal(t, name == "none", strings.Contains(string(q.body), `"priority":77`))
				q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(3))})
				q.follow()
				first := membersOf(t, q.body)["priority"]
				require.Zero(t, q.pass().status())
				require.Equal(t, string(first), string(membersOf(t, q.body)["priority"]))
				require.Equal(t, name == "none", strings.Contains(string(q.body), `"priority":77`))
				s.server.passes.Release(s.server.passes.Held("r-"+objective, 1))
			}
			alone := s.newRequest("/v1/chat/completions", "alone", strings.Replace(body, "{", `{"n":2,`, 1))
			require.Zero(t, alone.pass().status())
			require.Equal(t, name == "none", strings.Contains(string(alone.body), `"priority":77`))
			before := membersOf(t, alone.body)["priority"]
			alone.replan()
			alone.follow()
			require.Equal(t, string(before), string(membersOf(t, alone.body)["priority"]))
		})
	}
}

// The model is named again when D is chosen again, so that an adapter is found on both legs; labels too.
func TestAdaptersAndLabelsOnBothLegs(t *testing.T) {
	s := newStand(t, core.Options{})
	policy := splitting()
	policy.LabelHeader = "X-Engine-Labels"
	s.pool("chat", policy, "p1", "d1")
	spec := func(name, loras, labels string) kvstate.EndpointSpec {
		return kvstate.EndpointSpec{Name: name, Addr: addressOf(name), Role: roleOf(name), LoRAs: loras, Labels: labels}
	}
	s.state.SetPool(kvstate.PoolSpec{Name: "chat", Models: []string{"*"}}, []kvstate.EndpointSpec{
		spec("p1", "", "tier=gold"), spec("p2", "sql", ""), spec("d1", "", ""), spec("d2", "", "tier=gold"), spec("d3", "sql", ""), spec("d4", "", ""),
	})
	for range 8 { // chance would find another one
		for _, tt := range []struct{ model, labels, prefill, decode string }{{"sql", "", "p2", "d3"}, {"m", "tier=gold", "p1", "d2"}} {
			q := s.newRequest("/v1/chat/completions", "r1", strings.Replace(chatBody, `"m"`, `"`+tt.model+`"`, 1))
			q.headers["x-engine-labels"] = tt.labels
			require.Zero(t, q.pass().status())
			require.Equal(t, addressOf(tt.prefill), q.headers[names.HeaderEndpoint])
			q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(3))})
			q.follow()
			require.Zero(t, q.pass().status())
			require.Equal(t, addressOf(tt.decode), q.headers[names.HeaderEndpoint])
			s.log(q.entry(200, "via_upstream"))
		}
	}
}
