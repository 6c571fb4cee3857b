package kvstate

import (
	"math/bits"
	"slices"
	"sync/atomic"
)

// chain are the hashes of a block and of those before it, first to last, in the memory of dst; nil if it is not there, or is
// more than most deep.
func (x *prefixIndex) chain(dst []uint64, last uint64, most int) []uint64 {
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
	if r.at(first).hash.Load() != last || slices.Contains(hashes, 0) { // forgotten while we read: those before it may have been too
		return nil
	}
	slices.Reverse(hashes)
	return hashes
}

// lookup is what hits needs besides the view.
type lookup struct {
	alive  []uint64 // who holds all blocks so far, by slot
	mask   []uint64 // who holds one block
	bySlot []int32  // position in the view, -1: none
	num    int      // a hit of n blocks counts n*num/den
	den    int
	known  bool // alive are those who are counted in the last block's tally
}

// hits raises every candidate's Hit to how many leading blocks of the prompt its members hold, times num/den. of says
// which members those are. What is being written meanwhile may count or not.
func (x *prefixIndex) hits(hashes []uint64, v *View, num, den int, of func(*Endpoint) []int32) {
	w := walk{reading: x.store.read(), hashes: hashes}
	at := w.block(0, w.find(hashes[0], 0))
	if at.tally == 0 {
		return
	}
	l := &v.scratch
	l.num, l.den, l.known = num, den, false
	l.reset(v.Endpoints, int(x.slots.Load()), of)
	var found [changesAtOnce]change
	n, most := 0, 1 // one at first: perhaps nobody in the race holds any
	for last, leapt := at, 1; ; {
		before, next := w.leap(at, leapt)
		if n > 0 || !l.one(&w, last, at, v) {
			found[n] = change{last, at}
			n++
		}
		if n == most || n > 0 && next.tally == 0 {
			if !l.changes(&w, found[:n], v) {
				return
			}
			n, most = 0, min(2*most, changesAtOnce)
		}
		if next.tally == 0 {
			l.settle(next.depth, v)
			return
		}
		last, at, leapt = before, next, next.depth-at.depth
	}
}

// changesAtOnce is how many places where the holders change are found before the holders are looked at: those are scattered
// over the memory, and so it is waited for once and not for each of them.
const changesAtOnce = 8

// change is a block that others hold than the one before it.
type change struct{ before, at blockAt }

// one takes out of the race who does not hold the block behind a change, if it is one member and the tallies say which:
// those who hold the block before must not have changed since its tally was read.
func (l *lookup) one(w *walk, before, at blockAt, v *View) bool {
	if !l.known || before.tally>>16-at.tally>>16 != 1 || w.tally(before.id) != before.tally {
		return false
	}
	l.leave(int((before.tally^at.tally)&0xffff), l.hit(at.depth), v)
	return true
}

// changes takes those out of the race who do not hold what is behind some changes, and reports whether anybody is left.
func (l *lookup) changes(w *walk, found []change, v *View) bool {
	for i := range found {
		w.touch(found[i].at.id)
	}
	for i := range found {
		c := &found[i]
		if l.one(w, c.before, c.at, v) {
			continue
		}
		if !l.narrow(w, c.at, v) {
			return false
		}
		l.known = w.tally(c.at.id) == c.at.tally
	}
	return true
}

// reset puts all members of the candidates into the race. slots is more than any of theirs, but for those who have come
// this moment, who hold nothing that counts.
func (l *lookup) reset(endpoints []Candidate, slots int, of func(*Endpoint) []int32) {
	words := (slots + 63) / 64
	if cap(l.alive) < words {
		l.alive, l.mask = make([]uint64, words), make([]uint64, words)
	}
	if cap(l.bySlot) < slots {
		l.bySlot = make([]int32, slots)
	}
	l.alive, l.mask, l.bySlot = l.alive[:words], l.mask[:words], l.bySlot[:slots]
	clear(l.alive)
	for i := range endpoints {
		for _, s := range of(endpoints[i].Endpoint) {
			if int(s) < slots {
				l.alive[s/64] |= 1 << (s % 64)
				l.bySlot[s] = int32(i)
			}
		}
	}
}

// narrow takes those out of the race who do not hold a block, and reports whether anybody is left.
func (l *lookup) narrow(w *walk, at blockAt, v *View) bool {
	depth, n := at.depth, w.at(at.id)
	if n == nil {
		l.settle(depth, v)
		return false
	}
	holders := uint32(n.rest.Load())
	var left uint64
	set := []atomic.Uint32(nil)
	if holders&isSet != 0 {
		set = w.setAt(holders &^ isSet)
	}
	if len(set) > 0 && set[0].Load()&isDense != 0 {
		left = l.keepDense(set, l.hit(depth), v)
	} else {
		left = l.keepListed(holders, set, l.hit(depth), v)
	}
	if n.hash.Load() != w.hashes[depth] || holders&isSet != 0 && uint32(n.rest.Load()) != holders {
		l.settle(depth, v) // it was written to while we read
		return false
	}
	return left != 0
}

// keepDense takes those out who are not in a dense set.
func (l *lookup) keepDense(set []atomic.Uint32, hit int, v *View) (left uint64) {
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
			l.drop(w, alive^held, hit, v)
		}
		left |= held
	}
	return left
}

// keepListed takes those out who are not in holders, which are nobody, one or a list.
func (l *lookup) keepListed(holders uint32, set []atomic.Uint32, hit int, v *View) (left uint64) {
	clear(l.mask)
	if len(set) > 0 {
		set = set[1:][:min(int(set[0].Load()&countOf), len(set)-1)]
	}
	among(holders, set, l.mask)
	for w, alive := range l.alive {
		left |= alive & l.mask[w]
		if alive&^l.mask[w] != 0 {
			l.drop(w, alive&^l.mask[w], hit, v)
		}
	}
	return left
}

// hit is what so many blocks count as.
func (l *lookup) hit(depth int) int {
	if l.num == l.den { // a division for each of a thousand depths is felt
		return depth
	}
	return depth * l.num / l.den
}

// leave takes one member out of the race, if it is in it.
func (l *lookup) leave(slot, hit int, v *View) {
	if w := slot / 64; w < len(l.alive) && l.alive[w]>>(slot%64)&1 != 0 {
		l.drop(w, 1<<(slot%64), hit, v)
	}
}

// drop takes the members of a word out of the race.
func (l *lookup) drop(w int, gone uint64, hit int, v *View) {
	l.alive[w] &^= gone
	for ; gone != 0; gone &= gone - 1 {
		c := &v.Endpoints[l.bySlot[w*64+bits.TrailingZeros64(gone)]]
		c.Hit = max(c.Hit, hit)
	}
}

// settle gives all who are still in the race the same depth.
func (l *lookup) settle(depth int, v *View) {
	for w, alive := range l.alive {
		l.drop(w, alive, l.hit(depth), v)
	}
}
