package kvstate

import (
	"slices"
	"sort"
)

// Writing: all of this is called with prefixIndex.writing held.

// write notes a prompt. What the member holds of it already is only asked for again, from the first block on that the
// running generation does not have: blocks before that belong to it, as a prompt is always written from its beginning.
func (x *prefixIndex) write(m *member, hashes []uint64) {
	if m.gone {
		return
	}
	room := m.room()
	hashes = hashes[:min(len(hashes), room/2)]
	fresh := func(i int) bool {
		state, id := x.state(m, hashes[i])
		return id == 0 || state&stateParity != m.parity
	}
	first := sort.Search(len(hashes), fresh)
	if first == len(hashes) {
		return
	}
	if m.current+len(hashes)-first > room/2 {
		x.turn(m)
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

// state is the state of the block with that hash for a member, with its number; 0 if the member does not hold it.
func (x *prefixIndex) state(m *member, hash uint64) (state, id uint32) {
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

func (x *prefixIndex) stateOf(m *member, id uint32) (state uint32, ok bool) {
	return x.store.sets.state(uint32(x.store.at(id).rest.Load()), m.slot)
}

func (x *prefixIndex) setState(m *member, id, state uint32) {
	holders := uint32(x.store.at(id).rest.Load())
	x.store.setHolders(id, x.store.sets.put(holders, m.slot, state))
}

// hold notes that a member holds the block with that hash, in the tiers of media too. parent is the block before it, which
// the member holds, or 0.
func (x *prefixIndex) hold(m *member, hash uint64, parent, media uint32) (id uint32) {
	id = x.store.find(hash, parent)
	if id == 0 {
		id = x.store.add(hash, parent)
	}
	state, ok := x.stateOf(m, id)
	if ok && state&stateParity == m.parity {
		if state|media != state {
			x.setState(m, id, state|media)
		}
		return id
	}
	m.current++
	if !ok {
		x.store.joining(id, m.slot)
	}
	x.setState(m, id, state&^stateParity|m.parity|media)
	if !ok {
		m.held++
		if m.feed == nil {
			m.list = append(m.list, id)
		}
		if parent != 0 {
			x.countKid(m, parent)
		}
	}
	return id
}

func (x *prefixIndex) countKid(m *member, parent uint32) {
	if state, ok := x.stateOf(m, parent); ok && state>>kidsShift < kidsMax {
		x.setState(m, parent, state+1<<kidsShift)
	}
}

// unhold forgets that a member holds a block; the block too, if it was the last to. It returns the block before it.
func (x *prefixIndex) unhold(m *member, id uint32) (parent uint32) {
	parent = uint32(x.store.at(id).rest.Load() >> 32)
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

func (x *prefixIndex) dropHolder(m *member, id uint32) {
	holders := x.store.sets.drop(uint32(x.store.at(id).rest.Load()), m.slot)
	if holders == 0 {
		x.store.remove(id)
	} else {
		x.store.setHolders(id, holders)
		x.store.left(id, m.slot)
	}
}

// turn begins a new generation: what belongs to the one before the running one goes. Only blocks that no other of the
// member's follows go, then those before them; a block that follows is never older than the one before it, but one with
// kidsMax followers stays, for its count is not exact any more.
func (x *prefixIndex) turn(m *member) {
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
	if state := m.held; state > 0 { // blocks that stayed although they were old have the new parity: they count again
		m.each(func(id uint32) {
			if state, _ := x.stateOf(m, id); state&stateParity == m.parity {
				m.current++
			}
		})
	}
}

// clear forgets all blocks of a member.
func (x *prefixIndex) clear(m *member) {
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

// each calls f for all blocks of a member, later ones of a prompt first where that is known.
func (m *member) each(f func(id uint32)) {
	if m.feed != nil {
		m.feed.keys.each(func(_ uint64, id uint32) { f(id) })
		return
	}
	for _, v := range slices.Backward(m.list) {
		f(v)
	}
}

// keep drops from the list of a member's blocks those that it does not hold any more.
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
