package status

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/fleetclock"
	"tandem/kvstate/operator"
	"tandem/status/words"
)

// Notice is something that needs an operator's attention.
type Notice struct {
	Bad  bool   `json:"bad"` // requests fail or may fail; false: they are slower or cost more than they could
	Text string `json:"text"`
	Doc  string `json:"doc"` // page of the documentation, relative to docs/, with an anchor
}

// Sharing is a replica's connection to the other replicas.
type Sharing struct {
	Redis      bool   `json:"redis"`                // the configuration has state.redis
	Up         bool   `json:"up"`                   // it is in use
	Replicas   int    `json:"replicas"`             // living ones, this one included; without Redis the configured ones
	Configured int    `json:"configured,omitempty"` // named in envoy.extProcs; 0: it has a name, maybe of several
	NoAnswer   bool   `json:"no_answer,omitempty"`  // Redis took no question for the other replicas
	KeysDiffer int    `json:"keys_differ,omitempty"`
	NoSlot     bool   `json:"no_slot,omitempty"` // envoy.replicas: redis has as many others as Envoys can have
	Text       string `json:"text,omitempty"`    // the state of Redis in words, as /readyz has it
	Refused    string `json:"refused,omitempty"` // the latest command that Redis refused, with its reason

	ClockAhead time.Duration `json:"clock_ahead_ns,omitempty"` // of Redis's
}

const (
	fullKV = .95 // share of an engine's KV cache in use from which it is full
	// Prefill is idle if it got none of this many latest requests of the last minute. If some earlier ones were split,
	// their usual distance must have passed that many times without one, and so much time.
	idleDecisions, idleGaps, idleFor = 10, 3, 10 * time.Second
	// After this time others scrape the engines that a dead replica scraped: its lease, and seconds to begin.
	takenOver = 15 * time.Second
)

// attention lists the notices of an otherwise complete status, failures first.
func attention(s *Status, recent []telemetry.Trace) []Notice {
	problems, warnings := []Notice{}, []Notice{}
	add := func(bad bool, doc, format string, values ...any) {
		list := &warnings
		if bad {
			list = &problems
		}
		*list = append(*list, Notice{Bad: bad, Text: fmt.Sprintf(format, values...), Doc: doc})
	}
	if s.Sharing.KeysDiffer > 0 {
		add(true, "howto/several-replicas.md#tickets-are-refused",
			"The ticket keys differ from those of %s: requests that pass through both may fail.",
			words.Count(s.Sharing.KeysDiffer, "other replica"))
	}
	if !s.Ready {
		add(true, "operations.md#health",
			"This replica takes no requests: it starts, drains, or has other ticket keys. /readyz says which.")
	}
	if s.Sharing.NoSlot {
		add(true, "howto/xds.md", "Envoys send this replica no requests: they can have 16 replicas "+
			"(envoy.replicas: redis), and there are more.")
	}
	if ahead := s.Sharing.ClockAhead; ahead.Abs() > fleetclock.MaxAhead {
		add(false, "operations.md#redis", "This clock is ahead of Redis's by %s: set it.", ahead.Round(time.Second))
	}
	files(s, add)
	otherReplicas(s, add)
	if s.TicketsRefused > 0 {
		add(true, "howto/several-replicas.md#tickets-are-refused", "%s", s.ticketsRefused())
	}
	if s.NoRouteID != "" {
		add(true, "operations.md#change-without-restart", "An Envoy has no route for what was decided: its bootstrap is "+
			"that of another configuration, or of another release of Tandem. Print it anew (tandem envoy) and restart "+
			"Envoy with it. No engine is at fault. The latest such request is %.40s.", words.Plain(s.NoRouteID))
	}
	if s.Failures > 0 {
		add(true, s.failuresPage(), "%s failed in the last minute%s",
			words.Count(int(s.Failures), "request"), s.whereFailed())
	}
	if risk := s.envoyRisk(); risk != "" {
		add(true, "security.md#not-held-in-this-release", "An Envoy that is connected should be replaced: %s.", risk)
	}
	for _, e := range s.Envoys {
		if e.Risk != "" {
			add(true, "security.md#not-held-in-this-release", "Envoy %s: %s.", e.Name, e.Risk)
		}
		if e.Refused != "" {
			add(true, "howto/xds.md", "Envoy %s refused version %s of its configuration and keeps %s: %s",
				e.Name, e.Refused, cmp.Or(e.Version, "what it had"), e.Why)
		}
	}
	for i := range s.Pools {
		s.poolAttention(&s.Pools[i], recent, add)
	}
	noEnvoy(s, add)
	missing(s, add)
	return append(problems, warnings...)
}

