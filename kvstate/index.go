package kvstate

import (
	"math/bits"
	"slices"
	"sort"
	"sync"
)

// prefixIndex says which endpoints hold the block with a given chained hash. It learns from what was routed.
//
// It forgets by generations: blocks are written to the running one; when that is full it becomes the old one, and the old
// one is dropped. What is routed again moves to the running one, so a block is forgotten between one and two generations
// of newer blocks after its last use, which comes close to what an engine's LRU does. A generation is half of what the
// endpoints' caches hold together, or half of the limit: an index that remembers more than the engines promises hits that
// are gone.
//
// A prompt is always written from its first block on, and generations only go as a whole. So in each, and in both
// together, who holds block i of a prompt holds all before it: the holders of block i are a subset of those of block i-1.
// add and hits search instead of walking because of that. (Blocks learned one by one from engines' events would not have
// this property.)
type prefixIndex struct {
	writing     sync.Mutex   // one writer at a time; held before mu
	mu          sync.RWMutex // held by readers, and by the writer for no more than a few blocks at a time
	limit       int          // blocks in both generations, whatever the endpoints
	perEndpoint int          // blocks in both generations for each endpoint that prefills
	half        int          // blocks in one generation
	now, old    map[uint64]holders
	generation  int     // counts up
	slots       []slot  // of all endpoints, those that left included
	present     holders // slots in use
	words       int     // of a holder set
	dropped     int     // slots whose endpoint left and that are not free yet
}

// slot is an endpoint's number in the holder sets.
type slot struct {
	used bool
	free int // the generation from which on no block names the endpoint that left
}

// holders is the set of endpoints that hold a block, by slot: the first 64 inline, the rest behind a pointer.
type holders struct {
	first uint64
	rest  []uint64
}

func newPrefixIndex(limit, perEndpoint int) *prefixIndex {
	return &prefixIndex{limit: limit, perEndpoint: perEndpoint, half: max(limit/2, 1), now: map[uint64]holders{}, words: 1}
}

// resize fits the index to the endpoints there are.
func (x *prefixIndex) resize(endpoints []*Endpoint) {
	caches := 0
	for _, e := range endpoints {
		if e.Role&RolePrefill != 0 {
			caches++
		}
	}
	if caches == 0 { // then all decode alone
		caches = len(endpoints)
	}
	x.writing.Lock()
	defer x.writing.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.half = max(min(x.limit, x.perEndpoint*caches)/2, 1)
}

func (h *holders) word(i int) uint64 {
	if i == 0 {
		return h.first
	}
	if i-1 < len(h.rest) {
		return h.rest[i-1]
	}
	return 0
}

func (h *holders) has(slot int) bool { return h.word(slot/64)>>(slot%64)&1 == 1 }

func (h *holders) set(slot int) {
	if slot < 64 {
		h.first |= 1 << slot
		return
	}
	for len(h.rest) < slot/64 {
		h.rest = append(h.rest, 0)
	}
	h.rest[slot/64-1] |= 1 << (slot % 64)
}

func (h *holders) unset(slot int) {
	if slot < 64 {
		h.first &^= 1 << slot
	} else if slot/64 <= len(h.rest) {
		h.rest[slot/64-1] &^= 1 << (slot % 64)
	}
}

// takeSlot gives a new endpoint its number.
func (x *prefixIndex) takeSlot() int {
	x.writing.Lock()
	defer x.writing.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	for i := range x.slots {
		if s := &x.slots[i]; !s.used && x.generation >= s.free {
			s.used = true
			x.present.set(i)
			return i
		}
	}
	x.slots = append(x.slots, slot{used: true})
	x.present.set(len(x.slots) - 1)
	x.words = (len(x.slots) + 63) / 64
	return len(x.slots) - 1
}

// maxDropped is how many endpoints that left may still be named by blocks, beside as many as there are now.
const maxDropped = 64

// dropSlot forgets an endpoint. That costs nothing: blocks that name it are not asked for it any more, and its number
// stays unused until they are gone. When too many have left, which is when the fleet was rolled over and the caches with
// it, the generation ends early.
func (x *prefixIndex) dropSlot(i int) {
	x.writing.Lock()
	defer x.writing.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.slots[i] = slot{free: x.generation + 2}
	x.present.unset(i)
	x.dropped++
	if x.dropped > maxDropped && 2*x.dropped > len(x.slots) {
		x.turn()
	}
}

// turn begins a new generation. Never in the midst of a prompt: that would break what add and hits rely on.
func (x *prefixIndex) turn() {
	x.old, x.now = x.now, map[uint64]holders{}
	x.generation++
	x.dropped = 0
	for i := range x.slots {
		if s := &x.slots[i]; !s.used && x.generation < s.free {
			x.dropped++
		}
	}
}

