// Package residency knows which conversations the KV memory of engines holds, and how likely each is to come back. It
// needs prompts alone: one that extends an earlier prompt continues its conversation.
//
// Arrows: it imports nothing of Tandem. What fleets do with it is in package picker (docs/decision.md, Memory).
package residency

import (
	"math"
	"slices"
)

const (
	// Horizon is the time within which a return counts, in seconds: an engine of a million tokens could compute all of
	// its memory anew in about that time, so it is not worth to keep KV for longer. From one minute to a quarter of an
	// hour the replay hardly differs.
	Horizon = 120.0
	// Bins of idle time: powers of two of a second.
	bins       = 12
	forgotten  = 3600.0 // s: what was idle for so long is a new conversation if it returns
	sweepEvery = 1.0    // s
	fresh      = 0.25   // s for which a summary of an endpoint's memory stays valid
	// What is believed before anything is observed: in 15 s of idle time .05 conversations return.
	priorReturns, priorIdle = 0.05, 15.0
	learnedIdle             = 20000.0 // s of idle time in a bin at which old observations are halved
	// Conversations that are known; beyond that the one that was idle longest is forgotten.
	maxConversations = 1 << 16
)

// Conversation is a conversation: prompts of which each extends the one before.
type Conversation struct {
	tip     uint64 // the last whole block of its latest prompt; 0: none
	home    int    // endpoint that holds all of it; -1: none
	tokens  float64
	shared  float64 // of those, at the beginning, that others have too
	running int     // requests that an endpoint has
	waiting int     // requests that have none yet
	since   float64 // when its last answer ended
}

// held is what an endpoint's memory holds of a conversation, in tokens, without what is shared.
type held struct {
	of     *Conversation
	tokens float64
}

// Table is the conversations of a pool. It is not safe for concurrent use.
type Table struct {
	tips   map[uint64]*Conversation
	all    []*Conversation
	memory []memory // by endpoint
	// By bin: conversations that returned, and seconds for which conversations were idle.
	returned, idle [bins]float64
	hazard         [bins]float64 // returns a second
	swept          float64
	live           float64 // as of then
}

type memory struct {
	capacity float64
	held     []held // the least recently used first
	summary  Memory
	at       float64 // of the summary; negative: it is outdated
}

// New returns a table for endpoints that keep so many tokens of KV each, host memory included.
func New(capacities []float64) *Table {
	t := &Table{tips: map[uint64]*Conversation{}, memory: make([]memory, len(capacities))}
	for i, c := range capacities {
		t.memory[i].capacity, t.memory[i].at = c, -1
	}
	t.learn()
	return t
}

// Memory is what an endpoint's KV memory holds.
type Memory struct {
	Tokens  float64 // that it keeps in all, host memory included
	Free    float64 // of those, without a conversation
	Returns float64 // conversations that are expected to come back here in the next second
	Old     []Part  // what it discards to make room, the first first. Do not modify
}

// Part is a conversation that an engine may discard.
type Part struct {
	Tokens float64 // that discarding it frees, at the conversation's end
	Length float64 // of the conversation, tokens
	Back   float64 // chance that it comes back within the horizon; 0: another endpoint holds all of it
}

func binOf(idle float64) int { return min(max(math.Ilogb(max(idle, 1)), 0), bins-1) }

// back returns the chance that a conversation returns within the horizon after it has been idle for so long.
func (t *Table) back(idle float64) float64 {
	sum := 0.0
	for at, end := idle, idle+Horizon; at < end; {
		b := binOf(at)
		to := end
		if b < bins-1 {
			to = min(math.Exp2(float64(b+1)), end)
		}
		sum += t.hazard[b] * (to - at)
		at = to
	}
	return 1 - math.Exp(-sum)
}

func (t *Table) learn() {
	for b := range t.hazard {
		t.hazard[b] = (t.returned[b] + priorReturns) / (t.idle[b] + priorIdle)
	}
}

func (c *Conversation) isIdle() bool { return c.running == 0 && c.waiting == 0 }

// sweep counts for how long conversations have been idle, and forgets old ones.
func (t *Table) sweep(now float64) {
	passed := now - t.swept
	if passed < sweepEvery {
		return
	}
	t.swept, t.live = now, 0
	soon := t.back(0)
	t.all = slices.DeleteFunc(t.all, func(c *Conversation) bool {
		if !c.isIdle() {
			t.live += (c.tokens - c.shared) * soon
			return false
		}
		idle := now - c.since
		if idle >= forgotten {
			t.forget(c)
			return true
		}
		t.idle[binOf(idle)] += min(passed, idle)
		t.live += (c.tokens - c.shared) * t.back(idle)
		return false
	})
	for b := range t.idle {
		if t.idle[b] > learnedIdle {
			t.idle[b], t.returned[b] = t.idle[b]/2, t.returned[b]/2
		}
	}
	t.learn()
}