// poolAttention adds the notices about a pool.
func (s *Status) poolAttention(
	p *Pool, recent []telemetry.Trace, add func(bad bool, doc, format string, values ...any),
) {
	paused(p, add)
	for i := range p.Endpoints {
		slow(p, &p.Endpoints[i], add)
	}
	for _, role := range []string{"prefill", "decode", "both"} {
		if names, of := inState(p, role, "out"); len(names) > 0 {
			meanwhile := ""
			if role == "prefill" && len(names) == of {
				meanwhile = " A request may try each of them once, then decode computes the prompt, " +
					"where the pool allows it."
			}
			add(len(names) == of, "operations.md#when-an-engine-fails",
				"%s: %d of %d endpoints with role %s failed: %s. Tandem probes until they answer.%s",
				p.Name, len(names), of, role, words.List(names), meanwhile)
		}
		if names, of := inState(p, role, "stale"); len(names) > 0 && !s.scrapesMove() {
			add(false, "operations.md#when-an-engine-fails",
				"%s: %d of %d endpoints with role %s sent no metrics for %v: %s. Decisions go by bookings alone.",
				p.Name, len(names), of, role, staleAfter, words.List(names))
		}
	}
	for _, e := range p.Endpoints {
		if e.KVUsage >= fullKV && e.Waiting > 0 {
			add(false, "howto/autoscale.md",
				"%s: %s (%s) is full: %.0f %% of its KV cache is in use, %s in its queue.",
				p.Name, e.Name, e.Role, 100*e.KVUsage, words.Count(int(e.Waiting), "request"))
		}
		if e.Full != "" {
			add(false, "operations.md#when-an-engine-is-full", "%s: %s %s.", p.Name, e.Role, e.Full)
		}
		e.UnloadableBy = slices.DeleteFunc(slices.Clone(e.UnloadableBy), p.isOut)
		if e.State != "out" && (e.NoPairs != "" || len(e.UnloadableBy) > 0) {
			add(false, "operations.md#when-decode-cannot-load-kv",
				"%s: decode could not load KV (%s). For a while Tandem avoids %s.", p.Name, e.Name, avoided(&e))
		}
	}
	for _, e := range p.Endpoints {
		if e.BeginsAnew {
			add(false, "continue.md#engines-that-do-not-continue", "%s: %s (%s) does not continue the streams of other "+
				"engines: asked to, it began anew. It serves everything else.", p.Name, e.Name, e.Role)
		}
	}
	diedUnder(p, recent, s.Now, add)
	withoutDecode(p, add)
	pairingAttention(p, add)
	lacksMemory(p, add)
	if p.Short {
		add(false, "howto/autoscale.md", "%s: %s.", p.Name, p.Wanted)
	}
	if why := saturated(p, recent, s.Now); why != "" {
		add(false, "howto/autoscale.md", "%s: prefill is saturated: in the last minute %s.", p.Name, why)
	} else if n, reason := idlePrefill(p, recent, s.Now); n > 0 {
		add(false, "howto/prefill-idles.md",
			"%s: prefill idles: none of the latest %d requests was split%s.", p.Name, n, reason)
	}
}

