package picker

import (
	"errors"
	"math"
	"slices"

	"tandem/kvstate"
)

// Request is the part of a request that a decision needs.
type Request struct {
	PromptTokens int64 // estimated
	// Bytes is the length of the text from which PromptTokens was estimated; 0: an engine has counted them. The
	// estimate may be old, and the prompt may have View.Load.Densest tokens for each byte.
	Bytes      int64
	Beside     int64    // of PromptTokens, those that are not of the text: of media, or counted
	Blocks     int      // of the prompt, the unit of a candidate's Hit; 0: unknown
	MinAnswer  int64    // least number of tokens of the answer
	MaxAnswer  int64    // largest number; 0: unknown
	MeanAnswer float64  // of its model; 0: unknown, the pool's counts
	Model      string   // as the client named it; "": any
	Split      bool     // may be split over two endpoints
	Labels     []string // that its endpoints must have, as name=value
	Rand       uint64   // breaks ties

	Faults
	Targets
	Waited   float64 // how much of its time, or of the pool's promise, is used already, s
	OnMiss   OnMiss  // what to do if they cannot be met
	Priority int32   // in an admission queue: higher goes first, below 0 may be shed
	Flow     uint64  // in an admission queue: flows get fair shares; 0: no flow
}

// Choice is a decision, as positions in the view.
type Choice struct {
	Prefill int // -1: the decode endpoint computes the prompt itself
	Decode  int

	PromptTokens int64
	MostTokens   int64   // of the prompt, if the estimate is too low
	AnswerTokens int64   // expected
	Uncached     int64   // tokens that the endpoint must compute
	Work         float64 // the time for those, and to load others into GPU memory, as modelled, s
	Price        float64 // of the choice, seconds
	// Other is the price of the cheapest choice of the other kind: decode alone for a pair, a pair for decode alone.
	// +Inf: none was offered; 0: not comparable.
	Other float64

	Selective bool // not every endpoint serves the model
	Named     bool // some endpoint reports its models, so that a later choice needs the model's name

	// Estimated, seconds:
	PrefillTime float64 // until the prefill endpoint has answered, from now
	FirstToken  float64 // until the first token
	TokenTime   float64 // from one to the next

	// the request's targets are not met now, but may be later, and it wants to wait ([MissWait])
	Wait bool
	// Its endpoints have no room for its KV now. It is better to wait, and safe not to.
	NoRoom bool
	// Conversations that are expected back leave it no room where it would be answered: it is better to wait.
	NoMemory bool
	Full     bool // some endpoints were not offered because they have no room
}

// PrefillBooking returns the booking of the prefill endpoint.
func (c *Choice) PrefillBooking() kvstate.Booking {
	return kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: c.Uncached, Uncached: c.Uncached,
		Work: kvstate.Seconds(c.Work)}
}

// DecodeBooking returns the booking of the decode endpoint. v is the view of the choice.
func (c *Choice) DecodeBooking(v *kvstate.View) kvstate.Booking {
	need := c.MostTokens + c.AnswerTokens
	if c.Prefill >= 0 {
		return kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: c.PromptTokens, Need: need,
			From: v.Endpoints[c.Prefill].Endpoint, Kept: c.MostTokens}
	}
	return kvstate.Booking{For: kvstate.RoleBoth, PromptTokens: c.PromptTokens, Uncached: c.Uncached,
		Work: kvstate.Seconds(c.Work), Need: need}
}

// ErrNoEndpoint means that no endpoint can decode the request.
var ErrNoEndpoint = errors.New("picker: no endpoint can decode this request")

// Split says which requests are split among those that may be.
type Split uint8

// The policies of a pool's split.
const (
	SplitAlways Split = iota // all
	SplitAuto                // requests for which a pair is cheaper than decode alone
	SplitNever               // none
)