// addAtOnce is how many blocks are written while readers wait: some 10 us.
const addAtOnce = 64

// add notes that the endpoint with that slot holds the blocks of a prompt.
func (x *prefixIndex) add(i int, hashes []uint64) {
	x.writing.Lock()
	defer x.writing.Unlock()
	if !x.slots[i].used { // it has left meanwhile
		return
	}
	known := sort.Search(len(hashes), func(b int) bool { h, ok := x.now[hashes[b]]; return !ok || !h.has(i) })
	for news := hashes[known:]; len(news) > 0; {
		n := min(len(news), addAtOnce)
		x.write(i, news[:n])
		news = news[n:]
	}
	if len(x.now) >= x.half {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.turn()
	}
}

func (x *prefixIndex) write(i int, hashes []uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, hash := range hashes {
		h, ok := x.now[hash]
		if !ok {
			h = x.inherit(x.old[hash])
		}
		h.set(i)
		x.now[hash] = h
	}
}

// inherit is the set of the old generation with which a block starts into the running one, without those who left.
func (x *prefixIndex) inherit(h holders) holders {
	h.first &= x.present.first
	h.rest = slices.Clone(h.rest)
	for i := range h.rest {
		h.rest[i] &= x.present.rest[i]
	}
	return h
}

// lookup is what hits needs besides the view: the endpoints still in the race, by slot.
type lookup struct {
	alive  []uint64
	bySlot []int32 // position in the view, -1: none
}

// hits sets every candidate's Hit: how many leading blocks of the prompt it holds. It leaps to the first block that not
// all who are in the race hold, sets the Hit of those who do not, and goes on with the others until nobody is left. So a
// prompt that is new takes one look, and one that all know takes as many as its length has binary digits.
func (x *prefixIndex) hits(hashes []uint64, v *View) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	l := &v.scratch
	l.reset(x.words, len(x.slots), v.Endpoints)
	for depth := 0; ; depth++ {
		if depth = x.leap(hashes, depth, l); depth == len(hashes) {
			l.settle(depth, v)
			return
		}
		if h := x.holders(hashes[depth]); !l.narrow(&h, depth, v) {
			return
		}
	}
}

// leap finds the first block from there on that not all who are alive hold, in steps that grow and a search within the
// last of them. It is len(hashes) if they hold them all.
func (x *prefixIndex) leap(hashes []uint64, from int, l *lookup) int {
	missing := func(i int) bool { h := x.holders(hashes[i]); return !l.heldBy(&h) }
	for step := 1; from < len(hashes); step *= 2 { // they hold all before from
		at := min(from+step, len(hashes)) - 1
		if missing(at) {
			return from + sort.Search(at-from, func(i int) bool { return missing(from + i) })
		}
		from = at + 1
	}
	return from
}

func (x *prefixIndex) holders(hash uint64) holders {
	h, ok := x.now[hash]
	if !ok {
		h = x.old[hash]
	}
	return h
}

func (l *lookup) reset(words, slots int, endpoints []Candidate) {
	if cap(l.alive) < words {
		l.alive = make([]uint64, words)
	}
	if cap(l.bySlot) < slots {
		l.bySlot = make([]int32, slots)
	}
	l.alive, l.bySlot = l.alive[:words], l.bySlot[:slots]
	clear(l.alive)
	for i := range l.bySlot {
		l.bySlot[i] = -1
	}
	for i := range endpoints {
		if slot := endpoints[i].Endpoint.slot; slot < slots {
			l.alive[slot/64] |= 1 << (slot % 64)
			l.bySlot[slot] = int32(i)
		}
	}
}

// heldBy reports whether all who are alive are among the holders.
func (l *lookup) heldBy(h *holders) bool {
	for w, alive := range l.alive {
		if alive&^h.word(w) != 0 {
			return false
		}
	}
	return true
}

// narrow takes those out of the race who do not hold block depth, and reports whether anybody is left.
func (l *lookup) narrow(h *holders, depth int, v *View) bool {
	var left uint64
	for w := range l.alive {
		holding := h.word(w)
		for gone := l.alive[w] &^ holding; gone != 0; gone &= gone - 1 {
			l.setHit(w*64+bits.TrailingZeros64(gone), depth, v)
		}
		l.alive[w] &= holding
		left |= l.alive[w]
	}
	return left != 0
}

func (l *lookup) setHit(slot, depth int, v *View) {
	if slot < len(l.bySlot) && l.bySlot[slot] >= 0 {
		v.Endpoints[l.bySlot[slot]].Hit = depth
	}
}

// settle gives all who are still in the race the same depth.
func (l *lookup) settle(depth int, v *View) {
	for w, alive := range l.alive {
		for ; alive != 0; alive &= alive - 1 {
			l.setHit(w*64+bits.TrailingZeros64(alive), depth, v)
		}
	}
}
