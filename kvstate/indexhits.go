package kvstate

import "math/bits"

// lookup is what hits needs besides the view.
type lookup struct {
	alive  []uint64 // who holds all blocks so far, by slot
	mask   []uint64 // who holds one block
	bySlot []int32  // position in the view, -1: none
	num    int      // a hit of n blocks counts n*num/den
	den    int
}

// hits raises every candidate's Hit to how many leading blocks of the prompt its members hold, times num/den. of says
// which members those are. What is being written meanwhile may count or not.
func (x *prefixIndex) hits(hashes []uint64, v *View, num, den int, of func(*Endpoint) []int32) {
	r := x.store.read()
	id := r.find(hashes[0], 0)
	if id == 0 {
		return
	}
	l := &v.scratch
	l.num, l.den = num, den
	l.reset(v.Endpoints, of)
	for depth, leapt := 0, 1; ; {
		if !l.narrow(&r, id, hashes[depth], depth, v) {
			return
		}
		from := depth
		if depth, id = r.leap(hashes, depth, id, leapt); id == 0 {
			l.settle(depth, v)
			return
		}
		leapt = depth - from
	}
}

// leap finds the first block behind depth that not as many hold as hold the block there, in steps that grow and a search
// within the last of them: its place in the prompt, and its number, 0 if nobody holds it or the prompt ends. The first step
// is as long as the leap before it.
func (r *reading) leap(hashes []uint64, depth int, id uint32, step int) (int, uint32) {
	n := r.countAt(id)
	good, bad, badID := depth, len(hashes), uint32(0)
	try := func(at int) {
		if next := r.find(hashes[at], id+uint32(at-good)); next != 0 && r.countAt(next) == n {
			good, id = at, next
		} else {
			bad, badID = at, next
		}
	}
	for ; good+1 < bad && bad == len(hashes); step *= 2 {
		try(min(good+step, len(hashes)-1))
	}
	for bad-good > 1 {
		try(good + (bad-good)/2)
	}
	return bad, badID
}

func (r *reading) countAt(id uint32) uint32 {
	if n := r.at(id); n != nil {
		return r.count(uint32(n.rest.Load()))
	}
	return 0
}

// reset puts all members of the candidates into the race.
func (l *lookup) reset(endpoints []Candidate, of func(*Endpoint) []int32) {
	slots := 0
	for i := range endpoints {
		for _, s := range of(endpoints[i].Endpoint) {
			slots = max(slots, int(s)+1)
		}
	}
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
			l.alive[s/64] |= 1 << (s % 64)
			l.bySlot[s] = int32(i)
		}
	}
}

// narrow takes those out of the race who do not hold block depth, and reports whether anybody is left.
func (l *lookup) narrow(r *reading, id uint32, hash uint64, depth int, v *View) bool {
	clear(l.mask)
	if n := r.at(id); n != nil {
		holders := uint32(n.rest.Load())
		r.members(holders, l.mask)
		if n.hash.Load() != hash || holders&isSet != 0 && uint32(n.rest.Load()) != holders {
			clear(l.mask) // it was written to while we read
		}
	}
	var left uint64
	for w, alive := range l.alive {
		for gone := alive &^ l.mask[w]; gone != 0; gone &= gone - 1 {
			l.setHit(w*64+bits.TrailingZeros64(gone), depth, v)
		}
		l.alive[w] &= l.mask[w]
		left |= l.alive[w]
	}
	return left != 0
}

func (l *lookup) setHit(slot, depth int, v *View) {
	c := &v.Endpoints[l.bySlot[slot]]
	c.Hit = max(c.Hit, depth*l.num/l.den)
}

// settle gives all who are still in the race the same depth.
func (l *lookup) settle(depth int, v *View) {
	for w, alive := range l.alive {
		for ; alive != 0; alive &= alive - 1 {
			l.setHit(w*64+bits.TrailingZeros64(alive), depth, v)
		}
	}
}
