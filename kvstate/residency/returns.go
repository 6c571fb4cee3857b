package residency

import "math"

// What is learned about how conversations return.
const (
	// Horizon is the time within which a return counts, in seconds: an engine of a million tokens could compute all of
	// its memory anew in about that time, so KV is not worth keeping for longer. The replay hardly differs from one
	// minute to a quarter of an hour.
	Horizon = 120.0
	// Bins of idle time: powers of two of a second.
	bins = 12
	// What is assumed before anything is observed: in 15 s of idle time .05 conversations return.
	priorReturns, priorIdle = 0.05, 15.0
	learnedIdle             = 20000.0 // s of idle time in a bin at which old observations are halved
	// Returns before which no conversation counts as expected back: engines change their roles because of those, and a
	// pool of single questions would, for it takes minutes until what is assumed is refuted.
	evidence = 8.0
)

func binOf(idle float64) int { return min(max(math.Ilogb(max(idle, 1)), 0), bins-1) }

// begins returns the idle time at which a bin begins.
func begins(bin int) float64 {
	if bin == 0 {
		return 0
	}
	return math.Exp2(float64(bin))
}

// back returns the chance that a conversation returns within the horizon after it has been idle for so long.
func (t *Table) back(idle float64) float64 {
	b := binOf(idle)
	from, to := begins(b), begins(b+1)
	part := min(max((idle-from)/(to-from), 0), 1)
	return t.edges[b] + part*(t.edges[b+1]-t.edges[b])
}

func (t *Table) learn() {
	for b := range t.hazard {
		t.hazard[b] = (t.returned[b] + priorReturns) / (t.idle[b] + priorIdle)
	}
	for b := range t.edges {
		sum := 0.0
		for at, end := begins(b), begins(b)+Horizon; at < end; {
			in := binOf(at)
			to := end
			if in < bins-1 {
				to = min(begins(in+1), end)
			}
			sum += t.hazard[in] * (to - at)
			at = to
		}
		t.edges[b] = 1 - math.Exp(-sum)
	}
	t.keep = t.keeps()
}

func (c *Conversation) isIdle(now float64) bool { return c.running == 0 && c.since <= now }

// chance returns the chance that a conversation returns within the horizon, or does so again if it is busy.
func (t *Table) chance(c *Conversation, now float64) float64 {
	switch {
	case c.left:
		return 0
	case c.isIdle(now):
		return t.back(now - c.since)
	}
	return t.edges[0]
}

// Sweep counts for how long conversations have been idle, forgets old ones, and makes outdated summaries of engines
// anew. Call it every second.
func (t *Table) Sweep(now float64, engines func(yield func(*Engine) bool)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	passed := now - t.swept
	if passed >= max(sweepEvery, float64(t.known)/sweepRate)-.01 {
		t.count(now, passed)
	}
	for e := range engines {
		if now-e.at > steadyEach*float64(e.places) {
			t.outdate(e)
		}
	}
	t.refresh(now)
}

func (t *Table) count(now, passed float64) {
	t.swept = now
	t.fade(passed)
	live := 0.0
	t.needs = 0
	for c, next := t.oldest, (*Conversation)(nil); c != nil; c = next {
		next = c.newer
		if c.isIdle(now) {
			idle := now - c.since
			if idle >= forgotten {
				t.forget(c)
				continue
			}
			if !c.left {
				t.idle[binOf(idle)] += min(passed, idle)
			}
		}
		own := c.tokens - c.shared()
		live += own * t.chance(c, now)
		if now-c.since < t.keep {
			t.needs += own
		}
	}
	if !t.returns() {
		live = 0
	}
	t.live.Store(math.Float64bits(live))
	for b := range t.idle {
		if t.idle[b] > learnedIdle {
			t.idle[b], t.returned[b] = t.idle[b]/2, t.returned[b]/2
		}
	}
	t.learn()
}

// returns reports whether conversations have been seen to return.
func (t *Table) returns() bool {
	sum := 0.0
	for _, n := range t.returned {
		sum += n
	}
	return sum >= evidence
}

// countReturn learns from a conversation that comes back.
func (t *Table) countReturn(c *Conversation, now float64) {
	switch {
	case c.isIdle(now):
		t.returned[binOf(now-c.since)]++
	case c.running == 0 && c.guessed: // sooner than was thought
		t.returned[0]++
	}
}

// Live returns the tokens of conversations that are expected back within the horizon, each once, wherever they are. It
// is 0 until some have returned.
func (t *Table) Live() float64 { return math.Float64frombits(t.live.Load()) }