// diedUnder adds a notice about the latest request under which engines died one after the other.
func diedUnder(
	p *Pool, recent []telemetry.Trace, now time.Time, add func(bad bool, doc, format string, values ...any),
) {
	for i := range recent {
		if t := &recent[i]; t.Pool == p.Name && len(t.DiedUnder) > 0 && now.Sub(t.Started) < time.Hour {
			var names []string
			for _, addr := range t.DiedUnder {
				names = append(names, p.nameOf(addr))
			}
			add(true, "continue.md#a-request-that-kills-engines", "%s: engines died, or failed, one after the other under "+
				"one request: %s. It may be what killed them, and was ended: tandem explain %.40s",
				p.Name, words.List(names), words.Plain(t.RequestID))
			return
		}
	}
}

// nameOf returns the name of an endpoint of the pool; its address, if the pool has none with that.
func (p *Pool) nameOf(addr string) string {
	for i := range p.Endpoints {
		if p.Endpoints[i].Address == addr {
			return p.Endpoints[i].Name
		}
	}
	return addr
}

// noEnvoy adds a notice if no Envoy is connected, and there was one in the last hour. Before the first one nothing is
// wrong, and of Envoys at replicas that were not asked nothing is known. An Envoy with a printed bootstrap opens its
// access logs with its first request, and keeps them open; after a break it opens them with its next request. So an
// Envoy that is served over xDS and left is a failure, and a log that ended may be only a pause.
func noEnvoy(s *Status, add func(bad bool, doc, format string, values ...any)) {
	if len(s.Silent) > 0 || s.Sharing.NoAnswer || s.Sharing.Replicas > len(s.Replicas) {
		return
	}
	var left []string
	for _, e := range s.Envoys {
		if e.Left.IsZero() {
			return
		}
		left = append(left, fmt.Sprintf("%s left %s", e.Name, words.MinutesAgo(s.Now.Sub(e.Left))))
	}
	var last time.Time
	for _, r := range s.Replicas {
		if r.Logs > 0 {
			return
		}
		if r.Logged.After(last) {
			last = r.Logged
		}
	}
	switch {
	case len(left) > 0:
		add(true, "howto/xds.md", "No Envoy is connected: %s.", words.List(left))
	case !last.IsZero() && s.Now.Sub(last) < time.Hour:
		add(false, "operations.md#health",
			"No Envoy is connected: the last one's access log ended %s. If none runs, clients are refused.",
			words.MinutesAgo(s.Now.Sub(last)))
	}
}

// slow adds a notice about an endpoint whose engine is far slower than its peers.
func slow(p *Pool, e *Endpoint, add func(bad bool, doc, format string, values ...any)) {
	for _, work := range []struct {
		what     string
		slowness float64
	}{{"prefills", e.PrefillSlowness}, {"decodes", e.DecodeSlowness}} {
		if work.slowness >= kvstate.SlowFrom {
			add(false, "operations.md#tandemengineslow", "%s: %s %s %.2g times slower than its peers.", p.Name, e.Name,
				work.what, work.slowness)
		}
	}
}