// Policy is a pool's configuration of placement.
type Policy struct {
	Model            Model
	Split            Split
	MinPrefillTokens int64 // with SplitAuto: if decode has fewer uncached tokens than this, the prompt is not split
	// What the pool promises. Its time between two tokens limits the delay that decode alone may cause. 0: no limit.
	Promise Targets
	// worth of a second of an answer, this request's or another's, relative to a second before the first token: above 0
	AnswerWeight float64
	Late         bool // requests wait in an admission queue, which changes the price of jobs that wait on an endpoint
	PairsOnly    bool // a request that may be split is refused rather than decoded alone
}

// DefaultAnswerWeight is the default of [Policy.AnswerWeight].
const DefaultAnswerWeight = 0.5

// DefaultPromise is the promise of a pool without one of its own: a first token within 5 s, and one every 50 ms.
func DefaultPromise() Targets { return Targets{TTFT: 5, TPOT: 0.050} }

// DefaultPolicy chooses endpoints by price, and splits a request if that is cheaper. Its promise is [DefaultPromise].
func DefaultPolicy() Policy {
	return Policy{Model: DefaultModel(), Split: SplitAuto, Promise: DefaultPromise(), AnswerWeight: DefaultAnswerWeight}
}

// Picker decides. It has the memory of a decision, so that none is allocated: each goroutine needs its own.
type Picker struct {
	Policy
	learned     bool     // some endpoint reports the request's model
	partly      bool     // some endpoint reports models without it
	placed      bool     // some endpoint is configured with it, as an adapter
	excluded    []string // of the attempt
	avoid       avoid    // likewise
	latencyOnly bool     // only the times that this request has targets for count
	full        bool     // some endpoint has no room for the request's KV
	prices      []prices // by position
	total       []float64
	of          []float64 // of one endpoint's partners
	kinds       []kind
	zones       []string
	shared      []sharedPart
	partners    []partners // by kind, then by zone, followed by those of all zones, far and near
	ladder      []attempt
	without     []string // the excluded endpoints and the P of a failed pair
}

// prices are an endpoint's prices for each leg; infinite if it cannot serve it.
type prices struct {
	prefill, decode, alone float64
	near                   float64 // decode with a transfer within its zone
	busy                   bool    // decode alone would delay its answers too much
	faults                 bool    // some of its KV transfers failed
	crowded                bool    // it could answer the request, but has no room for it
	later                  bool    // it has no room now to compute it for another, but may have later
	waits                  bool    // it only prefills, and its memory is full
	kind, zone             int16   // positions in kinds and zones; zone 0 is unknown
}

// sameTime is the difference in price below which choices are equal, in seconds: estimates are no better than that.
const sameTime = 0.001

// pickWith chooses in one attempt.
func (k *Picker) pickWith(r *Request, v *kvstate.View) (Choice, error) {
	c, err := k.pick(r, v)
	if err == nil {
		c, err = k.meetTargets(r, v, c)
		c.NoMemory = k.noMemory(r, v, &c)
	}
	return c, err
}

// pick is Pick by price alone.
func (k *Picker) pick(r *Request, v *kvstate.View) (Choice, error) {
	t := k.weighAll(r, v)
	pair := none()
	if r.Split && k.Split != SplitNever && (k.Split == SplitAlways || !t.whole(v)) {
		pair = k.pair(r, v, &t)
		pair.NoRoom = pair.Prefill >= 0 && k.prices[pair.Prefill].waits
		if pair.Prefill >= 0 && k.Split == SplitAlways {
			return pair, nil
		}
	}
	if t.always {
		t.always = false
		k.reweigh(r, v, &t)
	}
	alone := k.alone(r, v, &t, pair.Prefill < 0)
	switch {
	case pair.Prefill >= 0 && (alone.Decode < 0 || alone.Uncached >= k.MinPrefillTokens && alone.Price >= pair.Price):
		pair.Other = alone.Price
		return pair, nil
	case alone.Decode < 0 && k.full:
		alone = k.crowd(v, &t)
	}
	if alone.Decode < 0 {
		k.weighDesperate(r, v, &t)
		alone = k.alone(r, v, &t, true)
	}
	if alone.Decode < 0 {
		return alone, ErrNoEndpoint
	}
	alone.Other, alone.Full = pair.Price, k.full
	alone.NoRoom = alone.NoRoom || k.full && k.PairsOnly && r.Split && k.later()
	return alone, nil
}

