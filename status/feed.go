package status

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/operator"
	"tandem/picker"
	"tandem/picker/roles"
	"tandem/status/words"
	"tandem/status/written"
)

// Status is the state of all replicas that answered the asked one. Times of points are milliseconds.
type Status struct {
	Replica string    `json:"replica"` // the asked one; the next four are about it
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	Now     time.Time `json:"now"`
	Ready   bool      `json:"ready"`
	Sharing Sharing   `json:"sharing"`
	Scope   string    `json:"scope"` // the replicas that this is about, for people
	// the replicas whose parts are in the rest, beginning with the one that was asked
	Replicas     []Replica       `json:"replicas"`
	Silent       []string        `json:"silent,omitempty"` // living replicas that did not answer
	Gone         []operator.Gone `json:"gone,omitempty"`   // replicas that did not end in order, for an hour
	Attention    []Notice        `json:"attention"`
	Reservations int             `json:"reservations"`
	Envoys       []Envoy         `json:"envoys,omitempty"` // those with configuration from replicas
	Pools        []Pool          `json:"pools"`
	Flow         []Flow          `json:"flow"` // of the last minute, among the latest requests
	Failed
	Minute Point     `json:"minute"` // rates and percentiles of the last minute
	Points []Point   `json:"points"` // one a second, oldest first
	Recent []Decided `json:"recent"` // newest first, or those that were searched for
	// if it was asked for: one point for ten seconds, oldest first, and each endpoint's part
	Hour  []Point `json:"hour,omitempty"`
	Hours []Hour  `json:"endpoint_hours,omitempty"`
}

// Failed is what failed in the last minute. The hops are those of the latest requests, for people.
type Failed struct {
	Failures   uint64 `json:"failures"` // requests that failed
	FailedHops string `json:"failed_hops,omitempty"`
	AgainHops  string `json:"planned_again_hops,omitempty"` // after which a request was planned again
	FailedID   string `json:"failed_request,omitempty"`     // the latest one
	// one of FailedHops failed because of an engine, not of Tandem itself
	EngineFailed bool `json:"engine_failed,omitempty"`
	// Requests that failed because a replica refused their ticket; not among the others, since no endpoint failed
	TicketsRefused uint64 `json:"tickets_refused,omitempty"`
	TicketID       string `json:"ticket_refused_request,omitempty"` // the latest one
	NoRouteID      string `json:"no_route_request,omitempty"`       // the latest one for which Envoy had no route
}

// Replica is one of the replicas.
type Replica struct {
	Name         string    `json:"name"`
	Version      string    `json:"version"`
	Started      time.Time `json:"started"`
	Ready        bool      `json:"ready"`
	Redis        bool      `json:"redis"` // it uses Redis
	NoSlot       bool      `json:"no_slot,omitempty"`
	Config       string    `json:"config,omitempty"` // a fingerprint of its pools' configuration
	File         File      `json:"file,omitzero"`
	Reservations int       `json:"reservations"`

	Logs   int       `json:"access_logs"`               // streams of Envoys' access logs that are open
	Logged time.Time `json:"access_logs_last,omitzero"` // when there was last one
	Risk   string    `json:"envoy_risk,omitempty"`      // what an Envoy with one risks, in words
}

// Envoy is an Envoy with configuration over xDS.
type Envoy struct {
	Name    string    `json:"name"`              // its node id
	Build   string    `json:"build,omitempty"`   // its release
	Risk    string    `json:"risk,omitempty"`    // what that release risks, in words
	Version string    `json:"version"`           // of its configuration; "": none yet
	Pending bool      `json:"pending"`           // it has not acknowledged the newest version yet
	Refused string    `json:"refused,omitempty"` // version
	Why     string    `json:"why,omitempty"`     // its error message for that version
	Since   time.Time `json:"since"`             // connected
	Left    time.Time `json:"left,omitzero"`     // when it left; only if no Envoy is connected
}