// missing adds notices about replicas that do not run, and about Redis.
func missing(s *Status, add func(bad bool, doc, format string, values ...any)) {
	names := ""
	if len(s.Gone) > 0 {
		var gone []string
		for _, g := range s.Gone {
			gone = append(gone, fmt.Sprintf("%s (last heard %s)", g.Name, words.MinutesAgo(s.Now.Sub(g.Heard))))
		}
		names = fmt.Sprintf("Gone without a shutdown: %s.", words.List(gone))
	}
	sharing := &s.Sharing
	switch here := max(sharing.Replicas, len(s.Replicas)+len(s.Silent)); {
	case s.Sharing.NoAnswer: // it is not known which requests run
	case sharing.Redis && sharing.Up && here < sharing.Configured:
		run := "run"
		if here == 1 {
			run = "runs"
		}
		add(false, "howto/several-replicas.md", "%d of the %d replicas in envoy.extProcs %s. %s", here,
			sharing.Configured, run, cmp.Or(names, "As far as is known the rest was shut down, or not started."))
	case names != "":
		add(false, "howto/several-replicas.md", "%s Each is named for an hour.", names)
	}
	if sharing.Up && sharing.Refused != "" {
		add(true, "security.md#redis", "Redis refuses what this replica needs: %s",
			words.Plain(sharing.Refused))
	}
	switch {
	case !sharing.Redis || sharing.Up:
	case len(s.Replicas) > 1:
		add(false, "howto/redis.md", "Redis answers again, and this replica is about to use it.")
	case sharing.Text != "":
		add(false, "howto/redis.md", "Redis is%s.", strings.TrimPrefix(sharing.Text, "redis:"))
	default:
		add(false, "howto/redis.md", "Redis is not in use: this replica goes by what it knows itself.")
	}
}

// otherReplicas adds notices about replicas that were not asked.
func otherReplicas(s *Status, add func(bad bool, doc, format string, values ...any)) {
	switch {
	case len(s.Silent) == 0:
	case !s.Sharing.Up: // missing reports it
	case s.Sharing.NoAnswer:
		add(false, "howto/redis.md", "Redis does not answer, so other replicas cannot be asked (%s): "+
			"what they know is missing below.", words.List(s.Silent))
	default:
		add(true, "howto/several-replicas.md", "No answer within a second from %s: what it knows is missing below.",
			words.List(s.Silent))
	}
	for _, r := range s.Replicas[min(1, len(s.Replicas)):] {
		if !r.Ready {
			add(true, "operations.md#health",
				"Replica %s takes no requests: it starts, drains, or has other ticket keys. Its /readyz says which.",
				r.Name)
		}
		if !r.Redis {
			add(false, "howto/redis.md", "Replica %s does not use Redis: it goes by what it knows itself.", r.Name)
		}
		if r.NoSlot {
			add(false, "howto/xds.md", "Envoys send replica %s no requests: they can have 16 replicas "+
				"(envoy.replicas: redis), and there are more.", r.Name)
		}
		if mine := s.Replicas[0].Config; r.Config != mine && r.Config != "" && mine != "" {
			add(false, "howto/several-replicas.md", "Replica %s has other settings of pools than this one: "+
				"give all replicas the same configuration.", r.Name)
		}
		if r.Version != s.Version {
			add(false, "howto/upgrade.md", "Replica %s runs Tandem %s, and this one %s.", r.Name, r.Version, s.Version)
		}
	}
}

// paused adds a notice if a pool, or all that could serve one of its legs, gets no new requests because of an order or
// of a weight of 0. Requests can do without prefill, but not without decode.
func paused(p *Pool, add func(bad bool, doc, format string, values ...any)) {
	const doc = "howto/drain.md"
	if p.Paused {
		add(true, doc, "%s: the pool is paused by order: its requests are refused.", p.Name)
		return
	}
	for _, leg := range []struct {
		role, without string
		bad           bool
	}{
		{"decode", "No request can be served.", true},
		{"prefill", "Decode endpoints compute the prompts, where the pool allows it.", false},
	} {
		var by, other []string
		serving, drained := false, 0
		for _, e := range p.Endpoints {
			switch {
			case e.Role != leg.role && e.Role != "both":
			case e.Paused:
				if by = append(by, e.Name); e.Drained {
					drained++
				}
			case e.State == "out" || e.State == "draining":
				other = append(other, e.Name)
			default:
				serving = true
			}
		}
		if serving || len(by) == 0 {
			continue
		}
		how := "by order"
		switch {
		case drained == len(by):
			how = "by the configuration (weight: 0)"
		case drained > 0:
			how = "by order or configuration"
		}
		if len(other) > 0 {
			add(leg.bad, doc, "%s: no %s endpoint is left: paused %s: %s; failed or terminating: %s. %s",
				p.Name, leg.role, how, words.List(by), words.List(other), leg.without)
		} else {
			add(leg.bad, doc, "%s: %s paused %s: %s. %s",
				p.Name, every(len(by), leg.role), how, words.List(by), leg.without)
		}
		if leg.bad {
			return // without decode, prefill does not matter
		}
	}
}

