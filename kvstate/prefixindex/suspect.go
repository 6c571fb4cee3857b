package prefixindex

import "time"

// suspectFor is how long a suspect block is kept at most.
const suspectFor = 10 * time.Minute

// Suspect notes that some events were lost and cannot be had again. All blocks become suspect and are kept for a while:
// nearly all of them are still there. A block is confirmed when the engine stores it again, or stores something behind it:
// an engine that stores a block has its predecessors. A block that is still suspect after ten minutes is forgotten, so
// nothing that is gone is promised for ever.
//
// A suspicion in the second half of another one ends that; in the first half, all blocks are suspect since the first began.
func (f *Feed) Suspect() {
	f.x.writing.Lock()
	defer f.x.unlock()
	m := f.m
	if m.gone {
		return
	}
	now := time.Now()
	if now.Sub(f.suspectSince) >= suspectFor/2 {
		f.endSuspicion()
	}
	if m.held > m.limit/2 { // the suspect blocks and a full generation beside them are to fit
		f.nextGeneration()
	}
	visited := 0
	m.each(func(id uint32) { // all blocks become the generation that goes next
		if visited++; visited%blocksAtOnce == 0 { // only others' blocks change meanwhile
			f.x.unlock()
			f.x.writing.Lock()
		}
		if state, held := f.x.stateOf(m, id); held && state&stateParity != m.parity {
			f.x.setState(m, id, state^stateParity)
		}
	})
	m.parity ^= stateParity
	m.current = 0
	f.orphans, f.byKey, f.byHash = nil, nil, nil // generations do not reach orphans, and they are no hits
	if !f.HasSuspects() {
		f.suspectSince = now
	}
	f.show()
}

// HasSuspects reports whether some of the blocks are suspect.
func (f *Feed) HasSuspects() bool { return !f.suspectSince.IsZero() }

// ExpireSuspects ends a suspicion that has lasted long enough. To be called now and then.
func (f *Feed) ExpireSuspects(now time.Time) {
	if !f.HasSuspects() || now.Sub(f.suspectSince) < suspectFor {
		return
	}
	f.x.writing.Lock()
	defer f.x.unlock()
	if !f.m.gone {
		f.endSuspicion()
		f.show()
	}
}

// While blocks are suspect, they are the generation before the current one, and the predecessors of a block of the current
// generation are in that too.

// isSuspect reports whether a block with that state is suspect.
func (f *Feed) isSuspect(state uint32) bool {
	return f.HasSuspects() && state&stateParity != f.m.parity
}

// confirm ends the suspicion of a block and of all before it: the engine has just stored it in a tier, or something behind
// it. It counts as held in that tier alone: its removal from another one may be among the lost events.
func (f *Feed) confirm(id, media uint32) {
	for id != 0 {
		state, held := f.x.stateOf(f.m, id)
		if !held || !f.isSuspect(state) {
			return
		}
		f.x.setState(f.m, id, state&^(stateMedia|stateParity)|f.m.parity|media)
		f.m.current++
		id = uint32(f.x.store.at(id).rest.Load() >> 32)
	}
}

// endSuspicion forgets all suspect blocks, last ones first: also those with too many followers to count, which a new
// generation would keep.
func (f *Feed) endSuspicion() {
	if !f.HasSuspects() {
		return
	}
	for _, counted := range []bool{true, false} {
		f.m.each(func(id uint32) {
			for id != 0 {
				state, held := f.x.stateOf(f.m, id)
				if kids := state >> kidsShift; !held || !f.isSuspect(state) || kids > 0 && (counted || kids < kidsMax) {
					return
				}
				id = f.x.unhold(f.m, id)
			}
		})
	}
	f.m.keep(func(id uint32) bool { _, ok := f.x.stateOf(f.m, id); return ok })
	f.suspectSince = time.Time{}
}

// nextGeneration begins a new generation.
func (f *Feed) nextGeneration() {
	f.endSuspicion()
	f.x.nextGeneration(f.m)
}