func none() Choice { return Choice{Prefill: -1, Decode: -1, Price: math.Inf(1)} }

// weighAll prices every endpoint for each leg that it can serve.
func (k *Picker) weighAll(r *Request, v *kvstate.View) terms {
	prefills, decodes := k.survey(r, v)
	t := k.terms(r, v, prefills, decodes)
	t.always = r.Split && k.Split == SplitAlways
	k.share(&t, v)
	k.reweigh(r, v, &t)
	return t
}

func (k *Picker) reweigh(r *Request, v *kvstate.View, t *terms) {
	simple := len(k.excluded) == 0 && !(k.learned && k.partly) && !k.placed && len(r.Labels) == 0
	inf := math.Inf(1)
	all := grown(&k.prices, len(v.Endpoints))
	k.full = false
	for i := range v.Endpoints {
		c, p := &v.Endpoints[i], &all[i]
		p.prefill, p.decode, p.alone, p.near = inf, inf, inf, inf
		p.busy, p.crowded, p.later, p.waits = false, false, false, false
		p.faults, p.kind, p.zone = k.faults(c) != nil, 0, 0
		if simple && c.Usable || k.why(r, c) == "" {
			k.weighEach(t, c, p, c.Used())
			if isBoth(c) {
				k.full = t.leaveOut(c, p) || k.full
			}
		}
	}
}

// weighDesperate prices for decode endpoints that have another word; if there are none of those, endpoints that stand
// still, for they may go on; and else the endpoints that failed this request or do not report its model. Those that
// lack what it needs stay excluded.
func (k *Picker) weighDesperate(r *Request, v *kvstate.View, t *terms) {
	const word, stands, failed = 0, 1, 2
	for step := range 3 {
		found := false
		for i := range v.Endpoints {
			c, p := &v.Endpoints[i], &k.prices[i]
			able := c.Usable && (k.why(r, c) == "" || step == failed && k.unmet(r, c) == "")
			if step == stands {
				able = c.Stands && !c.Usable && !slices.Contains(k.excluded, c.Endpoint.Addr) && k.unmet(r, c) == ""
			}
			if able && math.IsInf(p.decode, 1) {
				k.weighEach(t, c, p, c.Endpoint.Role)
				found = found || !math.IsInf(p.decode, 1)
			}
		}
		if found {
			return
		}
	}
}

func (k *Picker) weighEach(t *terms, c *kvstate.Candidate, p *prices, role kvstate.Role) {
	var runs batch
	if c.Endpoint.Role&kvstate.RoleDecode != 0 {
		t.batch(c, &runs)
	} else {
		t.atEndpoint(c, &runs.atEndpoint)
	}
	if role&kvstate.RolePrefill != 0 {
		var price PrefillPrice
		t.prefill(c, &runs, &price)
		p.prefill, p.waits = price.sum(), price.Room > 0
		if p.faults && k.faults(c).Excludes(kvstate.RolePrefill) {
			p.prefill = math.Inf(1) // no decode endpoint can load its KV
		}
	}
	if role&kvstate.RoleDecode != 0 {
		var price DecodePrice
		t.decode(c, &runs, &price)
		p.decode = price.sum()
		p.near = p.decode + t.transfer(c, true)
		if !t.always {
			var price AlonePrice
			p.busy = !t.alone(c, &runs, &price)
			p.alone = price.sum()
		}
	}
}

