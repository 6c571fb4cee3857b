package replay

import (
	"slices"

	"tandem/replay/engine"
)

// ClosedResult is how a policy served sessions.
type ClosedResult struct {
	Policy string `json:"policy"`
	// Of the turns that came in the measured time. A good one has its first token, and a token each, within the
	// targets.
	Turns       int     `json:"turns"`
	Good        float64 `json:"good"` // share
	GoodPerHour float64 `json:"goodPerHour"`
	TTFT        Spread  `json:"ttft"` // of turns without a first token: as if it had come at the end
	TPOT        Spread  `json:"tpot"`
	// the time to the last token over that on an idle engine that has all KV of the session: of all turns, and by
	// session, of those with three turns or more
	Slowdown float64   `json:"slowdown"`
	Sessions Slowdowns `json:"sessions"`
	Misses   Misses    `json:"misses"`
	GaveUp   int       `json:"gaveUp"`  // turns whose users did not wait for the first token
	Without  int       `json:"without"` // turns without a first token at the end
	// Of the turns that ended in the measured time.
	PerHour float64 `json:"perHour"`
	Again   Again   `json:"again"`
	Wasted  float64 `json:"wasted"` // engines' time for what was computed again, as a share of all time
	Loaded  float64 `json:"loaded"` // tokens that came from host memory, as a share of those that sessions had

	Quarters []int `json:"quarters"` // good turns in each quarter of an hour of the measured time
}

// Slowdowns is a distribution over sessions.
type Slowdowns struct {
	P50   float64 `json:"p50"`
	P95   float64 `json:"p95"`
	Worst float64 `json:"worst"`
}

// Misses are the turns that are not good, by the cause without which they might be.
type Misses struct {
	Long      int `json:"long"`      // what is new in the prompt takes an idle engine longer than the target
	Evicted   int `json:"evicted"`   // the first token is late by less than what was evicted took to compute again, ...
	Elsewhere int `json:"elsewhere"` // ... or what another engine had
	Waited    int `json:"waited"`    // it is late, and would be with all that its session had: others came before it
	Written   int `json:"written"`   // the first token is in time, but later ones are too slow
}

// Again is how much was computed again of what sessions had, as shares of its tokens, by the reason.
type Again struct {
	All       float64 `json:"all"`
	Evicted   float64 `json:"evicted"`   // no engine had it any more
	Elsewhere float64 `json:"elsewhere"` // another engine still had it
	Preempted float64 `json:"preempted"` // an answer was interrupted since the engine's memory was full
}

// againTokens are the tokens of a turn that were computed again.
type againTokens struct {
	evicted, elsewhere, preempted int
	seconds                       float64
	started                       bool
}

// sessionCounts are a session's turns in the measured time.
type sessionCounts struct {
	turns       int
	took, ideal float64 // s
}

// counts are what a closed loop measures.
type counts struct {
	of          *player
	r           ClosedResult
	sessions    []*sessionCounts
	ttft, tpot  []float64
	had         int
	again       againTokens
	good        int
	took, ideal float64
	loaded      [2]int // at the beginning and at the end of the measured time
}

// quarter of an hour, s.
const quarter = 900.0

func newCounts(p *player) *counts {
	c := &counts{of: p}
	c.r.Quarters = make([]int, int(p.plan.Measured/quarter)+1)
	for i, at := range []float64{p.plan.Warm, p.plan.Warm + p.plan.Measured} {
		p.After(at, func() {
			for _, e := range p.engines() {
				c.loaded[i] += e.Loaded
			}
		})
	}
	return c
}

// started counts the tokens of a prompt that are computed although an earlier prompt of its session had them.
func (c *counts) started(j *job, cached, computes int) {
	t := j.turn.turn
	a := &j.turn.again
	if a.started {
		a.preempted += computes
		a.seconds += engine.ChunkTime(&c.of.model, computes, cached)
		return
	}
	a.started = true
	again := t.Had - cached
	if again <= 0 {
		return
	}
	most := cached
	for _, e := range c.of.engines() {
		if e != j.at {
			most = max(most, min(e.Held(j.Blocks)*engine.BlockTokens, t.Had))
		}
	}
	a.elsewhere = most - cached
	a.evicted = again - a.elsewhere
	a.seconds += engine.ChunkTime(&c.of.model, again, cached)
}

