package prefixindex

import (
	"slices"
	"sort"
)

// All functions of this file are called with Index.writing held.

// write records a prompt. It begins at the first block that the current generation does not have: the blocks before
// belong to it, because a prompt is always written from its beginning.
func (x *Index) write(m *member, hashes []uint64) {
	if m.gone {
		return
	}
	capacity := m.capacity()
	hashes = hashes[:min(len(hashes), capacity/2)]
	fresh := func(i int) bool {
		state, id := x.state(m, hashes[i])
		return id == 0 || state&stateParity != m.parity
	}
	first := sort.Search(len(hashes), fresh)
	if first == len(hashes) {
		return
	}
	if m.current+len(hashes)-first > capacity/2 {
		x.nextGeneration(m)
		first = 0
	}
	var last uint32
	if first > 0 {
		last = x.store.find(hashes[first-1], 0)
	}
	for _, h := range hashes[first:] {
		last = x.hold(m, h, last, stateGPU)
	}
}

// state returns the state of the block with that hash for a member, and its number; 0 if the member does not hold it.
func (x *Index) state(m *member, hash uint64) (state, id uint32) {
	id = x.store.find(hash, 0)
	if id == 0 {
		return 0, 0
	}
	state, ok := x.stateOf(m, id)
	if !ok {
		return 0, 0
	}
	return state, id
}

func (x *Index) stateOf(m *member, id uint32) (state uint32, ok bool) {
	return x.store.sets.state(uint32(x.store.at(id).rest.Load()), m.slot)
}

// parentOf returns the block before block id; 0: none.
func (x *Index) parentOf(id uint32) uint32 { return uint32(x.store.at(id).rest.Load() >> 32) }

func (x *Index) setState(m *member, id, state uint32) {
	holders := uint32(x.store.at(id).rest.Load())
	x.store.setHolders(id, x.store.sets.put(holders, m.slot, state))
}

// hold records that a member holds the block with that hash in the tiers of media. parent is the block before it,
// which the member holds, or 0.
func (x *Index) hold(m *member, hash uint64, parent, media uint32) (id uint32) {
	id = x.store.find(hash, parent)
	if id == 0 {
		return x.gain(m, 0, hash, parent, media)
	}
	if state, ok := x.stateOf(m, id); ok {
		x.again(m, id, state, media)
		return id
	}
	return x.gain(m, id, hash, parent, media)
}

// again records that a block that a member holds in that state was used once more, and is in the tiers of media, too.
func (x *Index) again(m *member, id, state, media uint32) {
	if state&stateParity != m.parity {
		m.current++
	} else if state|media == state {
		return
	}
	x.setState(m, id, state&^stateParity|m.parity|media)
}

// gain records that a member holds a block that it did not hold; id is 0 if nobody did. The others are as in hold.
func (x *Index) gain(m *member, id uint32, hash uint64, parent, media uint32) uint32 {
	if id == 0 {
		id = x.store.add(hash, parent)
	}
	m.current++
	m.held++
	x.store.joining(id, m.slot)
	x.setState(m, id, m.parity|media)
	if m.feed == nil {
		m.list = append(m.list, id)
	} else if m.feed.kin != nil {
		m.feed.kin.join(id, x.parentOf(id))
	}
	if parent != 0 {
		x.countKid(m, parent)
	}
	return id
}

func (x *Index) countKid(m *member, parent uint32) {
	if state, ok := x.stateOf(m, parent); ok && state>>kidsShift < kidsMax {
		x.setState(m, parent, state+1<<kidsShift)
	}
}

// unhold records that a member no longer holds a block, and removes the block if it has no other holder. It returns
// the block before.
func (x *Index) unhold(m *member, id uint32) (parent uint32) {
	parent = x.parentOf(id)
	if m.feed != nil {
		m.feed.kin.leave(id, parent)
	}
	state, _ := x.stateOf(m, id)
	if m.held--; state&stateParity == m.parity {
		m.current--
	}
	x.dropHolder(m, id)
	if parent != 0 {
		if state, ok := x.stateOf(m, parent); ok && state>>kidsShift > 0 && state>>kidsShift < kidsMax {
			x.setState(m, parent, state-1<<kidsShift)
		}
	}
	return parent
}

func (x *Index) dropHolder(m *member, id uint32) {
	holders := x.store.sets.drop(uint32(x.store.at(id).rest.Load()), m.slot)
	if holders == 0 {
		x.store.remove(id)
	} else {
		x.store.setHolders(id, holders)
		x.store.left(id, m.slot)
	}
}

// nextGeneration starts a new generation and removes the one before the current one. Blocks without followers go
// first, then those before them; a follower is never older than the block before it. A block with kidsMax followers
// stays, because its count is not exact any more.
func (x *Index) nextGeneration(m *member) {
	if m.feed != nil {
		m.feed.kin = nil
	}
	m.each(func(id uint32) {
		for id != 0 {
			state, ok := x.stateOf(m, id)
			if !ok || state&stateParity == m.parity || state>>kidsShift > 0 {
				return
			}
			id = x.unhold(m, id)
		}
	})
	m.keep(func(id uint32) bool { _, ok := x.stateOf(m, id); return ok })
	m.parity ^= stateParity
	m.current = 0
	if m.held > 0 { // old blocks that stayed have the new parity: they count again
		m.each(func(id uint32) {
			if state, _ := x.stateOf(m, id); state&stateParity == m.parity {
				m.current++
			}
		})
	}
}

// clear forgets all blocks of a member.
func (x *Index) clear(m *member) {
	m.each(func(id uint32) {
		if _, ok := x.stateOf(m, id); ok {
			x.dropHolder(m, id)
		}
	})
	m.list, m.held, m.current = nil, 0, 0
	if m.feed != nil {
		m.feed.forget()
	}
}

// each calls f for all blocks of a member, later ones of a prompt first if that is known.
func (m *member) each(f func(id uint32)) {
	if m.feed != nil {
		m.feed.keys.each(func(_ uint64, id uint32) { f(id) })
		return
	}
	for _, v := range slices.Backward(m.list) {
		f(v)
	}
}

// keep drops from a member's list the blocks that it no longer holds.
func (m *member) keep(held func(id uint32) bool) {
	if m.feed != nil {
		m.feed.keys.keep(held)
		return
	}
	kept := m.list[:0]
	for _, id := range m.list {
		if held(id) {
			kept = append(kept, id)
		}
	}
	m.list = kept
}
