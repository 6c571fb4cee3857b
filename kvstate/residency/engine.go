package residency

import (
	"math"
	"sync/atomic"
)

// How long the summary of an engine's memory is used before it is made anew, s: at least, in addition for each
// conversation that it holds, and, if nothing has changed, for each of them.
const fresh, freshEach, steadyEach = 0.020, 1e-4, 1e-3

// place is what an engine's memory holds of a conversation.
type place struct {
	of           *Conversation
	at           *Engine
	tokens       float64 // without what is shared ...
	common       uint64  // ... up to this block; 0: nothing
	older, newer *place  // of the engine, by their last use
	also         *place  // of the conversation
}

// Engine is the KV memory of an engine. The zero value is one of unknown size, which has no summary.
type Engine struct {
	capacity       float64
	oldest, newest *place
	used           float64
	places         int
	commons        map[uint64]common // by the last block: what conversations share is in memory once
	summary        atomic.Pointer[Memory]
	at             float64 // of the summary
	outdated, left bool
	asked          *place // of the conversation for which [Table.Limit] was called last, if it has one here
}

// common is a beginning that conversations share.
type common struct {
	tokens float64
	places int // with it
}

// Parts is the number of parts in which [Memory] says what an engine would discard.
const Parts = 12

// Memory is what an engine's KV memory holds. It does not change.
type Memory struct {
	Tokens  float64     // that it keeps in all, on the host if that is more
	Free    float64     // of those, without a conversation
	Live    float64     // of conversations that live here, by the chance that they are back within the horizon
	Returns float64     // conversations that are expected to come back here in the next second
	Old     [Parts]Part // what it discards to make room, in that order
}

// Part is what an engine may discard: conversations, or the end of one.
type Part struct {
	Tokens float64
	Back   float64 // chance that they come back within the horizon; 0: other engines hold them, too, and all of them
	// Position of the tokens in their conversations, on average, of those that are discarded first, and of all.
	End, Middle float64
}

// Limit lowers the blocks of a prompt that engines are thought to hold, of which n have some, to what their memory can
// still have of its conversation: what later requests have not displaced. last are the prompt's last block, and the
// last one that any engine is thought to hold, where the conversation's prompt before ended. It changes nothing before
// a conversation's second prompt, nor where the table lacks places, nor for an engine that is nil or has not reported
// the size of its memory.
func (t *Table) Limit(last [2]uint64, n int, hit func(i int) (*Engine, *int)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.tips[last[0]]
	if c == nil {
		c = t.tips[last[1]]
	} else if !c.resumed {
		return // what it is thought to hold is what others had
	}
	if c == nil || c.lost || c.tokens <= 0 {
		return
	}
	blocksEach := float64(c.length) / c.tokens
	for p := c.places; p != nil; p = p.also {
		p.at.asked = p
	}
	for i := range n {
		e, blocks := hit(i)
		if e == nil || *blocks == 0 || e.capacity <= 0 {
			continue
		}
		kept := 0.0
		if c.begins != nil {
			kept = e.commons[c.begins.last].tokens
		}
		if p := e.asked; p != nil && p.of == c && p.at == e {
			kept += p.tokens
		}
		*blocks = min(*blocks, int(math.Ceil(kept*blocksEach)))
	}
}

// Holds records that an engine holds a conversation's latest prompt.
func (t *Table) Holds(last uint64, at *Engine, now float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.tips[last]; c != nil {
		t.place(c, at)
		t.refresh(now)
	}
}

// place records that an engine holds all of a conversation, and has used it last of all.
func (t *Table) place(c *Conversation, at *Engine) {
	t.outdate(at)
	for p := c.places; p != nil; p = p.also {
		if p.at == at {
			t.remove(p)
			break
		}
	}
	if at.left {
		return
	}
	if t.placed >= maxPlaces {
		if at.oldest == nil {
			c.lost = true
			return
		}
		at.oldest.of.lost = true
		t.remove(at.oldest)
	}
	p := t.sparePlaces
	if p != nil {
		t.sparePlaces = p.newer
	} else {
		p = &place{}
	}
	*p = place{of: c, at: at, tokens: max(c.tokens-c.shared(), 0), also: c.places, older: at.newest}
	if c.shared() > 0 {
		p.common = c.begins.last
	}
	c.places = p
	if p.older != nil {
		p.older.newer = p
	} else {
		at.oldest = p
	}
	at.newest = p
	at.used += p.tokens + at.share(p.common, c.begun)
	at.places++
	t.placed++
	t.discard(at)
}