// Pool is one pool.
type Pool struct {
	Name           string   `json:"name"`
	Models         []string `json:"models"`
	IndexBlocks    int      `json:"index_blocks"`
	TokenBytes     float64  `json:"kv_bytes_per_token,omitempty"` // learned
	Paused         bool     `json:"paused"`
	written.Output          // of the last minute
	PrefillLoad
	Advice    roles.Advice `json:"advice,omitzero"`       // without words of endpoints, which have theirs
	Wanted    string       `json:"wanted,omitempty"`      // of that, for people: how many engines would serve the load
	Short     bool         `json:"wanted_more,omitempty"` // there are fewer
	Endpoints []Endpoint   `json:"endpoints"`
	Memory    Memory       `json:"memory"`
	Pairing
}

// Endpoint is one endpoint: its reservations, and its part in the latest requests.
type Endpoint struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Role    string `json:"role"`
	Group   string `json:"group,omitempty"`
	Up      bool   `json:"up"`
	// up; stale: no recent report of its engine; out: it failed; paused; draining: its pod is terminating
	State  string `json:"state"`
	Paused bool   `json:"paused"` // by an operator or the configuration, whatever its state
	Excluded
	Weight   int   `json:"weight"` // per cent
	Requests int64 `json:"requests"`
	Tokens   int64 `json:"prompt_tokens"`
	Hops     int   `json:"hops"` // of the latest requests
	// cached of prompt tokens in those, 0 to 1; -1: unknown
	HitShare float64 `json:"hit_share"`
	Transfer float64 `json:"transfer_bytes_per_second,omitempty"` // KV that comes to it, learned
	Running  int64   `json:"running"`                             // in the engine's batch; -1: not known
	Waiting  int64   `json:"waiting"`                             // in the engine's queue; -1: not known
	KVUsage  float64 `json:"kv_usage"`                            // of its KV cache, 0 to 1; -1: not known
	// learned times over those of its peers for the same work; 2: twice as slow; 0: not known
	PrefillSlowness float64 `json:"prefill_slowness,omitempty"`
	DecodeSlowness  float64 `json:"decode_slowness,omitempty"`
	written.Output          // of the last minute

	// Failed KV loads: as prefill it is excluded from pairs with these decode endpoints, or from all pairs if NoPairs
	// says so.
	UnloadableBy []string `json:"unloadable_by,omitempty"`
	BeginsAnew   bool     `json:"begins_anew,omitempty"` // it does not continue what other engines have begun
	NoPairs      string   `json:"no_pairs,omitempty"`
}

// Excluded is why an endpoint is not used, or not for all that it may serve.
type Excluded struct {
	Full     string      `json:"full,omitempty"`           // what it answered, and when it gets requests again
	Now      *roles.Word `json:"now,omitempty"`            // with roles auto: the leg that it has now
	Drained  bool        `json:"drained,omitempty"`        // paused by the configuration: its weight is 0
	FailedBy string      `json:"failed_by,omitempty"`      // if it is out: a [kvstate.HealthCause]
	FailedS  float64     `json:"failed_seconds,omitempty"` // how long it has been out
	Unpaired bool        `json:"unpaired,omitempty"`       // prefill, and no endpoint that decodes may pair with it
}

// Flow is the number of the latest requests that went from one endpoint to another. Prefill is "" if decode worked
// alone.
type Flow struct {
	Pool     string `json:"pool"`
	Prefill  string `json:"prefill"`
	Decode   string `json:"decode"`
	Requests int    `json:"requests"`
}

