// Package residency knows which conversations the KV memory of engines holds, and how likely each is to come back. It
// needs nothing but prompts: one that extends an earlier prompt continues its conversation. A client's name for it only
// says more about that client's own conversations.
//
// Arrows: it imports nothing of Tandem. What fleets do with it is in package picker (docs/decision.md, Memory).
package residency

import (
	"math"
	"sync"
	"sync/atomic"
)

const (
	forgotten  = 3600.0 // s: what was idle for so long is a new conversation if it returns
	sweepEvery = 1.0    // s ...
	sweepRate  = 8192.0 // ... or longer, so that no more conversations are swept in a second
	// Conversations that are known; beyond that the one that changed longest ago is forgotten. With its places, two on
	// average at most, one takes some 400 bytes: 13 MB for a pool.
	maxConversations = 1 << 15
	maxPlaces        = 2 * maxConversations
	// How long a request that has arrived may wait for an engine, s. After that it counts as one that has left.
	waits = 60.0
	// The time that a request is assumed to spend at an engine until one has ended, s.
	priorTurn = 10.0
)

// Conversation is a conversation: prompts of which each extends the one before.
type Conversation struct {
	tip     uint64 // the last block of its latest prompt ...
	length  int    // ... which has so many; 0: none
	name    uint64 // that its client gave it; 0: none
	home    *Engine
	tokens  float64
	begun   float64    // of those, at the beginning, that some engine held when it began ...
	begins  *beginning // ... nil: none
	had     int        // blocks of the prompt that has arrived which earlier ones had; 0: none, or counted
	running int        // requests that engines have: their end was not reported to this table
	// When its last answer ended. In the future: it is busy until about then, since it waits, or another replica's
	// request runs.
	since   float64
	guessed bool // since was set by a request of another replica
	left    bool // its client has gone on without it: it will not come back
	resumed bool // it has had more than one prompt
	lost    bool // an engine may hold it that has no place of it here, for want of places
	places  *place

	older, newer *Conversation // by their last change
	gone         bool
}

// beginning is what some engine held of conversations when they began. If only one has it, others do not share it: an
// engine held the conversation itself, since it is older than this table.
type beginning struct {
	last   uint64 // block
	of     int    // conversations
	shared bool   // several had it
	first  *Conversation
}

// shared returns the tokens of a conversation that others have, too.
func (c *Conversation) shared() float64 {
	if c.begins == nil || !c.begins.shared {
		return 0
	}
	return c.begun
}

// Table is the conversations of a pool. It is safe for concurrent use.
type Table struct {
	mu             sync.Mutex
	tips, names    map[uint64]*Conversation
	lengths        []int32               // by a prompt's number of blocks: how many conversations have such a one
	shared         map[uint64]bool       // names that several conversations have at once
	beginnings     map[uint64]*beginning // by their last block
	oldest, newest *Conversation
	known, placed  int
	sparePlaces    *place    // linked by newer
	outdated       []*Engine // engines whose summaries are incomplete
	// By bin: conversations that returned, and seconds for which conversations were idle.
	returned, idle [bins]float64
	hazard         [bins]float64     // returns a second
	edges          [bins + 1]float64 // chance of a return, by the idle time at which a bin begins
	keep           float64           // s of idle time after which hardly any conversation returns
	turn           float64           // mean time of a request at an engine, s
	// Of prompts that came here, of which older ones count less: what a block is in tokens.
	blocks, tokens float64
	swept          float64
	live           atomic.Uint64 // bits of a float64
	needs          float64
	all, lately    Again
}

// New returns an empty table.
func New() *Table {
	t := &Table{tips: map[uint64]*Conversation{}, names: map[uint64]*Conversation{}, shared: map[uint64]bool{},
		beginnings: map[uint64]*beginning{}, turn: priorTurn}
	t.learn()
	return t
}

// Prompt is a prompt that has arrived.
type Prompt struct {
	Blocks []uint64 // hashes, each of a block and all before it
	Held   int      // of those, at the beginning, that some engine holds
	Tokens float64
	Name   uint64 // that its client gives its conversation, with its tenant; 0: none
}

// Arrive returns the conversation of a prompt that has just arrived: nil, if it has no blocks.
func (t *Table) Arrive(p *Prompt, now float64) *Conversation {
	if len(p.Blocks) == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blocks += (float64(len(p.Blocks)) - t.blocks) / 256
	t.tokens += (p.Tokens - t.tokens) / 256
	c := t.find(p)
	t.countReturn(c, now)
	c.since, c.guessed = now+waits, false
	c.had = c.length
	t.extend(c, p)
	t.outdate(c.home)
	t.refresh(now)
	return c
}

// Elsewhere records that another replica has sent a prompt to an engine. Its tokens are a guess, which the prompts that
// came here correct. answers: which will answer it. shared returns how many blocks of the prompt engines hold; it is
// asked if the conversation is new.
func (t *Table) Elsewhere(p *Prompt, at *Engine, answers bool, shared func() int, now float64) {
	if len(p.Blocks) == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.blocks > 0 {
		p.Tokens = float64(len(p.Blocks)) * t.tokens / t.blocks
	}
	if t.tipOf(p) == nil {
		p.Held = shared()
	}
	c := t.find(p)
	if c.tip != p.Blocks[len(p.Blocks)-1] { // else it is the other leg of one request
		t.countReturn(c, now)
	}
	t.extend(c, p)
	if c.since, c.guessed = now+waits, false; answers {
		t.outdate(c.home)
		c.since, c.guessed, c.home = now+t.turn, true, at
	}
	t.place(c, at)
	t.refresh(now)
}