// share counts a place with a shared beginning of so many tokens, up to a block, and returns the tokens that it adds.
func (e *Engine) share(last uint64, tokens float64) float64 {
	if last == 0 {
		return 0
	}
	if e.commons == nil {
		e.commons = map[uint64]common{}
	}
	in := e.commons[last]
	more := 0.0
	if in.places++; in.places == 1 {
		in.tokens, more = tokens, tokens
	}
	e.commons[last] = in
	return more
}

// unshare reverses share.
func (e *Engine) unshare(last uint64) float64 {
	in := e.commons[last]
	if in.places--; in.places > 0 {
		e.commons[last] = in
		return 0
	}
	delete(e.commons, last)
	return in.tokens
}

// remove removes what an engine holds of a conversation.
func (t *Table) remove(p *place) {
	at := p.at
	for of := &p.of.places; *of != nil; of = &(*of).also {
		if *of == p {
			*of = p.also
			break
		}
	}
	if p.older != nil {
		p.older.newer = p.newer
	} else {
		at.oldest = p.newer
	}
	if p.newer != nil {
		p.newer.older = p.older
	} else {
		at.newest = p.older
	}
	if at.used -= p.tokens + at.unshare(p.common); at.oldest == nil {
		at.used = 0
	}
	at.places--
	t.placed--
	*p = place{newer: t.sparePlaces}
	t.sparePlaces = p
	t.outdate(at)
}

// discard removes what does not fit into an engine's memory, as the engine does: the end of the least recently used
// conversations, but nothing that requests there need. Until an engine has reported the size of its memory, nothing is
// known to be gone.
func (t *Table) discard(at *Engine) {
	if at.capacity <= 0 {
		return
	}
	for p, next := at.oldest, (*place)(nil); p != nil && at.used > at.capacity; p = next {
		next = p.newer
		if p.of.home == at && p.of.running > 0 {
			continue
		}
		n := min(p.tokens, at.used-at.capacity)
		p.tokens -= n
		if at.used -= n; p.tokens <= 0 {
			t.remove(p)
		}
	}
}

// Resize sets how many tokens of KV an engine keeps, in its memory or, if that is more, on the host.
func (t *Table) Resize(e *Engine, tokens, now float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e.capacity = tokens
	t.discard(e)
	t.outdate(e)
	t.refresh(now)
}

// Empty records that an engine holds nothing any more. left: it will not come back.
func (t *Table) Empty(e *Engine, left bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e.left = left
	for e.oldest != nil {
		t.remove(e.oldest)
	}
	e.summary.Store(nil)
}

// Memory returns what an engine's memory holds; nil: its size is unknown.
func (e *Engine) Memory() *Memory { return e.summary.Load() }

// outdate notes that the summary of an engine's memory is no longer true.
func (t *Table) outdate(e *Engine) {
	if e != nil && !e.outdated {
		e.outdated = true
		t.outdated = append(t.outdated, e)
	}
}

// refresh makes outdated summaries of engines anew, each not too often.
func (t *Table) refresh(now float64) {
	kept := t.outdated[:0]
	for _, e := range t.outdated {
		if now-e.at < fresh+freshEach*float64(e.places) && e.summary.Load() != nil {
			kept = append(kept, e)
			continue
		}
		e.outdated = false
		t.sum(e, now)
	}
	clear(t.outdated[len(kept):])
	t.outdated = kept
}

// sum makes the summary of an engine's memory anew.
func (t *Table) sum(e *Engine, now float64) {
	if e.capacity <= 0 || e.left {
		e.summary.Store(nil)
		return
	}
	e.at = now
	s := &Memory{Tokens: e.capacity, Free: max(e.capacity-e.used, 0)}
	at, step := 0, e.capacity/(2*Parts)
	for p := e.oldest; p != nil; p = p.newer {
		c := p.of
		back, lives := t.chance(c, now), c.home == e
		if lives {
			s.Live += p.tokens * back
		}
		if waits := c.running == 0 && !c.guessed; !c.isIdle(now) && (lives || waits) {
			continue
		}
		if lives {
			s.Returns += t.hazard[binOf(now-c.since)]
		} else {
			back = 0
		}
		s.Old[at].add(p.tokens, back, c.tokens)
		if s.Old[at].Tokens >= step && at < Parts-1 {
			at++
		}
	}
	e.summary.Store(s)
}

// add adds the last tokens of a conversation of some length.
func (p *Part) add(tokens, back, length float64) {
	if tokens <= 0 {
		return
	}
	weight := tokens / (p.Tokens + tokens)
	p.Tokens += tokens
	p.Back += (back - p.Back) * weight
	p.End += (length - p.End) * weight
	p.Middle += (length - tokens/2 - p.Middle) * weight
}