// in reports whether a moment is in the measured time.
func (c *counts) in(at float64) bool {
	return at >= c.of.plan.Warm && at < c.of.plan.Warm+c.of.plan.Measured
}

// turn counts a turn that has ended, or whose user has given up.
func (c *counts) turn(j *job, ended bool) {
	t := j.turn.turn
	again := &j.turn.again
	if ended && !j.refused() && c.in(c.of.Now) {
		c.r.PerHour += 3600 / c.of.plan.Measured
		c.had += t.Had
		c.again.evicted += again.evicted
		c.again.elsewhere += again.elsewhere
		c.again.preempted += again.preempted
		c.again.seconds += again.seconds
	}
	if !c.in(j.Arrival) {
		return
	}
	c.r.Turns++
	if !ended && j.gone {
		c.r.GaveUp++
	}
	first, each := j.firstAt-j.Arrival, 0.0
	if j.firstAt == 0 {
		first = c.of.Now - j.Arrival
	}
	if ended && j.Output > 1 {
		each = (j.endAt - j.firstAt) / float64(j.Output-1)
		c.tpot = append(c.tpot, each)
	}
	c.ttft = append(c.ttft, first)
	if ended && !j.refused() && first <= c.of.config.TTFT && each <= c.of.config.TPOT {
		c.good++
		c.r.Quarters[int((j.Arrival-c.of.plan.Warm)/quarter)]++
	} else {
		*c.cause(j, first)++
	}
	took, ideal := c.of.Now-j.Arrival, prefillTime(&c.of.model, t.Input-t.Had, t.Had)+idleAnswer(c.of.fleet, t)
	c.took, c.ideal = c.took+took, c.ideal+ideal
	s := &j.turn.of.counts
	s.turns, s.took, s.ideal = s.turns+1, s.took+took, s.ideal+ideal
}

// cause returns the count of what made a turn miss, whose first token came after so many seconds.
func (c *counts) cause(j *job, first float64) *int {
	m, t, again, late := &c.r.Misses, j.turn.turn, &j.turn.again, first-c.of.config.TTFT
	switch {
	case late <= 0 && !j.refused():
		return &m.Written
	case prefillTime(&c.of.model, t.Input-t.Had, t.Had) > c.of.config.TTFT:
		return &m.Long
	case again.evicted+again.elsewhere == 0 || again.seconds < late:
		return &m.Waited
	case again.evicted >= again.elsewhere:
		return &m.Evicted
	}
	return &m.Elsewhere
}

func (c *counts) result(name string) *ClosedResult {
	for _, j := range c.of.jobs {
		if j.endAt == 0 && !j.gone {
			if c.in(j.Arrival) && j.firstAt == 0 {
				c.r.Without++
			}
			c.turn(j, false)
		}
	}
	r := &c.r
	r.Policy = name
	r.Good = float64(c.good) / float64(max(r.Turns, 1))
	r.GoodPerHour = float64(c.good) * 3600 / c.of.plan.Measured
	r.TTFT, r.TPOT = spread(c.ttft), spread(c.tpot)
	r.Slowdown = c.took / max(c.ideal, 1e-9)
	var slow []float64
	for _, s := range c.sessions {
		if s.turns >= 3 {
			slow = append(slow, s.took/s.ideal)
		}
	}
	if slices.Sort(slow); len(slow) > 0 {
		r.Sessions = Slowdowns{quantile(slow, .5), quantile(slow, .95), slow[len(slow)-1]}
	}
	had := float64(max(c.had, 1))
	a := &c.again
	r.Again = Again{float64(a.evicted+a.elsewhere+a.preempted) / had, float64(a.evicted) / had,
		float64(a.elsewhere) / had, float64(a.preempted) / had}
	r.Wasted = a.seconds / float64(c.of.config.endpoints()) / c.of.plan.Measured
	r.Loaded = float64(c.loaded[1]-c.loaded[0]) / had
	return r
}