// Point is one second (percentiles: the ten seconds up to it). Rates are per second.
type Point struct {
	N        int64   `json:"n"` // the second, in Unix time
	Split    float64 `json:"split"`
	Alone    float64 `json:"alone"`
	Pass     float64 `json:"pass"`
	OK       float64 `json:"ok"`
	Rejected float64 `json:"rejected"`
	Failed   float64 `json:"failed"`
	Gone     float64 `json:"gone"`
	Refused  float64 `json:"refused"`
	Replans  float64 `json:"replans"`
	Cached   float64 `json:"cached"` // prompt tokens
	Computed float64 `json:"computed"`

	FirstByte50 float64 `json:"first_byte_50"`
	FirstByte99 float64 `json:"first_byte_99"`
	Prefill50   float64 `json:"prefill_50"`
	Prefill99   float64 `json:"prefill_99"`
	Decide50    float64 `json:"decide_50"`
	Decide99    float64 `json:"decide_99"`
	Queued      float64 `json:"queued,omitempty"` // requests that wait in Tandem for endpoints
	EnginePoint
	UsagePoint
}

// UsagePoint is the part of a point that needs the configuration's usage, but for first tokens.
type UsagePoint struct {
	Tokens       float64 `json:"answer_tokens,omitempty"` // of answers
	Judged       float64 `json:"judged,omitempty"`        // requests that count for the pool's promise
	Kept         float64 `json:"kept,omitempty"`          // of those, for which it was kept
	FirstToken50 float64 `json:"first_token_50,omitempty"`
	FirstToken99 float64 `json:"first_token_99,omitempty"`
	PerToken50   float64 `json:"per_token_50,omitempty"`
}

// Source is the input of a feed.
type Source struct {
	Version string
	Name    string // of this replica
	State   *kvstate.State
	Totals  func() telemetry.Totals
	Recent  func(n int) []telemetry.Trace
	Ready   func() bool
	Roles   func() map[string]roles.Advice // what is wanted of pools, by name; nil: not known
	Explain func(pool string, tokens int64) (pass.Explanation, error)
	Queued  func(pool string) latebinding.Status // requests that wait at this replica; nil: not known
	Config  func() File                          // nil: not known
	Sharing func() Sharing
	Envoys  func() []Envoy // nil: none
	// open streams of Envoys' access logs, when there was last one, and what an Envoy with one risks; nil: not known
	Logs     func() (open int, last time.Time, risk string)
	Replicas *operator.Operator // nil: there is no Redis
}

// The history: ten minutes of points, and as many counts as a minute's percentiles need.
const (
	keptPoints   = 600
	keptTotals   = 61
	percentileOf = 10 // seconds
	shownRecent  = 30
	allRecent    = 256 // of each replica
)

// Feed gathers the history.
type Feed struct {
	source  Source
	started time.Time

	asking singleflight.Group // of the other replicas
	ends   ends               // of requests, that were found out

	mu     sync.Mutex
	hour   history
	points []Point            // oldest first, at most keptPoints
	totals []telemetry.Totals // oldest first, at most keptTotals
	n      int64              // of the last point
	output written.Meter
	loads  map[string]PrefillLoad // of pools
	view   kvstate.View           // scratch
}

// NewFeed returns a feed that starts from now, and answers the questions of other replicas. It starts nothing.
func NewFeed(s Source) *Feed {
	f := &Feed{source: s, started: time.Now(), totals: []telemetry.Totals{s.Totals()}}
	f.loads, f.hour = map[string]PrefillLoad{}, newHistory(f.totals[0], f.started)
	if s.Replicas != nil {
		s.Replicas.Answer(aboutStatus, f.answer)
	}
	return f
}

// Run takes a point every second until ctx ends.
func (f *Feed) Run(ctx context.Context) {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			f.sample()
		}
	}
}

func (f *Feed) sample() {
	now := f.source.Totals()
	f.mu.Lock()
	defer f.mu.Unlock()
	second := now.Since(&f.totals[len(f.totals)-1])
	p := rates(&second, 1)
	f.n = max(f.n+1, time.Now().Unix())
	p.N = f.n
	lately := now.Since(&f.totals[max(len(f.totals)-percentileOf, 0)])
	p.percentiles(&lately)
	at := time.Now()
	f.output.Sample(f.source.State, at)
	p.EnginePoint, p.Queued = enginePoint(f.source.State, &f.output, at), f.source.queued()
	f.points = append(dropOver(f.points, keptPoints-1), p)
	f.totals = append(dropOver(f.totals, keptTotals-1), now)
	f.hour.sample(&p, &now, f.source.State, &f.output, at)
	f.samplePrefill(at)
}

