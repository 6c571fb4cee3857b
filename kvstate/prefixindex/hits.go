package prefixindex

import (
	"math/bits"
	"slices"
	"sync/atomic"
)

// Chain returns the hashes of the prompt that ends with the block last, first to last, in the memory of dst; nil if
// the index does not have it, or it is longer than most.
func (x *Index) Chain(dst []uint64, last uint64, most int) []uint64 {
	r := x.store.read()
	first := r.find(last, 0)
	if first == 0 {
		return nil
	}
	hashes := dst[:0]
	for id := first; id != 0; {
		n := r.at(id)
		if n == nil || len(hashes) == most {
			return nil
		}
		hashes = append(hashes, n.hash.Load())
		id = uint32(n.rest.Load() >> 32)
	}
	// removed during the read: those before it may be gone, too
	if r.at(first).hash.Load() != last || slices.Contains(hashes, 0) {
		return nil
	}
	slices.Reverse(hashes)
	return hashes
}

// Lookup finds how many leading blocks of a prompt each candidate holds. It is reused: it allocates nothing once it
// has grown. The zero value is ready.
type Lookup struct {
	depth  []int32  // by candidate
	alive  []uint64 // members that hold all blocks so far, by slot
	mask   []uint64 // members that hold one block
	bySlot []int32  // the candidate of a slot
	known  bool     // alive are the members counted in the last block's tally
}

// Find looks a prompt up for n candidates; slots returns the members of one. It returns how many leading blocks each
// of them holds, nil if none holds any. The result is valid until the next Find. Concurrent writes may count or not.
func (l *Lookup) Find(x *Index, hashes []uint64, n int, slots func(candidate int) []int32) []int32 {
	w := walk{reading: x.store.read(), hashes: hashes}
	at := w.block(0, w.find(hashes[0], 0))
	if at.tally == 0 {
		return nil
	}
	l.known = false
	l.reset(n, int(x.slots.Load()), slots)
	l.run(&w, at)
	return l.depth
}

// Held is how many leading blocks of a prompt an owner holds in a tier or in a faster one, by tier: the last is all.
type Held [Tiers]int32

// Tiers returns in which tiers an owner's engine holds the leading blocks of a prompt, of which it reported depth. It
// expects blocks to leave a fast tier from the end of a prompt: where a block before others has left it, some of those
// count as held there. Most owners have only GPU memory, which costs nothing.
func (o *Owner) Tiers(hashes []uint64, depth int32) (held Held) {
	held[Tiers-1] = depth
	if depth == 0 || !o.tiered.Load() {
		return Held{depth, depth, depth, depth}
	}
	r := o.index.store.read()
	first := r.find(hashes[0], 0)
	for _, slot := range o.Reports() {
		from := int32(0)
		for tier := range Tiers - 1 {
			from = r.heldWithin(hashes, first, int(slot), 1<<(tier+1)-1, from, depth)
			held[tier] = max(held[tier], from)
		}
	}
	return held
}

// heldWithin returns how many leading blocks, from to end, a member holds in the tiers of media. first is about the
// number of the first block.
func (r *reading) heldWithin(hashes []uint64, first uint32, slot int, media uint32, from, end int32) int32 {
	at := end // the last one first: usually all are there
	for from < end {
		if r.mediaOf(r.find(hashes[at-1], first+uint32(at-1)), slot)&media != 0 {
			from = at
		} else {
			end = at - 1
		}
		at = (from + end + 1) / 2
	}
	return from
}

// run follows the prompt from its first block until no candidate is left.
func (l *Lookup) run(w *walk, at blockAt) {
	var found [changesAtOnce]change
	n, most := 0, 1 // one at first: maybe no candidate holds any
	for last, leapt := at, 1; ; {
		before, next := w.leap(at, leapt)
		if n > 0 || !l.one(w, last, at) {
			found[n] = change{last, at}
			n++
		}
		if n == most || n > 0 && next.tally == 0 {
			if !l.changes(w, found[:n]) {
				return
			}
			n, most = 0, min(2*most, changesAtOnce)
		}
		if next.tally == 0 {
			l.settle(next.depth)
			return
		}
		last, at, leapt = before, next, next.depth-at.depth
	}
}

// changesAtOnce is the number of changes of holders that are collected before the holders are read: these are
// scattered in memory, so one wait serves several.
const changesAtOnce = 8

// change is a pair of neighbouring blocks with different holders.
type change struct{ before, at blockAt }

