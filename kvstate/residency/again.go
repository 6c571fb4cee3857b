package residency

import "math"

// Again is what engines computed of conversations that came back: tokens of prompts that earlier turns had, and of
// those what was computed again, by the reason.
type Again struct {
	Had       float64
	Evicted   float64 // no engine had it any more
	Elsewhere float64 // another engine still had it
}

// lately is the time over which what is computed again is averaged, s.
const lately = 600.0

// add adds o, weighted by a factor.
func (a *Again) add(o Again, weight float64) {
	a.Had += weight * o.Had
	a.Evicted += weight * o.Evicted
	a.Elsewhere += weight * o.Elsewhere
}

// Report is what a pool's conversations need, and what it costs that its memory has less. Tokens.
type Report struct {
	Known  int     // conversations
	Live   float64 // of those that are expected back within the horizon, each once
	Needs  float64 // of those that engines should keep, since others that were idle for as long came back, each once
	All    Again   // since the start
	Lately Again   // of the last ten minutes, older ones less
}

// Computes records that an engine is about to compute the prompt of a conversation that has just arrived. It holds so
// many blocks of it, and the engine that holds most of it so many. Of each arrival the first call counts, and returns
// what is computed again.
func (t *Table) Computes(c *Conversation, blocks, most int) (one Again) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.had == 0 || c.length == 0 {
		return Again{}
	}
	size := c.tokens / float64(c.length)
	again := max(c.had-blocks, 0)
	elsewhere := max(min(most, c.had)-blocks, 0)
	one = Again{size * float64(c.had), size * float64(again-elsewhere), size * float64(elsewhere)}
	t.all.add(one, 1)
	t.lately.add(one, 1)
	c.had = 0
	return one
}

// Report returns what the conversations need, and what was computed of them again.
func (t *Table) Report() Report {
	live := t.Live()
	t.mu.Lock()
	defer t.mu.Unlock()
	return Report{Known: t.known, Live: live, Needs: t.needs, All: t.all, Lately: t.lately}
}

// fade lowers the counts of what was computed again, by the seconds that have passed: they are means of the last ten
// minutes.
func (t *Table) fade(seconds float64) {
	old := t.lately
	t.lately = Again{}
	t.lately.add(old, math.Exp(-seconds/lately))
}

// kept is the part of all returns after which what is idle for longer need not be kept.
const kept = 0.98

// keeps returns the idle time within which nearly all conversations that return have returned, s. Engines discard what
// was used last longest ago, whether it comes back or not, so they have to keep all that was idle for less.
func (t *Table) keeps() float64 {
	all := 0.0
	for b := range t.hazard {
		all += t.hazard[b] * (ends(b) - begins(b))
	}
	if all = 1 - math.Exp(-all); all <= 0 {
		return 0
	}
	sum := 0.0
	for b := range t.hazard {
		more := t.hazard[b] * (ends(b) - begins(b))
		if 1-math.Exp(-sum-more) >= kept*all { // by then, in this bin
			left := -math.Log(1-kept*all) - sum
			return begins(b) + (ends(b)-begins(b))*left/more
		}
		sum += more
	}
	return forgotten
}

// ends returns the idle time at which a bin ends.
func ends(bin int) float64 {
	if bin == bins-1 {
		return forgotten
	}
	return begins(bin + 1)
}