// dropOver drops the oldest elements beyond n.
func dropOver[T any](s []T, n int) []T {
	if over := len(s) - n; over > 0 {
		return slices.Delete(s, 0, over)
	}
	return s
}

// rates returns the rates per second of counts over that many seconds.
func rates(t *telemetry.Totals, seconds float64) Point {
	rate := func(n uint64) float64 { return float64(n) / seconds }
	return Point{
		Split: rate(t.Split), Alone: rate(t.Alone), Pass: rate(t.Pass),
		OK: rate(t.OK), Rejected: rate(t.Rejected), Failed: rate(t.Failed), Gone: rate(t.Gone),
		Refused: rate(t.Refused), Replans: rate(t.Replans), Cached: rate(t.CachedTokens),
		Computed:   rate(t.ComputedTokens),
		UsagePoint: UsagePoint{Tokens: rate(t.Usage.Answer), Judged: rate(t.Usage.Judged), Kept: rate(t.Usage.Kept)},
	}
}

func (p *Point) percentiles(t *telemetry.Totals) {
	set := func(at50, at99 *float64, h *telemetry.Durations) {
		*at50, *at99 = milliseconds(h.Quantile(.5)), milliseconds(h.Quantile(.99))
	}
	set(&p.FirstByte50, &p.FirstByte99, &t.FirstByte)
	set(&p.Prefill50, &p.Prefill99, &t.Prefill)
	set(&p.Decide50, &p.Decide99, &t.Decisions)
	set(&p.FirstToken50, &p.FirstToken99, &t.Usage.FirstToken)
	p.PerToken50 = milliseconds(t.Usage.PerToken.Quantile(.5))
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (f *Feed) pool(p *kvstate.Pool) Pool {
	out := Pool{
		Name: p.Spec.Name, Models: f.source.State.ModelNames(p), IndexBlocks: p.IndexStats().Blocks,
		TokenBytes: p.TokenBytes(), Paused: p.Paused(), Output: written.Output{Rate: -1}, Endpoints: []Endpoint{},
		Memory: f.memory(p), Pairing: pairingOf(f.source.State, p),
	}
	if slices.Contains(p.Spec.Models, "*") && len(out.Models) == 0 {
		out.Models = []string{"*"}
	}
	said := f.source.roles(out.Name)
	out.Advice = said
	out.Advice.Words = nil
	slowness := f.source.State.SlownessIn(p)
	for _, e := range p.Endpoints() {
		requests, tokens := e.Load()
		shown := Endpoint{
			Name: e.DisplayName(), Address: e.Addr, Role: e.Role.String(), Group: e.Group,
			Up: !e.Failed(), State: stateOf(e, time.Now()), Paused: e.Paused(), Weight: e.Weight(),
			Requests: requests, Tokens: tokens, HitShare: -1, Transfer: f.source.State.Bandwidth(p, e),
		}
		for _, slow := range slowness {
			if slow.Endpoint == e {
				shown.PrefillSlowness, shown.DecodeSlowness = slow.Prefill, slow.Decode
			}
		}
		if w := e.Word(); w == kvstate.RolePrefill || w == kvstate.RoleDecode {
			shown.Now = &roles.Word{Word: w.String(), Since: said.Words[e.Addr].Since, Why: said.Words[e.Addr].Why}
		}
		shown.Drained, shown.Unpaired, shown.Full = e.Drained, unpaired(e, p.Endpoints()), e.Refusing(time.Now())
		shown.BeginsAnew = !e.Continues(time.Now())
		shown.FailedBy, shown.FailedS = string(f.source.State.Health.FailedBy(e)), f.source.State.Health.FailedFor(e).Seconds()
		if faults := e.LoadFaults(); faults != nil {
			if shown.UnloadableBy = faults.Decodes; faults.Parts != 0 {
				shown.NoPairs = faults.Parts.String()
			}
		}
		shown.Running, shown.Waiting, shown.KVUsage = -1, -1, -1
		if g := e.Signals(); g != nil && shown.Up && shown.State != "stale" { // else it was true once
			shown.Running, shown.Waiting, shown.KVUsage = g.Running, g.Waiting, g.KVUsage
		}
		f.mu.Lock()
		shown.Output = f.output.Of(p.Spec.Name, e.Addr, time.Now())
		f.mu.Unlock()
		out.Add(&shown.Output)
		out.Endpoints = append(out.Endpoints, shown)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	out.PrefillLoad = f.loads[p.Spec.Name]
	return out
}

// unpaired reports whether a prefill endpoint pairs with no other endpoint, whatever state they are in.
func unpaired(e *kvstate.Endpoint, all []*kvstate.Endpoint) bool {
	return e.Role == kvstate.RolePrefill && !slices.ContainsFunc(all, func(o *kvstate.Endpoint) bool {
		return o.Role&kvstate.RoleDecode != 0 && picker.Pairs(o, e)
	})
}

// staleAfter is the age from which an engine's report counts less in decisions.
const staleAfter = 5 * time.Second

// StateOf returns an endpoint's state now, as [Endpoint] has it.
func StateOf(e *kvstate.Endpoint) string { return stateOf(e, time.Now()) }

// stateOf returns an endpoint's state. One that is just back has old signals until they are read again.
func stateOf(e *kvstate.Endpoint, now time.Time) string {
	g := e.Signals()
	switch {
	case e.Failed():
		return "out"
	case e.Draining:
		return "draining"
	case e.Paused():
		return "paused"
	case g != nil && g.Age(now) > staleAfter:
		if now.Sub(kvstate.Back(e)) > staleAfter {
			return "stale"
		}
	}
	return "up"
}

// seenIn adds the endpoint's part in the latest requests.
func (e *Endpoint) seenIn(recent []telemetry.Trace) {
	var prompt, cached int64
	for i := range recent {
		t := &recent[i]
		if t.Prefill == e.Address || t.Decode == e.Address {
			e.Hops++
		}
		if t.Prefill == e.Address && t.CachedTokens >= 0 {
			prompt += t.PromptTokens
			cached += t.CachedTokens
		}
	}
	if prompt > 0 {
		e.HitShare = float64(cached) / float64(prompt)
	}
}

// flow counts pairs among the latest requests.
func flow(recent []telemetry.Trace, since time.Time) []Flow {
	counts := map[Flow]int{}
	for _, t := range recent {
		if t.Started.After(since) && (t.Prefill != "" || t.Route == "decode_alone") && t.Decode != "" {
			counts[Flow{Pool: t.Pool, Prefill: t.Prefill, Decode: t.Decode}]++
		}
	}
	out := make([]Flow, 0, len(counts))
	for f, n := range counts {
		f.Requests = n
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b Flow) int {
		return strings.Compare(a.Pool+" "+a.Prefill+" "+a.Decode, b.Pool+" "+b.Prefill+" "+b.Decode)
	})
	return out
}

// roles returns what is wanted of a pool.
func (s *Source) roles(pool string) roles.Advice {
	if s.Roles == nil {
		return roles.Advice{}
	}
	return s.Roles()[pool]
}

// queued returns how many requests wait in this replica for endpoints.
func (s *Source) queued() (n float64) {
	if s.Queued != nil {
		for _, p := range s.State.Pools() {
			n += float64(s.Queued(p.Spec.Name).Waiting)
		}
	}
	return n
}

// envoys returns the Envoys with configuration from the replica.
func (s *Source) envoys() []Envoy {
	if s.Envoys == nil {
		return nil
	}
	return s.Envoys()
}

// failedHop names a hop that failed, and its endpoint.
func failedHop(h *telemetry.FailedHop) string {
	cause, _ := kvtransfer.CauseOf(h.Hop)
	hop := cause.Words
	if hop = cmp.Or(hop, words.Plain(h.Hop)); h.Endpoint != "" {
		hop += " at " + words.Plain(h.Endpoint)
	}
	return hop
}

// refusal begins the name of what ended a request that Tandem itself refused between its hops; its code follows.
const refusal = "Tandem's own error "

// noRoute is the name of what ended a request for which Envoy has no route.
const noRoute = "Envoy, which has no route for it"

// failedHops counts the hops that failed since then, those that ended a request and those after which it was planned
// again, and names the latest request that failed. recent has the newest first.
func (f *Failed) failedHops(recent []telemetry.Trace, since time.Time) {
	ended, again := map[string]int{}, map[string]int{}
	for i := range recent {
		t := &recent[i]
		if !t.Started.Add(t.Took).After(since) {
			continue
		}
		hops := t.Failed
		if t.Ended == telemetry.EndedTicketRefused {
			f.TicketID = cmp.Or(f.TicketID, t.RequestID)
		} else if t.HasFailed() {
			f.FailedID = cmp.Or(f.FailedID, t.RequestID)
			last := telemetry.FailedHop{Hop: "decode", Endpoint: t.AnsweredBy()}
			if t.Final {
				last.Hop = "prefill"
			}
			n := len(hops)
			switch {
			case n > 0 && n >= t.Plans && t.Ended != telemetry.EndedCut: // none answered the last plan
				hops, last = hops[:n-1], hops[n-1]
			case t.Refused != "": // Tandem did not ask the last plan's endpoint
				last = telemetry.FailedHop{Hop: refusal + t.Refused}
			}
			if t.Refused == names.CodeNoRoute {
				f.NoRouteID, last = cmp.Or(f.NoRouteID, t.RequestID), telemetry.FailedHop{Hop: noRoute}
			}
			f.EngineFailed = f.EngineFailed || !strings.HasPrefix(last.Hop, refusal) && last.Hop != noRoute
			ended[failedHop(&last)]++
		}
		for _, hop := range hops {
			again[failedHop(&hop)]++
		}
	}
	f.FailedHops, f.AgainHops = counted(ended), counted(again)
}

// counted lists names, the most frequent first: "prefill at p1:1 (2), decode at d1:1".
func counted(counts map[string]int) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(counts[b]-counts[a], strings.Compare(a, b))
	})
	for i, name := range names {
		if counts[name] > 1 {
			names[i] = fmt.Sprintf("%s (%d)", name, counts[name])
		}
	}
	return words.List(names)
}