// one handles a change in which a single member drops out and the tallies identify it. The holders of the block
// before must not have changed since its tally was read.
func (l *Lookup) one(w *walk, before, at blockAt) bool {
	if !l.known || before.tally>>16-at.tally>>16 != 1 || w.tally(before.id) != before.tally {
		return false
	}
	l.leave(int((before.tally^at.tally)&0xffff), at.depth)
	return true
}

// changes drops the members that do not hold the blocks after some changes, and reports whether any is left.
func (l *Lookup) changes(w *walk, found []change) bool {
	for i := range found {
		w.touch(found[i].at.id)
	}
	for i := range found {
		c := &found[i]
		if l.one(w, c.before, c.at) {
			continue
		}
		if !l.narrow(w, c.at) {
			return false
		}
		l.known = w.tally(c.at.id) == c.at.tally
	}
	return true
}

// reset makes the members of all candidates alive. slots exceeds all of theirs, except those of members that joined
// this moment and hold nothing that counts.
func (l *Lookup) reset(n, slots int, of func(candidate int) []int32) {
	words := (slots + 63) / 64
	if cap(l.alive) < words {
		l.alive, l.mask = make([]uint64, words), make([]uint64, words)
	}
	if cap(l.bySlot) < slots {
		l.bySlot = make([]int32, slots)
	}
	if cap(l.depth) < n {
		l.depth = make([]int32, n)
	}
	l.alive, l.mask, l.bySlot, l.depth = l.alive[:words], l.mask[:words], l.bySlot[:slots], l.depth[:n]
	clear(l.alive)
	clear(l.depth)
	for i := range n {
		for _, s := range of(i) {
			if int(s) < slots {
				l.alive[s/64] |= 1 << (s % 64)
				l.bySlot[s] = int32(i)
			}
		}
	}
}

// narrow drops the members that do not hold a block, and reports whether any is left.
func (l *Lookup) narrow(w *walk, at blockAt) bool {
	depth, n := at.depth, w.at(at.id)
	if n == nil {
		l.settle(depth)
		return false
	}
	holders := uint32(n.rest.Load())
	var left uint64
	set := []atomic.Uint32(nil)
	if holders&isSet != 0 {
		set = w.setAt(holders &^ isSet)
	}
	if len(set) > 0 && set[0].Load()&isDense != 0 {
		left = l.keepDense(set, depth)
	} else {
		left = l.keepListed(holders, set, depth)
	}
	if n.hash.Load() != w.hashes[depth] || holders&isSet != 0 && uint32(n.rest.Load()) != holders {
		l.settle(depth) // it was changed during the read
		return false
	}
	return left != 0
}

// keepDense drops the members that are not in a dense set.
func (l *Lookup) keepDense(set []atomic.Uint32, depth int) (left uint64) {
	halves := set[2:]
	halves = halves[:min(int(set[1].Load()), len(halves))]
	for w, alive := range l.alive {
		if alive == 0 {
			continue
		}
		var held uint64
		if at := 2 * w; at+2 <= len(halves) {
			pair := halves[at : at+2]
			held = uint64(pair[0].Load()) | uint64(pair[1].Load())<<32
		} else if at < len(halves) { // one half: a set of 32 slots
			held = uint64(halves[at].Load())
		}
		if held &= alive; held != alive {
			l.drop(w, alive^held, depth)
		}
		left |= held
	}
	return left
}

// keepListed drops the members that are not in holders: nobody, one member or a list.
func (l *Lookup) keepListed(holders uint32, set []atomic.Uint32, depth int) (left uint64) {
	clear(l.mask)
	if len(set) > 0 {
		set = set[1:][:min(int(set[0].Load()&countOf), len(set)-1)]
	}
	among(holders, set, l.mask)
	for w, alive := range l.alive {
		left |= alive & l.mask[w]
		if alive&^l.mask[w] != 0 {
			l.drop(w, alive&^l.mask[w], depth)
		}
	}
	return left
}

// leave drops one member, if it is alive.
func (l *Lookup) leave(slot, depth int) {
	if w := slot / 64; w < len(l.alive) && l.alive[w]>>(slot%64)&1 != 0 {
		l.drop(w, 1<<(slot%64), depth)
	}
}

// drop ends the members of a word at a depth.
func (l *Lookup) drop(w int, gone uint64, depth int) {
	l.alive[w] &^= gone
	for ; gone != 0; gone &= gone - 1 {
		d := &l.depth[l.bySlot[w*64+bits.TrailingZeros64(gone)]]
		*d = max(*d, int32(depth))
	}
}

// settle ends all members that are still alive at the same depth.
func (l *Lookup) settle(depth int) {
	for w, alive := range l.alive {
		l.drop(w, alive, depth)
	}
}