// every names all n endpoints of a role, with a verb.
func every(n int, role string) string {
	switch n {
	case 1:
		return "the only " + role + " endpoint is"
	case 2:
		return "both " + role + " endpoints are"
	}
	return fmt.Sprintf("all %d %s endpoints are", n, role)
}

// scrapesMove reports whether a replica has died that may have scraped engines: another one begins to within seconds.
func (s *Status) scrapesMove() bool {
	return len(s.Silent) > 0 || slices.ContainsFunc(s.Gone, func(g operator.Gone) bool {
		return s.Now.Sub(g.Heard) < takenOver
	})
}

// inState returns the names of a pool's endpoints of a role that are in a state, and the number of endpoints of the
// role.
func inState(p *Pool, role, state string) (names []string, of int) {
	for _, e := range p.Endpoints {
		if e.Role == role {
			of++
			if e.State == state && !e.Paused { // what is paused may be down: it is restarted
				names = append(names, e.Name+why(&e))
			}
		}
	}
	return names, of
}

// isOut reports whether an endpoint has failed.
func (p *Pool) isOut(address string) bool {
	return slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return e.Address == address && e.State == "out" })
}

// why says in brackets why an endpoint is out, and since when; "" if it is not out or nothing is known.
func why(e *Endpoint) string {
	cause := map[string]string{
		string(kvstate.CauseRequest):   "a request failed",
		string(kvstate.CauseTimeLimit): "a request got no answer in time",
		string(kvstate.CauseCheck):     "its health check failed",
		string(kvstate.CauseStill):     "it has requests, and its counters stand still",
		string(kvstate.CauseReplica):   "another replica noticed",
	}[e.FailedBy]
	if cause == "" || e.State != "out" {
		return ""
	}
	return fmt.Sprintf(" (%s %v ago)", cause, time.Duration(e.FailedS*float64(time.Second)).Round(time.Second))
}

// idlePrefill returns the number of the latest requests, and the reason, if none of them used the pool's prefill
// endpoints that are up. It returns 0 if there were few, or if such runs are usual: among many short prompts that stay
// on decode a few are split, and a burst may end with short ones. recent has the newest first; those of the last minute
// count.
func idlePrefill(p *Pool, recent []telemetry.Trace, now time.Time) (requests int, reason string) {
	if !slices.ContainsFunc(p.Endpoints, func(e Endpoint) bool { return e.Role == "prefill" && e.State == "up" }) {
		return 0, ""
	}
	reasons := map[string]int{}
	var order []string    // of reasons, the latest first
	split, before := 0, 0 // from the latest split request on
	for i := range recent {
		t := &recent[i]
		if t.Pool != p.Name || now.Sub(t.Started) > time.Minute {
			continue
		}
		if t.Prefill != "" {
			if now.Sub(t.Started) < idleFor {
				return 0, ""
			}
			split++
		}
		if split > 0 {
			before++
			continue
		}
		requests++
		if t.Reason != "" && reasons[t.Reason] == 0 {
			order = append(order, t.Reason)
		}
		reasons[t.Reason]++
	}
	if requests < idleDecisions || requests*split < idleGaps*before {
		return 0, ""
	}
	if len(order) == 0 {
		return requests, ""
	}
	most := slices.MaxFunc(order, func(a, b string) int { return reasons[a] - reasons[b] })
	return requests, fmt.Sprintf(" (%d: %s)", reasons[most], most)
}

