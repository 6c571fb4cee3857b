package kvstate

import "time"

// doubtFor is how long a block is kept at most of which it is not certain that the engine still has it.
const doubtFor = 10 * time.Minute

// Doubt notes that some events were lost and cannot be had again, and that what is held is to be kept all the same, for a
// while: nearly all of it is still there. It is out of doubt when the engine stores it again, or stores something behind it:
// an engine has what leads to a block where it stores that. What is still in doubt after ten minutes is forgotten, so that
// nothing is promised for ever that is gone.
//
// A doubt in the second half of another one ends that; in the first half, all is in doubt from the first one's beginning.
func (f *Feed) Doubt() {
	f.x.writing.Lock()
	defer f.x.unlock()
	m := f.m
	if m.gone {
		return
	}
	now := time.Now()
	if now.Sub(f.doubted) >= doubtFor/2 {
		f.endDoubt()
	}
	if m.held > m.limit/2 { // what is doubted, and as much again as half of what fits, are to fit
		f.turn()
	}
	visited := 0
	m.each(func(id uint32) { // all of it becomes the generation that goes next
		if visited++; visited%blocksAtOnce == 0 { // what changes meanwhile are others' blocks
			f.x.unlock()
			f.x.writing.Lock()
		}
		if state, held := f.x.stateOf(m, id); held && state&stateParity != m.parity {
			f.x.setState(m, id, state^stateParity)
		}
	})
	m.parity ^= stateParity
	m.current = 0
	f.aside, f.byKey, f.byHash = nil, nil, nil // generations do not reach them, and nothing is promised of them as it is
	if !f.Doubtful() {
		f.doubted = now
	}
	f.show()
}

// Doubtful reports whether some of what is held is in doubt.
func (f *Feed) Doubtful() bool { return !f.doubted.IsZero() }

// Settle ends a doubt that has lasted long enough. To be called now and then.
func (f *Feed) Settle(now time.Time) {
	if !f.Doubtful() || now.Sub(f.doubted) < doubtFor {
		return
	}
	f.x.writing.Lock()
	defer f.x.unlock()
	if !f.m.gone {
		f.endDoubt()
		f.show()
	}
}

// While something is in doubt, that is the generation before the running one, and what leads to a block of the running
// generation is in that too.

// inDoubt reports whether a block with that state is in doubt.
func (f *Feed) inDoubt(state uint32) bool {
	return f.Doubtful() && state&stateParity != f.m.parity
}

// vouch takes a block out of doubt, and all before it: the engine has just stored it in a tier, or something behind it. In
// other tiers it may have been before, and that it went from there may be what was lost.
func (f *Feed) vouch(id, media uint32) {
	for id != 0 {
		state, held := f.x.stateOf(f.m, id)
		if !held || !f.inDoubt(state) {
			return
		}
		f.x.setState(f.m, id, state&^(stateMedia|stateParity)|f.m.parity|media)
		f.m.current++
		id = uint32(f.x.store.at(id).rest.Load() >> 32)
	}
}

// endDoubt forgets all that is in doubt, last blocks first: also those whose followers are not counted any more, which a
// turn of generations would keep.
func (f *Feed) endDoubt() {
	if !f.Doubtful() {
		return
	}
	for _, counted := range []bool{true, false} {
		f.m.each(func(id uint32) {
			for id != 0 {
				state, held := f.x.stateOf(f.m, id)
				if kids := state >> kidsShift; !held || !f.inDoubt(state) || kids > 0 && (counted || kids < kidsMax) {
					return
				}
				id = f.x.unhold(f.m, id)
			}
		})
	}
	f.m.keep(func(id uint32) bool { _, ok := f.x.stateOf(f.m, id); return ok })
	f.doubted = time.Time{}
}

// turn begins a new generation.
func (f *Feed) turn() {
	f.endDoubt()
	f.x.turn(f.m)
}