// tipOf returns the conversation that a prompt extends; nil: none.
func (t *Table) tipOf(p *Prompt) *Conversation {
	for n := min(len(p.Blocks), len(t.lengths)-1); n > 0; n-- {
		if t.lengths[n] == 0 {
			continue
		}
		if c := t.tips[p.Blocks[n-1]]; c != nil && c.length == n {
			return c
		}
	}
	return nil
}

// find returns the conversation of a prompt, and a new one if it extends none.
func (t *Table) find(p *Prompt) *Conversation {
	if c := t.tipOf(p); c != nil {
		if c.left { // it goes on after all, so its name belongs to several conversations
			c.left = false
			t.ambiguous(c.name)
		}
		return c
	}
	c := t.fresh()
	c.name = p.Name
	if held := min(p.Held, len(p.Blocks)); held > 0 {
		t.begin(c, p.Blocks[held-1], p.Tokens*float64(held)/float64(len(p.Blocks)))
	}
	if p.Name == 0 {
		return c
	}
	before := t.names[p.Name]
	if before == nil && len(t.names) >= maxConversations {
		c.name = 0
		return c
	}
	if before != nil && before.running == 0 && !t.shared[p.Name] { // its history was written anew
		before.left = true
		t.outdate(before.home)
	}
	t.names[p.Name] = c
	return c
}

// begin records that some engine held the beginning of a new conversation.
func (t *Table) begin(c *Conversation, last uint64, tokens float64) {
	b := t.beginnings[last]
	if b == nil {
		b = &beginning{last: last, first: c}
		t.beginnings[last] = b
	}
	c.begins, c.begun = b, tokens
	if b.of++; b.of < 2 || b.shared {
		return
	}
	b.shared = true
	if first := b.first; first != nil {
		for p := first.places; p != nil; p = p.also { // from now on its beginning is counted apart
			if p.tokens >= first.begun {
				p.tokens, p.common = p.tokens-first.begun, last
				p.at.used += p.at.share(last, first.begun) - first.begun
				t.outdate(p.at)
			}
		}
	}
}

// ambiguous records that several conversations have a name at once, so that it identifies none of them.
func (t *Table) ambiguous(name uint64) {
	if len(t.shared) >= maxConversations {
		clear(t.shared)
	}
	t.shared[name] = true
}

// fresh returns a new conversation, in place of the one that changed longest ago if there are too many.
func (t *Table) fresh() *Conversation {
	if t.known >= maxConversations {
		t.forget(t.oldest)
	}
	c := &Conversation{} // not an old one: a request may still refer to it
	c.since = math.Inf(1)
	t.known++
	t.append(c)
	return c
}

// append makes a conversation the one that changed last.
func (t *Table) append(c *Conversation) {
	if c.older = t.newest; c.older != nil {
		c.older.newer = c
	} else {
		t.oldest = c
	}
	c.newer, t.newest = nil, c
}

func (t *Table) unlink(c *Conversation) {
	if c.older != nil {
		c.older.newer = c.newer
	} else {
		t.oldest = c.newer
	}
	if c.newer != nil {
		c.newer.older = c.older
	} else {
		t.newest = c.older
	}
}

// forget forgets a conversation. Requests of it that run do not count any more.
func (t *Table) forget(c *Conversation) {
	t.dropTip(c)
	if t.names[c.name] == c {
		delete(t.names, c.name)
		delete(t.shared, c.name)
	}
	for c.places != nil {
		t.remove(c.places)
	}
	if b := c.begins; b != nil {
		if b.first == c {
			b.first = nil
		}
		if b.of--; b.of == 0 {
			delete(t.beginnings, b.last)
		}
	}
	t.unlink(c)
	t.known--
	c.gone = true
}

// extend records a conversation's latest prompt.
func (t *Table) extend(c *Conversation, p *Prompt) {
	c.resumed = c.resumed || c.length > 0
	t.dropTip(c)
	c.length = len(p.Blocks)
	c.tip, c.tokens = p.Blocks[c.length-1], p.Tokens
	c.begun = min(c.begun, c.tokens)
	if before := t.tips[c.tip]; before != nil { // the same prompt, of a fork
		t.dropTip(before)
	}
	t.tips[c.tip] = c
	for len(t.lengths) <= c.length {
		t.lengths = append(t.lengths, 0)
	}
	t.lengths[c.length]++
	t.unlink(c)
	t.append(c)
}

// dropTip forgets the block by which a conversation's next prompt is recognised.
func (t *Table) dropTip(c *Conversation) {
	if c.length > 0 {
		delete(t.tips, c.tip)
		t.lengths[c.length]--
		c.tip, c.length = 0, 0
	}
}

// Of returns the conversation whose latest prompt ends with a block; nil: none that is known.
func (t *Table) Of(last uint64) *Conversation {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.tips[last]
}

// Sent records that an engine has got a request of a conversation and will answer it, so that it will hold the whole
// conversation. End must follow.
func (t *Table) Sent(c *Conversation, home *Engine, now float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.running++; c.gone {
		return
	}
	t.outdate(c.home)
	c.home, c.guessed = home, false
	t.place(c, home)
	t.refresh(now)
}

// Withdrawn records that a prompt that has arrived will go to no engine: its client has left, or it was refused. Then
// its conversation is idle again.
func (t *Table) Withdrawn(c *Conversation, now float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.gone || c.running > 0 || c.guessed || c.isIdle(now) {
		return
	}
	c.since, c.had = now, 0
	t.outdate(c.home)
	t.refresh(now)
}

// End records the end of a request, with the seconds since it was sent and the tokens of its answer.
func (t *Table) End(c *Conversation, answer, took, now float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turn += (took - t.turn) / 64
	if c.running--; c.gone {
		return
	}
	c.tokens += answer
	if c.running == 0 {
		c.since = now
	}
	if c.home != nil {
		t.place(c, c.home)
	}
	t.refresh(now)
}
