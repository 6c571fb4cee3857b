package prefixindex

import (
	"math/bits"
	"sync/atomic"
)

// The holders of a block are a 32-bit word: 0 for none, slot+1 <<15 | state for one member, or, with the top bit set,
// the address of a set in setStore. A set is a list of such words while that is smaller, then a bit for each slot
// followed by the states. The state of a member and a block: which tiers of its memory hold it, in which generation it
// was last used, and how many following blocks the member holds too.
const (
	stateGPU    = 1 << TierGPU // and a bit for each other tier
	stateMedia  = 1<<Tiers - 1
	stateParity = 1 << Tiers // of the member's generation
	kidsShift   = Tiers + 1
	kidsMax     = 1<<(stateBits-kidsShift) - 1 // this many followers or more, so the count is no longer exact
	stateBits   = 15
	stateMask   = 1<<stateBits - 1

	maxSlots = 1<<16 - 2
	isSet    = 1 << 31
	isDense  = 1 << 31 // in a set's first word; the lower 24 bits are the number of holders
	countOf  = 1<<24 - 1
)

const chunkWords = 1 << 16

// setStore keeps sets of holders in chunks of words. Freed sets are reused for sets of the same size.
type setStore struct {
	chunks atomic.Pointer[[]*[chunkWords]atomic.Uint32]
	used   uint32           // allocated words
	free   map[int][]uint32 // by size
	groups int              // of 32 slots, the size of dense sets
}

func (s *setStore) word(at uint32) *atomic.Uint32 {
	return &(*s.chunks.Load())[at/chunkWords][at%chunkWords]
}

// take allocates a set of n words within one chunk.
func (s *setStore) take(n int) uint32 {
	if free := s.free[n]; len(free) > 0 {
		s.free[n] = free[:len(free)-1]
		return free[len(free)-1]
	}
	if left := chunkWords - int(s.used%chunkWords); s.used%chunkWords == 0 || left < n {
		if s.used%chunkWords != 0 {
			s.used += uint32(left)
		}
		chunks := append(*s.chunks.Load(), new([chunkWords]atomic.Uint32))
		s.chunks.Store(&chunks)
	}
	at := s.used
	s.used += uint32(n)
	return at
}

func (s *setStore) give(at uint32, n int) {
	if s.free == nil {
		s.free = map[int][]uint32{}
	}
	s.free[n] = append(s.free[n], at)
}

// listWords returns the number of words of a list of n holders, including the first word: a power of two.
func listWords(n int) int { return max(4, 1<<bits.Len(uint(n))) }

func denseWords(groups int) int { return 2 + groups + groups*16 }

// maxList returns the largest number of holders in a list: with more, the dense form is no larger.
func (s *setStore) maxList() int { return max(31, s.groups*4) }

// state returns the state of a member and a block that it holds.
func (s *setStore) state(holders uint32, slot int) (state uint32, ok bool) {
	if holders&isSet == 0 {
		if holders>>stateBits != uint32(slot+1) {
			return 0, false
		}
		return holders & stateMask, true
	}
	at := holders &^ isSet
	head := s.word(at).Load()
	if head&isDense == 0 {
		i := s.position(at, head, slot)
		if i == 0 {
			return 0, false
		}
		return s.word(at+i).Load() & stateMask, true
	}
	groups := s.word(at + 1).Load()
	if slot >= int(groups)*32 || s.word(at+2+uint32(slot/32)).Load()>>(slot%32)&1 == 0 {
		return 0, false
	}
	return s.word(at+2+groups+uint32(slot/2)).Load() >> (slot % 2 * 16) & stateMask, true
}

// position returns the index of a slot in a list, 0 if it is absent.
func (s *setStore) position(at, head uint32, slot int) uint32 {
	chunk := (*s.chunks.Load())[at/chunkWords][at%chunkWords:]
	for i := uint32(1); i <= head&countOf; i++ {
		if chunk[i].Load()>>stateBits == uint32(slot+1) {
			return i
		}
	}
	return 0
}

// put adds a member to holders, or changes its state, and returns the new holders.
func (s *setStore) put(holders uint32, slot int, state uint32) uint32 {
	word := uint32(slot+1)<<stateBits | state
	switch {
	case holders == 0, holders&isSet == 0 && holders>>stateBits == uint32(slot+1):
		return word
	case holders&isSet == 0:
		at := s.take(listWords(2))
		s.word(at + 1).Store(holders)
		s.word(at + 2).Store(word)
		s.word(at).Store(2)
		return isSet | at
	}
	at := holders &^ isSet
	head := s.word(at).Load()
	if head&isDense != 0 {
		return s.putDense(at, head, slot, state)
	}
	if i := s.position(at, head, slot); i != 0 {
		s.word(at + i).Store(word)
		return holders
	}
	n := int(head & countOf)
	switch {
	case n+1 > s.maxList():
		return s.putDense(s.toDense(at, n, s.groups), uint32(n)|isDense, slot, state)
	case n+2 > listWords(n):
		at = s.moveList(at, n, listWords(n), listWords(n+1))
	}
	s.word(at + uint32(n) + 1).Store(word)
	s.word(at).Store(uint32(n + 1))
	return isSet | at
}

func (s *setStore) moveList(at uint32, n, from, to int) uint32 {
	moved := s.take(to)
	for i := uint32(1); i <= uint32(n); i++ {
		s.word(moved + i).Store(s.word(at + i).Load())
	}
	s.word(moved).Store(uint32(n))
	s.give(at, from)
	return moved
}