// withoutDecode adds a notice about prefill endpoints that no endpoint that decodes may pair with.
func withoutDecode(p *Pool, add func(bad bool, doc, format string, values ...any)) {
	var names []string
	for _, e := range p.Endpoints {
		if e.Unpaired {
			names = append(names, fmt.Sprintf("%s (%s)", e.Name, groupOf(&e)))
		}
	}
	if len(names) > 0 {
		add(false, "howto/prefill-idles.md#prefill-endpoints-pair-with-nobody",
			"%s: %s never used: %s. No endpoint that decodes has the same group and fitting engines.",
			p.Name, countAre(len(names), "prefill endpoint"), words.List(names))
	}
}

// groupOf names the group of an endpoint, which includes its release.
func groupOf(e *Endpoint) string { return "group " + cmp.Or(e.Group, "none") }

func countAre(n int, what string) string {
	if n == 1 {
		return "1 " + what + " is"
	}
	return words.Count(n, what) + " are"
}

// avoided names the pairs that an endpoint is excluded from.
func avoided(e *Endpoint) string {
	if e.NoPairs != "" {
		return "all pairs with it as " + e.NoPairs
	}
	return "pairs with " + words.List(e.UnloadableBy)
}

// Prefill is saturated if its endpoints were busy for nearly the whole of a minute, or if at least half of the requests
// of a minute waited in Tandem's queue for long. Both look back a minute, so that the notice does not come and go.
const (
	fullPrefill = .9 // share of the time from which prompts wait long, and beyond which prices count no more
	fullFor     = time.Minute
	waitedLong  = time.Second
)

// PrefillLoad is how busy the prefill endpoints of a pool are.
type PrefillLoad struct {
	Busy float64   `json:"prefill_busy"`               // share of the last minute or so, 0 to 1
	Full time.Time `json:"prefill_full_last,omitzero"` // when they were last so busy that prompts wait
}

// samplePrefill notes how busy prefill is. Feed.mu is held.
func (f *Feed) samplePrefill(now time.Time) {
	before := f.loads
	f.loads = make(map[string]PrefillLoad, len(before))
	for _, p := range f.source.State.Pools() {
		f.source.State.View(p, nil, &f.view)
		busy := math.Round(f.view.Load.Prefill*1000) / 1000 // it fades for long
		load := PrefillLoad{Busy: busy, Full: before[p.Spec.Name].Full}
		if load.Busy >= fullPrefill && f.view.Load.Prefills > 0 {
			load.Full = now
		}
		f.loads[p.Spec.Name] = load
	}
}

// envoyRisk is what an Envoy with a printed bootstrap risks; those over xDS are named one by one.
func (s *Status) envoyRisk() string {
	if slices.ContainsFunc(s.Envoys, func(e Envoy) bool { return e.Risk != "" }) {
		return ""
	}
	for i := range s.Replicas {
		if risk := s.Replicas[i].Risk; risk != "" {
			return words.Plain(risk)
		}
	}
	return ""
}

// saturated says why a pool's prefill is saturated; "" if it is not. recent has the newest first.
func saturated(p *Pool, recent []telemetry.Trace, now time.Time) string {
	requests, waited, longest := 0, 0, time.Duration(0)
	for i := range recent {
		t := &recent[i]
		if t.Pool != p.Name || now.Sub(t.Started.Add(t.Waited)) > time.Minute {
			continue
		}
		requests++
		if t.Waited >= waitedLong {
			waited++
		}
		longest = max(longest, t.Waited)
	}
	var why []string
	busy := now.Sub(p.Full) < fullFor
	if busy {
		why = append(why, fmt.Sprintf("its endpoints were at times more than %.0f %% busy", 100*fullPrefill))
	}
	if waited > 0 && (busy || requests >= idleDecisions && 2*waited >= requests) {
		why = append(why, "requests waited in Tandem's queue for up to "+words.Millis(milliseconds(longest)))
	}
	return strings.Join(why, ", and ")
}
