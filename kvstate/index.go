package kvstate

import (
	"math/bits"
	"sync"
)

// prefixIndex says which endpoints hold the block with a given chained hash. It learns from what was routed.
//
// It forgets by generations: blocks are written to the running one; when that has half of the limit it becomes the old
// one, and the old one is dropped. What is asked for again moves to the running one, so a block is forgotten between a
// half and a whole limit of newer blocks after its last use, which comes close to what an engine's LRU does.
type prefixIndex struct {
	mu       sync.RWMutex
	half     int
	now, old map[uint64]holders
	slots    []bool // in use
	words    int    // of a holder set
}

// holders is the set of endpoints that hold a block, by slot: the first 64 inline, the rest behind a pointer.
type holders struct {
	first uint64
	rest  []uint64
}

func newPrefixIndex(limit int) *prefixIndex {
	return &prefixIndex{half: max(limit/2, 1), now: map[uint64]holders{}, words: 1}
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

// takeSlot gives a new endpoint its number.
func (x *prefixIndex) takeSlot() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	for i, used := range x.slots {
		if !used {
			x.slots[i] = true
			return i
		}
	}
	x.slots = append(x.slots, true)
	x.words = (len(x.slots) + 63) / 64
	return len(x.slots) - 1
}

// dropSlot forgets an endpoint. It walks the whole index, so that the number can be given away again.
func (x *prefixIndex) dropSlot(slot int) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, generation := range []map[uint64]holders{x.now, x.old} {
		for hash, h := range generation {
			if h.word(slot/64)>>(slot%64)&1 == 0 {
				continue
			}
			if slot < 64 {
				h.first &^= 1 << slot
				generation[hash] = h
			} else {
				h.rest[slot/64-1] &^= 1 << (slot % 64)
			}
		}
	}
	x.slots[slot] = false
}

// add notes that the endpoint with that slot holds the blocks.
func (x *prefixIndex) add(slot int, hashes []uint64) {
	if len(hashes) == 0 {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, hash := range hashes {
		h, ok := x.now[hash]
		if !ok {
			h = x.old[hash]
		}
		if ok && h.word(slot/64)>>(slot%64)&1 == 1 {
			continue
		}
		h.set(slot)
		x.now[hash] = h
	}
	if len(x.now) >= x.half {
		x.old, x.now = x.now, make(map[uint64]holders, x.half/4)
	}
}

// lookup is what hits needs besides the view: the endpoints still in the race, by slot.
type lookup struct {
	alive  []uint64
	bySlot []int32 // position in the view, -1: none
}

// hits sets every candidate's Hit in one walk along the prompt, which ends where nobody holds the next block.
func (x *prefixIndex) hits(hashes []uint64, v *View) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	l := &v.scratch
	l.reset(x.words, len(x.slots), v.Endpoints)
	for depth, hash := range hashes {
		h, ok := x.now[hash]
		if !ok {
			if h, ok = x.old[hash]; !ok {
				l.settle(depth, v)
				return
			}
		}
		var left uint64
		for w := range l.alive {
			holding := h.word(w)
			for gone := l.alive[w] &^ holding; gone != 0; gone &= gone - 1 {
				l.setHit(w*64+bits.TrailingZeros64(gone), depth, v)
			}
			l.alive[w] &= holding
			left |= l.alive[w]
		}
		if left == 0 {
			return
		}
	}
	l.settle(len(hashes), v)
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