// toDense turns a list of n holders into a dense set.
func (s *setStore) toDense(at uint32, n, groups int) uint32 {
	dense := s.clearDense(groups)
	for i := uint32(1); i <= uint32(n); i++ {
		w := s.word(at + i).Load()
		s.setDense(dense, groups, int(w>>stateBits)-1, w&stateMask)
	}
	s.word(dense).Store(isDense | uint32(n))
	s.give(at, listWords(n))
	return dense
}

func (s *setStore) clearDense(groups int) uint32 {
	at := s.take(denseWords(groups))
	for i := uint32(2); i < uint32(denseWords(groups)); i++ {
		s.word(at + i).Store(0)
	}
	s.word(at + 1).Store(uint32(groups))
	return at
}

func (s *setStore) setDense(at uint32, groups, slot int, state uint32) {
	w := s.word(at + 2 + uint32(groups+slot/2))
	w.Store(w.Load()&^(0xffff<<(slot%2*16)) | state<<(slot%2*16))
	b := s.word(at + 2 + uint32(slot/32))
	if old := b.Load(); old>>(slot%32)&1 == 0 {
		b.Store(old | 1<<(slot%32))
	}
}

func (s *setStore) putDense(at, head uint32, slot int, state uint32) uint32 {
	groups := int(s.word(at + 1).Load())
	if slot >= groups*32 { // the fleet has grown since
		at = s.growDense(at, head, groups)
		groups = s.groups
	}
	if s.word(at+2+uint32(slot/32)).Load()>>(slot%32)&1 == 0 {
		s.setDense(at, groups, slot, state)
		s.word(at).Store(head + 1)
	} else {
		s.setDense(at, groups, slot, state)
	}
	return isSet | at
}

func (s *setStore) growDense(at, head uint32, groups int) uint32 {
	grown := s.clearDense(s.groups)
	for slot := range groups * 32 {
		if state, ok := s.state(isSet|at, slot); ok {
			s.setDense(grown, s.groups, slot, state)
		}
	}
	s.word(grown).Store(head)
	s.give(at, denseWords(groups))
	return grown
}

// drop removes a member from holders and returns the new ones. If holders is unchanged, the member was not among
// them.
func (s *setStore) drop(holders uint32, slot int) uint32 {
	if holders&isSet == 0 {
		if holders>>stateBits == uint32(slot+1) {
			return 0
		}
		return holders
	}
	at := holders &^ isSet
	head := s.word(at).Load()
	n := int(head & countOf)
	if head&isDense != 0 {
		return s.dropDense(at, head, slot)
	}
	i := s.position(at, head, slot)
	if i == 0 {
		return holders
	}
	last := s.word(at + uint32(n)).Load()
	s.word(at + i).Store(last)
	s.word(at).Store(uint32(n - 1))
	switch {
	case n == 2:
		last = s.word(at + 1).Load()
		s.give(at, listWords(2))
		return last
	case listWords(n-1) < listWords(n):
		return isSet | s.moveList(at, n-1, listWords(n), listWords(n-1))
	}
	return holders
}

func (s *setStore) dropDense(at, head uint32, slot int) uint32 {
	groups := s.word(at + 1).Load()
	b := s.word(at + 2 + uint32(slot/32))
	if slot >= int(groups)*32 || b.Load()>>(slot%32)&1 == 0 {
		return isSet | at
	}
	b.Store(b.Load() &^ (1 << (slot % 32)))
	s.word(at).Store(head - 1)
	n := int(head&countOf) - 1
	if n > s.maxList()/2 {
		return isSet | at
	}
	list := s.take(listWords(n))
	i := uint32(1)
	for slot := range int(groups) * 32 {
		if state, ok := s.state(isSet|at, slot); ok {
			s.word(list + i).Store(uint32(slot+1)<<stateBits | state)
			i++
		}
	}
	s.word(list).Store(uint32(n))
	s.give(at, denseWords(int(groups)))
	return isSet | list
}

// setAt returns the set at an address, and the words after it, for a reader: nothing if it is newer than the reading.
// If the set is reused for another block meanwhile, its content is meaningless, which the caller detects.
func (r *reading) setAt(at uint32) []atomic.Uint32 {
	if int(at/chunkWords) >= len(r.sets) {
		return nil
	}
	return r.sets[at/chunkWords][at%chunkWords:]
}

// among sets in mask the bits of all members of holders (one or a list), as far as mask has them.
func among(holders uint32, set []atomic.Uint32, mask []uint64) {
	if holders&isSet == 0 {
		setBit(mask, int(holders>>stateBits)-1)
		return
	}
	for i := range set {
		setBit(mask, int(set[i].Load()>>stateBits)-1)
	}
}

func setBit(mask []uint64, i int) {
	if w := uint(i) / 64; w < uint(len(mask)) { // a missing slot is -1, and so beyond any mask
		mask[w] |= 1 << (uint(i) % 64)
	}
}

// mediaOf returns the tiers in which a member keeps block id, for a reader; 0 if it does not hold the block. If the
// block is written to meanwhile, the result may be anything.
func (r *reading) mediaOf(id uint32, slot int) uint32 {
	n := r.at(id)
	if n == nil {
		return 0
	}
	holders := uint32(n.rest.Load())
	if holders&isSet == 0 {
		if holders>>stateBits != uint32(slot+1) {
			return 0
		}
		return holders & stateMedia
	}
	set := r.setAt(holders &^ isSet)
	if len(set) < 2 {
		return 0
	}
	head := set[0].Load()
	if head&isDense != 0 {
		at := 2 + int(set[1].Load()) + slot/2
		if at >= len(set) {
			return 0
		}
		return set[at].Load() >> (slot % 2 * 16) & stateMedia
	}
	for i := range set[1:][:min(int(head&countOf), len(set)-1)] {
		if w := set[1+i].Load(); w>>stateBits == uint32(slot+1) {
			return w & stateMedia
		}
	}
	return 0
}
