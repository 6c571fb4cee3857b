package status

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// Status is what there is to see of one replica. Times of points are milliseconds.
type Status struct {
	Version      string            `json:"version"`
	Started      time.Time         `json:"started"`
	Now          time.Time         `json:"now"`
	Ready        bool              `json:"ready"`
	Sharing      Sharing           `json:"sharing"`
	Attention    []Notice          `json:"attention"`
	Reservations int               `json:"reservations"`
	Envoys       []Envoy           `json:"envoys,omitempty"` // those that this replica serves their configuration
	Pools        []Pool            `json:"pools"`
	Flow         []Flow            `json:"flow"`   // of the last minute, among the latest requests
	Minute       Point             `json:"minute"` // rates and percentiles of the last minute
	Points       []Point           `json:"points"` // one a second, oldest first
	Recent       []telemetry.Trace `json:"recent"` // newest first
}

// Envoy is one that gets its configuration over xDS.
type Envoy struct {
	Name    string    `json:"name"`              // its node id
	Build   string    `json:"build,omitempty"`   // its release
	Version string    `json:"version"`           // of the configuration that it has; "": none yet
	Pending bool      `json:"pending"`           // it has not answered to the newest yet
	Refused string    `json:"refused,omitempty"` // version
	Why     string    `json:"why,omitempty"`     // it refused that version, in its own words
	Since   time.Time `json:"since"`             // connected
}

// Pool is one pool.
type Pool struct {
	Name        string     `json:"name"`
	Models      []string   `json:"models"`
	IndexBlocks int        `json:"index_blocks"`
	TokenBytes  float64    `json:"kv_bytes_per_token,omitempty"` // learned
	Endpoints   []Endpoint `json:"endpoints"`
}

// Endpoint is one endpoint: what is booked on it, and what the latest requests say of it.
type Endpoint struct {
	Name    string `json:"name"`
	Address string `json:"address"`
	Role    string `json:"role"`
	Group   string `json:"group,omitempty"`
	Up      bool   `json:"up"`
	// up; stale: its engine has not said anything lately; out: it failed; paused; draining: its pod is on its way
	// out
	State    string `json:"state"`
	Requests int64  `json:"requests"`
	Tokens   int64  `json:"prompt_tokens"`
	Hops     int    `json:"hops"` // of the latest requests
	// cached of prompt tokens in those, 0 to 1; -1: not known
	HitShare float64 `json:"hit_share"`
	Transfer float64 `json:"transfer_bytes_per_second,omitempty"` // KV that comes to it, learned
	Running  int64   `json:"running"`                             // in the engine's batch, as it says; -1: not known
	Waiting  int64   `json:"waiting"`                             // in the engine's queue; -1: not known
	KVUsage  float64 `json:"kv_usage"`                            // of its KV cache, 0 to 1; -1: not known

	faults *kvstate.LoadFaults // failed KV loads that it is avoided for; nil: none
}

// Flow is how many of the latest requests went from one endpoint to another. Prefill is "" where decode worked alone.
type Flow struct {
	Pool     string `json:"pool"`
	Prefill  string `json:"prefill"`
	Decode   string `json:"decode"`
	Requests int    `json:"requests"`
}

// Point is one second (percentiles: the ten seconds up to it). Rates are per second.
type Point struct {
	N        int64   `json:"n"` // counts up by one a second
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
}

// Source is what a feed looks at.
type Source struct {
	Version string
	State   *kvstate.State
	Totals  func() telemetry.Totals
	Recent  func(n int) []telemetry.Trace
	Ready   func() bool
	Sharing func() Sharing
	Envoys  func() []Envoy // nil: none
}

// What is kept: ten minutes of points, and of the counts as much as a minute's percentiles need.
const (
	keptPoints   = 600
	keptTotals   = 61
	percentileOf = 10 // seconds
	shownRecent  = 30
	allRecent    = 256
)

// Feed gathers the history.
type Feed struct {
	source  Source
	started time.Time

	mu     sync.Mutex
	points []Point            // oldest first, at most keptPoints
	totals []telemetry.Totals // oldest first, at most keptTotals
	n      int64
}

// NewFeed returns a feed that starts from now. It starts nothing.
func NewFeed(s Source) *Feed {
	return &Feed{source: s, started: time.Now(), totals: []telemetry.Totals{s.Totals()}}
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
	p := between(&f.totals[len(f.totals)-1], &now, 1)
	f.n++
	p.N = f.n
	p.percentiles(&f.totals[max(len(f.totals)-percentileOf, 0)], &now)
	f.points = append(dropOver(f.points, keptPoints-1), p)
	f.totals = append(dropOver(f.totals, keptTotals-1), now)
}