// failuresPage returns the page of the documentation about what failed.
func (f *Failed) failuresPage() string {
	if f.FailedHops != "" && !f.EngineFailed {
		return "operations.md#errors-that-tandem-answers"
	}
	return "operations.md#when-an-engine-fails"
}

// whereFailed ends the sentence that says how many requests failed: where, and how to find them.
func (f *Failed) whereFailed() string {
	s := "."
	if f.FailedHops != "" {
		s = ": " + f.FailedHops + "."
	}
	if f.FailedID != "" {
		s += fmt.Sprintf(" The latest is %.40s: tandem requests --failed lists them.", f.FailedID)
	}
	if f.AgainHops != "" {
		s += " Hops of requests that were planned again: " + f.AgainHops + "."
	}
	return s
}

// ticketsRefused says how many tickets were refused, why, and how to find the requests.
func (f *Failed) ticketsRefused() string {
	were := "tickets were"
	if f.TicketsRefused == 1 {
		were = "ticket was"
	}
	s := fmt.Sprintf("%d %s refused in the last minute, and the requests failed: replicas have different ticket keys, "+
		"or releases. No engine is at fault.", f.TicketsRefused, were)
	if f.TicketID != "" {
		s += fmt.Sprintf(" The latest is %.40s: tandem requests --failed lists them.", f.TicketID)
	}
	return s
}