// alone chooses the cheapest endpoint that does both; busy ones only if noOther.
func (k *Picker) alone(r *Request, v *kvstate.View, t *terms, noOther bool) Choice {
	best := math.Inf(1)
	for i := range k.prices {
		if p := &k.prices[i]; noOther || !p.busy {
			best = min(best, p.alone)
		}
	}
	tie := tie{at: -1, limit: best + sameTime, chance: r.Rand >> 32}
	for i := range k.prices {
		if p := &k.prices[i]; p.alone <= tie.limit && (noOther || !p.busy) {
			tie.offer(i, p.alone, v.Endpoints[i].Hit)
		}
	}
	if tie.at < 0 {
		return none()
	}
	return k.choice(t, v, -1, tie.at, k.prices[tie.at].alone)
}

// partner chooses the decode endpoint for prefill.
func (k *Picker) partner(r *Request, v *kvstate.View, t *terms, prefill int) int {
	total := grown(&k.total, len(v.Endpoints))
	best := k.partnersOf(v, t, prefill, total)
	tie := tie{at: -1, limit: best + sameTime, chance: r.Rand >> 32}
	for d, price := range total {
		if price <= tie.limit {
			tie.offer(d, price, v.Endpoints[d].Hit)
		}
	}
	return tie.at
}

// partnersOf sets, by position, the price of each decode endpoint that may pair with prefill, and returns the
// least.
func (k *Picker) partnersOf(v *kvstate.View, t *terms, prefill int, total []float64) float64 {
	var from kind
	zone := ""
	first, end := 0, len(v.Endpoints)
	if prefill >= 0 {
		from, zone = kindOf(&v.Endpoints[prefill]), v.Endpoints[prefill].Endpoint.Zone
		first, end = v.GroupAt(prefill)
	}
	best := math.Inf(1)
	for d := range total {
		total[d] = math.Inf(1)
	}
	faults := prefill >= 0 && k.prices[prefill].faults
	for d := first; d < end; d++ {
		p := &k.prices[d]
		if p.decode == math.Inf(1) || d == prefill || (faults || p.faults) && !k.loads(v, prefill, d) {
			continue
		}
		total[d] = p.near
		if !v.Uniform || !v.Grouped {
			c := &v.Endpoints[d]
			if prefill >= 0 && !from.pairsWith(c) {
				total[d] = math.Inf(1)
				continue
			}
			if !agree(zone, c.Endpoint.Zone) {
				total[d] = p.decode + t.transfer(c, false)
			}
		}
		best = min(best, total[d])
	}
	return min(best, k.sameNodeEach(v, t, prefill, total))
}

// choice returns the Choice for the chosen endpoints.
func (k *Picker) choice(t *terms, v *kvstate.View, prefill, decode int, price float64) Choice {
	at := decode
	if prefill >= 0 {
		at = prefill
	}
	uncached, cached := t.split(&v.Endpoints[at])
	work := k.Model.prefill(uncached, cached) + t.load(&v.Endpoints[at])
	return Choice{
		Prefill: prefill, Decode: decode, PromptTokens: int64(t.tokens), MostTokens: int64(math.Ceil(t.most)),
		AnswerTokens: int64(t.out), Uncached: int64(math.Ceil(uncached)), Work: work, Price: price,
	}
}

// tie chooses among offers within the limit: the longest cached prefix, and among equals each with the same chance.
type tie struct {
	at     int
	limit  float64
	hit    int
	equals uint64
	chance uint64
}

func (t *tie) offer(at int, price float64, hit int) {
	switch {
	case !(price <= t.limit) || math.IsInf(price, 1): // written so that NaN is excluded
	case t.at < 0 || hit > t.hit:
		t.at, t.hit, t.equals = at, hit, 1
	case hit == t.hit:
		t.equals++
		t.chance = t.chance*6364136223846793005 + 1442695040888963407 // a step of a linear congruential generator
		if (t.chance>>33)%t.equals == 0 {
			t.at = at
		}
	}
}

// grown returns *s with length n; its contents are undefined.
func grown[T any](s *[]T, n int) []T {
	if cap(*s) < n {
		*s = make([]T, n)
	}
	*s = (*s)[:n]
	return *s
}