func (t *Table) forget(c *Conversation) {
	if t.tips[c.tip] == c {
		delete(t.tips, c.tip)
	}
}

// Arrive returns the conversation of a prompt that has just arrived: of so many tokens, of which others share some at
// the beginning, with these blocks, of which the first whole ones are full.
func (t *Table) Arrive(blocks []uint64, whole int, tokens, shared, now float64) *Conversation {
	t.sweep(now)
	var c *Conversation
	for _, b := range slices.Backward(blocks) {
		if c = t.tips[b]; c != nil {
			break
		}
	}
	switch {
	case c == nil:
		c = &Conversation{home: -1, shared: min(shared, tokens)}
		t.add(c)
	case c.isIdle():
		t.returned[binOf(now-c.since)]++
	}
	t.forget(c)
	t.outdate(c.home)
	c.waiting++
	c.tokens = tokens
	if whole = min(whole, len(blocks)); whole > 0 {
		c.tip = blocks[whole-1] //nolint:gosec // whole is at most their number
		t.tips[c.tip] = c
	} else {
		c.tip = 0
	}
	return c
}

// add adds a conversation, in place of the one that was idle longest if there are too many.
func (t *Table) add(c *Conversation) {
	if len(t.all) < maxConversations {
		t.all = append(t.all, c)
		return
	}
	oldest := 0
	for i, o := range t.all {
		if o.isIdle() && (!t.all[oldest].isIdle() || o.since < t.all[oldest].since) {
			oldest = i
		}
	}
	t.forget(t.all[oldest])
	t.all[oldest] = c
}

// Sent records that a request of a conversation was sent to an endpoint that will answer it, and so hold all of the
// conversation.
func (t *Table) Sent(c *Conversation, home int) {
	c.waiting--
	c.running++
	t.Move(c, home)
}

// Left records that a request of a conversation has ended without an endpoint.
func (t *Table) Left(c *Conversation, now float64) {
	c.waiting--
	c.since = now
}

// Move records that another endpoint answers.
func (t *Table) Move(c *Conversation, home int) {
	t.outdate(c.home)
	c.home = home
	t.Copy(c, home)
}

// Copy records that an endpoint holds a conversation's latest prompt, too.
func (t *Table) Copy(c *Conversation, at int) {
	m := &t.memory[at]
	m.at = -1
	m.held = slices.DeleteFunc(m.held, func(h held) bool { return h.of == c })
	m.held = append(m.held, held{c, max(c.tokens-c.shared, 0)})
	m.discard(at)
}

// discard removes what does not fit into an endpoint's memory, as the engine does: the end of the least recently used,
// and nothing that requests there need.
func (m *memory) discard(at int) {
	over := -m.capacity
	for _, h := range m.held {
		over += h.tokens
	}
	for i := 0; i < len(m.held) && over > 0; i++ {
		if h := &m.held[i]; h.of.running == 0 || h.of.home != at {
			n := min(h.tokens, over)
			h.tokens -= n
			over -= n
		}
	}
	m.held = slices.DeleteFunc(m.held, func(h held) bool { return h.tokens == 0 && h.of.running == 0 })
}

// End records the end of an answer: the conversation has so many tokens now.
func (t *Table) End(c *Conversation, tokens, now float64) {
	c.running--
	c.tokens = max(c.tokens, tokens)
	c.since = now
	t.Copy(c, c.home)
}

func (t *Table) outdate(at int) {
	if at >= 0 {
		t.memory[at].at = -1
	}
}

// Live returns the tokens of conversations that are expected back within the horizon, each once, wherever they are.
func (t *Table) Live() float64 { return t.live }

// Memory returns what an endpoint's memory holds. It is valid until the next call for it.
func (t *Table) Memory(at int, now float64) *Memory {
	m := &t.memory[at]
	if m.at < 0 || now-m.at > fresh {
		m.at = now
		t.sum(at, m, now)
	}
	return &m.summary
}

func (t *Table) sum(at int, m *memory, now float64) {
	s := &m.summary
	*s = Memory{Tokens: m.capacity, Free: m.capacity, Old: s.Old[:0]}
	for _, h := range m.held {
		s.Free -= h.tokens
		c, lives := h.of, h.of.home == at
		if c.waiting > 0 || lives && c.running > 0 {
			continue // it is not idle
		}
		p := Part{Tokens: h.tokens, Length: c.tokens}
		if lives {
			idle := now - c.since
			p.Back = t.back(idle)
			s.Returns += t.hazard[binOf(idle)]
		}
		s.Old = append(s.Old, p)
	}
	s.Free = max(s.Free, 0)
}
