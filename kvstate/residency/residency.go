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
	// Horizon is the time within which a return counts, in seconds: an engine of a million tokens could compute all of
	// its memory anew in about that time, so KV is not worth keeping for longer. The replay hardly differs from one
	// minute to a quarter of an hour.
	Horizon = 120.0
	// Bins of idle time: powers of two of a second.
	bins       = 12
	forgotten  = 3600.0 // s: what was idle for so long is a new conversation if it returns
	sweepEvery = 1.0    // s ...
	sweepRate  = 8192.0 // ... or longer, so that no more conversations are swept in a second
	// How long the summary of an engine's memory is used before it is made anew, s: at least, in addition for each
	// conversation that it holds, and, if nothing has changed, for each of them.
	fresh, freshEach, steadyEach = 0.020, 1e-4, 1e-3
	// What is assumed before anything is observed: in 15 s of idle time .05 conversations return.
	priorReturns, priorIdle = 0.05, 15.0
	learnedIdle             = 20000.0 // s of idle time in a bin at which old observations are halved
	// Returns before which no conversation counts as expected back: engines change their roles because of those, and a
	// pool of single questions would, for it takes minutes until what is assumed is refuted.
	evidence = 8.0
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

// place is what an engine's memory holds of a conversation.
type place struct {
	of           *Conversation
	at           *Engine
	tokens       float64 // without what is shared ...
	common       uint64  // ... up to this block; 0: nothing
	older, newer *place  // of the engine, by their last use
	also         *place  // of the conversation
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

// New returns an empty table.
func New() *Table {
	t := &Table{tips: map[uint64]*Conversation{}, names: map[uint64]*Conversation{}, shared: map[uint64]bool{},
		beginnings: map[uint64]*beginning{}, turn: priorTurn}
	t.learn()
	return t
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

// countReturn learns from a conversation that comes back.
func (t *Table) countReturn(c *Conversation, now float64) {
	switch {
	case c.isIdle(now):
		t.returned[binOf(now-c.since)]++
	case c.running == 0 && c.guessed: // sooner than was thought
		t.returned[0]++
	}
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

// Holds records that an engine holds a conversation's latest prompt.
func (t *Table) Holds(last uint64, at *Engine, now float64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.tips[last]; c != nil {
		t.place(c, at)
		t.refresh(now)
	}
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

// Live returns the tokens of conversations that are expected back within the horizon, each once, wherever they are. It
// is 0 until some have returned.
func (t *Table) Live() float64 { return math.Float64frombits(t.live.Load()) }

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
