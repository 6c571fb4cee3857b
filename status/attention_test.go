package status

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/operator"
)

// Each thing that needs attention is said once, in a sentence, with a page that helps; a fleet that is well says nothing.
func TestAttention(t *testing.T) {
	now := time.Now()
	well := func() *Status {
		return &Status{Ready: true, Now: now, Sharing: Sharing{Replicas: 1}, Pools: []Pool{{Name: "chat", Endpoints: []Endpoint{
			{Name: "p1", Address: "p1:1", Role: "prefill", State: "up"}, {Name: "p2", Address: "p2:1", Role: "prefill", State: "up"},
			{Name: "d1", Address: "d1:1", Role: "decode", State: "up", KVUsage: .5},
		}}}}
	}
	pause := func(s *Status, endpoints ...int) {
		for _, i := range endpoints {
			s.Pools[0].Endpoints[i].Paused, s.Pools[0].Endpoints[i].State = true, "paused"
		}
	}
	requests := func(n int, t telemetry.Trace) []telemetry.Trace {
		out := make([]telemetry.Trace, n)
		for i := range out {
			out[i] = t
			out[i].Pool = "chat"
			if t.Started.IsZero() {
				out[i].Started = now
			}
		}
		return out
	}
	alone := telemetry.Trace{Route: "decode_alone", Reason: "cheaper"}
	split := telemetry.Trace{Route: "split", Prefill: "p1:1", Started: now.Add(-idleFor)}
	waited := func(d time.Duration) telemetry.Trace {
		t := split
		t.Waited, t.Started = d, now.Add(-59*time.Second-d) // chosen in the last minute
		return t
	}
	for name, tt := range map[string]struct {
		change func(s *Status)
		faults []string
		recent []telemetry.Trace
		want   []Notice
	}{
		"well": {},
		"Redis has stopped": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Up: true, Replicas: 1, Configured: 2, NoAnswer: true}
			s.Silent, s.Gone = []string{"t2:9090"}, []operator.Gone{{Name: "t2:9090", Heard: now}}
		}, want: []Notice{
			{false, "Redis does not answer, so other replicas cannot be asked (t2:9090): what they know is missing below.", "howto/redis.md"}}},
		"an Envoy with a known fault": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Ready: true, Risk: "Envoy 1.37.0 can crash"}}
		}, want: []Notice{
			{true, "An Envoy that is connected should be replaced: Envoy 1.37.0 can crash.", "security.md#not-held-in-this-release"}}},
		"refused tickets": {change: func(s *Status) {
			s.TicketsRefused, s.TicketID = 3, "r-1"
		}, want: []Notice{
			{true, "3 tickets were refused in the last minute, and the requests failed: replicas have different ticket keys, or releases. " +
				"No engine is at fault. The latest is r-1: tandem requests --failed lists them.", "howto/several-replicas.md#tickets-are-refused"}}},
		"an older bootstrap": {change: func(s *Status) { s.NoRouteID = "r-1" }, want: []Notice{
			{true, "An Envoy has no route for what was decided: its bootstrap is that of another configuration, or of another release of " +
				"Tandem. Print it anew (tandem envoy) and restart Envoy with it. No engine is at fault. The latest such request is r-1.",
				"operations.md#change-without-restart"}}},
		"a refused file": {change: func(s *Status) {
			file := File{Refused: "tandem.yaml:\npools[0].kvTransfer: no such dialect\npools: one more.", Since: now.Add(-3 * time.Minute)}
			s.Replicas = []Replica{{Redis: true, Ready: true, File: file}, {Name: "t2", Redis: true, Ready: true, File: File{Restart: []string{"admin.listen", "state", "statex"},
				Envoy: []string{"envoy.extProcs"}, Outdated: now}}}
		}, want: []Notice{
			{true, "This replica refused its configuration file (3 min ago) and goes on with the one before; it would not start with this one: " +
				"tandem.yaml: pools[0].kvTransfer: no such dialect; pools: one more.", "operations.md#change-without-restart"},
			{false, "Replica t2 has not taken up these changes of its configuration file, since they take a restart: admin.listen, state, statex.", "operations.md#change-without-restart"},
			{false, "Envoys with a printed bootstrap lack these changes of the configuration (less than a minute ago): envoy.extProcs. " +
				"Print it again (tandem envoy) and restart them. This is said for an hour.", "operations.md#change-without-restart"}}},
		"Envoys over xDS": {change: func(s *Status) {
			s.Envoys = []Envoy{{Name: "edge-1", Version: "1"}}
			s.Replicas = []Replica{{File: File{Envoy: []string{"envoy.extProcs"}, Outdated: now}}}
		}},
		"an old bootstrap": {change: func(s *Status) {
			s.Replicas = []Replica{{File: File{Waits: true, Refused: "the printed bootstrap lacks https: print it anew", Since: now.Add(-time.Minute)}}}
		}, want: []Notice{
			{true, "This replica waits with a change of its configuration file (1 min ago) and goes on with the one before: " +
				"the printed bootstrap lacks https: print it anew.", "operations.md#change-without-restart"}}},
		"few alone":     {recent: requests(9, alone)},
		"few are split": {recent: slices.Concat(requests(20, alone), requests(1, split), requests(30, alone))},
		"prefill idles": {recent: append(requests(20, alone), requests(3, telemetry.Trace{Route: "pass_through"})...), want: []Notice{
			{false, "chat: prefill idles: none of the latest 23 requests was split (20: cheaper).", "howto/prefill-idles.md"}}},
		"idles for two reasons": {recent: append(requests(6, telemetry.Trace{Route: "decode_alone", Reason: "policy"}), requests(6, alone)...), want: []Notice{
			{false, "chat: prefill idles: none of the latest 12 requests was split (6: policy).", "howto/prefill-idles.md"}}},
		"it idles from now on": {recent: append(requests(10, alone), requests(5, split)...), want: []Notice{
			{false, "chat: prefill idles: none of the latest 10 requests was split (10: cheaper).", "howto/prefill-idles.md"}}},
		"a burst that ends with short ones": {
			recent: append(requests(10, alone), requests(5, telemetry.Trace{Route: "split", Prefill: "p1:1"})...)},
		"it idles no more": {recent: append(requests(1, split), requests(90, alone)...)},
		"some split":       {recent: slices.Concat(requests(11, alone), requests(1, split), requests(6, alone), requests(1, split))},
		"no prefill is up": {
			change: func(s *Status) { s.Pools[0].Endpoints[0].State, s.Pools[0].Endpoints[1].State = "out", "out" }, recent: requests(20, alone), want: []Notice{
				{true, "chat: 2 of 2 endpoints with role prefill failed: p1, p2. Tandem probes until they answer. A request may try each of them once, then decode computes the prompt, where the pool allows it.", "operations.md#when-an-engine-fails"}}},
		"one of two, and it was paused before": {change: func(s *Status) {
			s.Pools[0].Endpoints[0].State, s.Pools[0].Endpoints[0].Paused = "out", true
		}},
		"one of two": {change: func(s *Status) { s.Pools[0].Endpoints[0].State = "out" }, want: []Notice{
			{false, "chat: 1 of 2 endpoints with role prefill failed: p1. Tandem probes until they answer.", "operations.md#when-an-engine-fails"}}},
		"one of two, and why": {change: func(s *Status) {
			e := &s.Pools[0].Endpoints[0]
			e.State, e.FailedBy, e.FailedS = "out", "check", 12.3
		}, want: []Notice{
			{false, "chat: 1 of 2 endpoints with role prefill failed: p1 (its health check failed 12s ago). Tandem probes until they answer.", "operations.md#when-an-engine-fails"}}},
		"stale since the replica that scraped it died": {change: func(s *Status) {
			s.Pools[0].Endpoints[2].State, s.Gone = "stale", []operator.Gone{{Name: "b:9090", Heard: now.Add(-takenOver / 2)}}
		}, want: []Notice{{false, "Gone without a shutdown: b:9090 (last heard less than a minute ago). Each is named for an hour.", "howto/several-replicas.md"}}},
		"stale": {change: func(s *Status) { s.Pools[0].Endpoints[2].State = "stale" }, want: []Notice{
			{false, "chat: 1 of 1 endpoints with role decode sent no metrics for 5s: d1. Decisions go by bookings alone.", "operations.md#when-an-engine-fails"}}},
		"full": {change: func(s *Status) { s.Pools[0].Endpoints[2].KVUsage, s.Pools[0].Endpoints[2].Waiting = .97, 1 }, want: []Notice{
			{false, "chat: d1 (decode) is full: 97 % of its KV cache is in use, 1 request in its queue.", "howto/autoscale.md"}}},
		"prefill is saturated": {change: func(s *Status) { s.Pools[0].Full = now.Add(-59 * time.Second) }, recent: requests(20, alone), want: []Notice{
			{false, "chat: prefill is saturated: in the last minute its endpoints were at times more than 90 % busy.", "howto/autoscale.md"}}},
		"it was saturated": {change: func(s *Status) { s.Pools[0].Full = now.Add(-time.Minute) }},
		"saturated, and requests wait in Tandem": {change: func(s *Status) { s.Pools[0].Full = now },
			recent: append(requests(1, waited(4200*time.Millisecond)), requests(20, split)...), want: []Notice{
				{false, "chat: prefill is saturated: in the last minute its endpoints were at times more than 90 % busy, and requests waited in Tandem's queue for up to 4.2 s.", "howto/autoscale.md"}}},
		"half of the requests wait": {recent: slices.Concat(requests(5, split), requests(5, waited(9*time.Second))), want: []Notice{
			{false, "chat: prefill is saturated: in the last minute requests waited in Tandem's queue for up to 9.0 s.", "howto/autoscale.md"}}},
		"some requests wait":       {recent: slices.Concat(requests(6, split), requests(5, waited(9*time.Second)))},
		"few requests, which wait": {recent: requests(9, waited(9*time.Second))},
		"they wait for a moment":   {recent: requests(30, waited(900*time.Millisecond))},
		"all prefill is paused": {change: func(s *Status) { pause(s, 0, 1) }, want: []Notice{
			{false, "chat: both prefill endpoints are paused by order: p1, p2. " +
				"Decode endpoints compute the prompts, where the pool allows it.", "howto/drain.md"}}},
		"some prefill is paused": {change: func(s *Status) { pause(s, 0) }},
		"prefill is paused or out": {change: func(s *Status) { pause(s, 0); s.Pools[0].Endpoints[1].State = "out" }, want: []Notice{
			{false, "chat: no prefill endpoint is left: paused by order: p1; failed or terminating: p2. " +
				"Decode endpoints compute the prompts, where the pool allows it.", "howto/drain.md"},
			{false, "chat: 1 of 2 endpoints with role prefill failed: p2. Tandem probes until they answer.", "operations.md#when-an-engine-fails"}}},
		"all decode is paused": {change: func(s *Status) { pause(s, 0, 1, 2) }, want: []Notice{
			{true, "chat: the only decode endpoint is paused by order: d1. No request can be served.", "howto/drain.md"}}},
		"paused by a weight of 0": {change: func(s *Status) { pause(s, 2); s.Pools[0].Endpoints[2].Drained = true }, want: []Notice{
			{true, "chat: the only decode endpoint is paused by the configuration (weight: 0): d1. No request can be served.", "howto/drain.md"}}},
		"one with both roles serves": {change: func(s *Status) { s.Pools[0].Endpoints[0].Role = "both"; pause(s, 1, 2) }},
		"the pool is paused": {change: func(s *Status) { s.Pools[0].Paused = true; pause(s, 2) }, want: []Notice{
			{true, "chat: the pool is paused by order: its requests are refused.", "howto/drain.md"}}},
		"an engine is slow": {change: func(s *Status) {
			s.Pools[0].Endpoints[0].PrefillSlowness, s.Pools[0].Endpoints[2].DecodeSlowness = 6.04, kvstate.SlowFrom-.1
		}, want: []Notice{{false, "chat: p1 prefills 6 times slower than its peers.", "operations.md#tandemengineslow"}}},
		"Redis refuses a command": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Up: true, Replicas: 1, Refused: "HVALS: NOPERM this user has no permissions"}
		}, want: []Notice{
			{Bad: true, Text: "Redis refuses what this replica needs: HVALS: NOPERM this user has no permissions", Doc: "security.md#redis"}}},
		"a replica is not here": {change: func(s *Status) { s.Sharing = Sharing{Redis: true, Up: true, Replicas: 1, Configured: 2} }, want: []Notice{
			{false, "1 of the 2 replicas in envoy.extProcs runs. As far as is known the rest was shut down, or not started.", "howto/several-replicas.md"}}},
		"one of three is not here": {change: func(s *Status) { s.Sharing = Sharing{Redis: true, Up: true, Replicas: 2, Configured: 3} }, want: []Notice{
			{false, "2 of the 3 replicas in envoy.extProcs run. As far as is known the rest was shut down, or not started.", "howto/several-replicas.md"}}},
		"one does not answer, and is not known to be gone": {change: func(s *Status) {
			s.Sharing, s.Replicas = Sharing{Redis: true, Up: true, Replicas: 1, Configured: 2}, []Replica{{Name: "a:9090", Redis: true, Ready: true}}
			s.Silent = []string{"b:9090"}
		}, want: []Notice{
			{true, "No answer within a second from b:9090: what it knows is missing below.", "howto/several-replicas.md"}}},
		"one is gone": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Up: true, Replicas: 1, Configured: 2}
			s.Gone = []operator.Gone{{Name: "b:9090", Heard: now.Add(-12 * time.Second)}}
		}, want: []Notice{
			{false, "1 of the 2 replicas in envoy.extProcs runs. Gone without a shutdown: b:9090 (last heard less than a minute ago).",
				"howto/several-replicas.md"}}},
		"one of a Deployment is gone": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Up: true, Replicas: 2}
			s.Gone = []operator.Gone{{Name: "b:9090", Heard: now.Add(-125 * time.Second)}}
		}, want: []Notice{
			{false, "Gone without a shutdown: b:9090 (last heard 2 min ago). Each is named for an hour.", "howto/several-replicas.md"}}},
		"the only Envoy left": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Redis: true, Ready: true}}
			s.Envoys = []Envoy{{Name: "edge-1", Left: now.Add(-time.Minute)}}
		}, want: []Notice{{true, "No Envoy is connected: edge-1 left 1 min ago.", "howto/xds.md"}}},
		"Redis is away": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Replicas: 1, Text: "redis: not in use since 00:00:00 UTC (refused): this replica goes on"}
			s.Silent = []string{"b:9090"} // which was not asked
		}, want: []Notice{{false, "Redis is not in use since 00:00:00 UTC (refused): this replica goes on.", "howto/redis.md"}}},
		"Redis is just back": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Replicas: 2, Text: "redis: not in use"}
			s.Replicas = []Replica{{Name: "a:9090", Ready: true}, {Name: "b:9090", Redis: true, Ready: true}}
		}, want: []Notice{{false, "Redis answers again, and this replica is about to use it.", "howto/redis.md"}}},
		"its log tells that it is there": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Redis: true, Ready: true, Logs: 1, Logged: now}}
			s.Envoys = []Envoy{{Name: "edge-1", Left: now.Add(-time.Minute)}}
		}},
		"an Envoy with a bootstrap left": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Redis: true, Ready: true, Logged: now.Add(-40 * time.Second)}}
		}, want: []Notice{{false, "No Envoy is connected: the last one's access log ended less than a minute ago. If none runs, clients are refused.",
			"operations.md#health"}}},
		"it left long ago": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Redis: true, Ready: true, Logged: now.Add(-2 * time.Hour)}}
		}},
		"it may be at another replica": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Redis: true, Ready: true, Logged: now.Add(-time.Minute)}}
			s.Sharing.Replicas = 2
		}},
		"all are here": {change: func(s *Status) { s.Sharing = Sharing{Redis: true, Up: true, Replicas: 3, Configured: 2} }},
		"Envoys are told of 16 others": {change: func(s *Status) {
			s.Sharing = Sharing{Redis: true, Up: true, Replicas: 17, NoSlot: true}
		}, want: []Notice{
			{true, "Envoys send this replica no requests: they can have 16 replicas (envoy.replicas: redis), and there are more.", "howto/xds.md"}}},
		"and another replica is the seventeenth": {change: func(s *Status) {
			s.Replicas = []Replica{{Name: "a:9090", Redis: true, Ready: true}, {Name: "b:9090", Redis: true, Ready: true, NoSlot: true}}
		}, want: []Notice{
			{false, "Envoys send replica b:9090 no requests: they can have 16 replicas (envoy.replicas: redis), and there are more.", "howto/xds.md"}}},
		"engines died under one request": {recent: []telemetry.Trace{
			{RequestID: "other", Pool: "chat"}, {RequestID: "poison", Pool: "chat", Served: telemetry.Served{DiedUnder: []string{"d1:1", "gone:1"}}, Started: time.Now()},
		}, change: func(s *Status) { s.Now = time.Now() }, want: []Notice{
			{true, "chat: engines died, or failed, one after the other under one request: d1, gone:1. It may be what killed them, and was ended: tandem explain poison", "continue.md#a-request-that-kills-engines"}}},
		"an engine begins anew": {change: func(s *Status) { s.Pools[0].Endpoints[1].BeginsAnew = true }, want: []Notice{
			{false, "chat: p2 (prefill) does not continue the streams of other engines: asked to, it began anew. It serves everything else.", "continue.md#engines-that-do-not-continue"}}},
		"a pair fails": {faults: []string{"d1:1"}, want: []Notice{
			{false, "chat: decode could not load KV (p1). For a while Tandem avoids pairs with d1:1.", "operations.md#when-decode-cannot-load-kv"}}},
		"keys, failures and no Redis; what fails comes first": {
			change: func(s *Status) { s.Sharing, s.Ready, s.Failures = Sharing{Redis: true, KeysDiffer: 2}, false, 1 }, want: []Notice{
				{true, "The ticket keys differ from those of 2 other replicas: requests that pass through both may fail.", "howto/several-replicas.md#tickets-are-refused"},
				{true, "This replica takes no requests: it starts, drains, or has other ticket keys. /readyz says which.", "operations.md#health"},
				{true, "1 request failed in the last minute.", "operations.md#when-an-engine-fails"},
				{false, "Redis is not in use: this replica goes by what it knows itself.", "howto/redis.md"}}},
	} {
		t.Run(name, func(t *testing.T) {
			s := well()
			if tt.change != nil {
				tt.change(s)
			}
			s.Pools[0].Endpoints[0].UnloadableBy = tt.faults
			require.Equal(t, append([]Notice{}, tt.want...), attention(s, tt.recent), "in order")
		})
	}
}