// dropOver drops the oldest of what is more than n.
func dropOver[T any](s []T, n int) []T {
	if over := len(s) - n; over > 0 {
		return slices.Delete(s, 0, over)
	}
	return s
}

// between are the rates from one count to another, so many seconds later.
func between(a, b *telemetry.Totals, seconds float64) Point {
	rate := func(a, b uint64) float64 { return float64(b-a) / seconds }
	return Point{
		Split: rate(a.Split, b.Split), Alone: rate(a.Alone, b.Alone), Pass: rate(a.Pass, b.Pass),
		OK: rate(a.OK, b.OK), Rejected: rate(a.Rejected, b.Rejected), Failed: rate(a.Failed, b.Failed), Gone: rate(a.Gone, b.Gone),
		Refused: rate(a.Refused, b.Refused), Replans: rate(a.Replans, b.Replans),
		Cached: rate(a.CachedTokens, b.CachedTokens), Computed: rate(a.ComputedTokens, b.ComputedTokens),
	}
}

func (p *Point) percentiles(a, b *telemetry.Totals) {
	set := func(at50, at99 *float64, a, b *telemetry.Durations) {
		h := b.Since(a)
		*at50, *at99 = milliseconds(h.Quantile(.5)), milliseconds(h.Quantile(.99))
	}
	set(&p.FirstByte50, &p.FirstByte99, &a.FirstByte, &b.FirstByte)
	set(&p.Prefill50, &p.Prefill99, &a.Prefill, &b.Prefill)
	set(&p.Decide50, &p.Decide99, &a.Decisions, &b.Decisions)
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Status is what there is to see now, with the points after since.
func (f *Feed) Status(since int64) Status {
	recent := f.source.Recent(allRecent)
	s := Status{
		Version: f.source.Version, Started: f.started, Now: time.Now(), Ready: f.source.Ready(),
		Sharing: f.source.Sharing(), Envoys: f.source.envoys(), Reservations: f.source.State.Reservations(),
		Flow:   flow(recent, time.Now().Add(-time.Minute)),
		Recent: recent[:min(len(recent), shownRecent)], Pools: []Pool{},
	}
	for _, p := range f.source.State.Pools() {
		s.Pools = append(s.Pools, f.pool(p, recent))
	}
	f.addPoints(&s, since)
	s.Attention = attention(&s, recent)
	return s
}

// addPoints adds the points after since and those of the last minute.
func (f *Feed) addPoints(s *Status, since int64) {
	now := f.source.Totals()
	f.mu.Lock()
	defer f.mu.Unlock()
	s.Minute = between(&f.totals[0], &now, max(float64(len(f.totals)-1), 1))
	s.Minute.percentiles(&f.totals[0], &now)
	s.Minute.N = f.n
	from, _ := slices.BinarySearchFunc(f.points, since+1, func(p Point, n int64) int { return int(p.N - n) })
	s.Points = append([]Point{}, f.points[from:]...)
}

func (f *Feed) pool(p *kvstate.Pool, recent []telemetry.Trace) Pool {
	out := Pool{Name: p.Spec.Name, Models: f.source.State.Models(p), IndexBlocks: p.IndexStats().Blocks, TokenBytes: p.TokenBytes(), Endpoints: []Endpoint{}}
	if slices.Contains(p.Spec.Models, "*") && len(out.Models) == 0 {
		out.Models = []string{"*"}
	}
	for _, e := range p.Endpoints() {
		requests, tokens := e.Load()
		shown := Endpoint{
			Name: e.Name, Address: e.Addr, Role: e.Role.String(), Group: e.Group,
			Up: !e.Failed(), State: stateOf(e, time.Now()), Requests: requests, Tokens: tokens, HitShare: -1, Transfer: f.source.State.Bandwidth(p, e),
		}
		if shown.Name == "" {
			shown.Name = e.Addr
		}
		shown.faults = e.LoadFaults()
		shown.Running, shown.Waiting, shown.KVUsage = -1, -1, -1
		if g := e.Signals(); g != nil {
			shown.Running, shown.Waiting, shown.KVUsage = g.Running, g.Waiting, g.KVUsage
		}
		shown.seenIn(recent)
		out.Endpoints = append(out.Endpoints, shown)
	}
	return out
}

// staleAfter is the age from which what an engine says counts less in decisions.
const staleAfter = 5 * time.Second

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
		return "stale"
	}
	return "up"
}

// seenIn takes in what the latest requests say of the endpoint.
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
		if t.Started.After(since) && (t.Prefill != "" || t.Route == "decode_alone") {
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

// envoys are those that get their configuration from the replica.
func (s *Source) envoys() []Envoy {
	if s.Envoys == nil {
		return nil
	}
	return s.Envoys()
}
