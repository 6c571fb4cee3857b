package prefixindex

import (
	"math/bits"
	"sync/atomic"
)

// blockTable finds numbers by hash: open addressing in groups of eight slots. Entries never move, so readers cannot
// miss an existing one.
type blockTable struct{ groups []tableGroup }

// tableGroup has a control byte for each slot: 0 empty, 1 deleted, else 0x80 and seven bits of the hash. The
// numbers are next to them, so one memory access usually reads both. Once readers have the table, both are read and
// written atomically.
type tableGroup struct {
	control uint64
	ids     [groupSlots]uint32
}

const (
	groupSlots = 8

	lsb = 0x0101010101010101
	msb = 0x8080808080808080
)

func newBlockTable(groups int) *blockTable { return &blockTable{make([]tableGroup, groups)} }

// capacity returns the largest number of used slots: with more, searches become long.
func (t *blockTable) capacity() int { return len(t.groups) * (groupSlots - 1) }

// rebuild makes a table that is four fifths full: a larger one, or one of the same size if the old one has deleted
// slots. Growing by more would be less work but take more than bytesPerEntry.
func (b *blockStore) rebuild(old *blockTable) *blockTable {
	return b.move(old, max(len(old.groups), (b.blocks+1)*5/(4*groupSlots)+1))
}

// reserve grows the table for that many blocks in total, which is cheaper at once than step by step.
func (b *blockStore) reserve(blocks int) {
	if old := b.table.Load(); blocks > old.capacity() {
		b.move(old, blocks/(groupSlots-1)+1)
	}
}

// move makes another table. Readers keep using the old one.
//
// A hash is scattered in memory, and the processor waits for it. So all of a group are read before the first is placed,
// and nothing here is atomic, which would end each wait before the next begins: that is several times as fast.
func (b *blockStore) move(old *blockTable, groups int) *blockTable {
	t, chunks := newBlockTable(groups), *b.chunks.Load()
	for i := range old.groups {
		g, n := &old.groups[i], 0
		var ids [groupSlots]uint32
		var hashes [groupSlots]uint64
		for m := g.control & msb; m != 0; m &= m - 1 {
			id := g.ids[bits.TrailingZeros64(m)/8]
			ids[n], hashes[n] = id, chunks[id/chunkBlocks].blocks[id%chunkBlocks].hash.Load()
			n++
		}
		for k, hash := range hashes[:n] {
			t.fill(hash, ids[k])
		}
	}
	b.deleted = 0
	b.table.Store(t)
	return t
}

// fill inserts a block into a table that no reader has yet and from which nothing was removed.
func (t *blockTable) fill(hash uint64, id uint32) {
	i, control := place(hash, len(t.groups))
	for t.groups[i].control&msb == msb {
		i = next(i, len(t.groups))
	}
	g := &t.groups[i]
	shift := bits.TrailingZeros64(^g.control&msb) - 7
	g.ids[shift/8] = id
	g.control |= control << shift
}

// place returns the group in which a search begins, and the control byte.
func place(hash uint64, groups int) (group int, control uint64) {
	hi, _ := bits.Mul64(hash*0x9e3779b97f4a7c15, uint64(groups))
	return int(hi), (hash^hash>>32)&0x7f | 0x80
}

// matching has the high bit of each byte of w that may equal control; lowest set bit first, false ones are rare.
func matching(w, control uint64) uint64 {
	x := w ^ control*lsb
	return (x - lsb) &^ x & msb
}

func (t *blockTable) insert(hash uint64, id uint32) (reused bool) {
	i, control := place(hash, len(t.groups))
	for ; ; i = next(i, len(t.groups)) {
		g := &t.groups[i]
		w := g.control // only the one goroutine that writes gets here
		if m := ^w & msb; m != 0 {
			shift := bits.TrailingZeros64(m) - 7
			atomic.StoreUint32(&g.ids[shift/8], id)
			atomic.StoreUint64(&g.control, w&^(0xff<<shift)|control<<shift)
			return w>>shift&0xff == 1
		}
	}
}

func (t *blockTable) remove(hash uint64, id uint32) (leftMark bool) {
	i, control := place(hash, len(t.groups))
	for range t.groups {
		g := &t.groups[i]
		w := g.control
		for m := matching(w, control); m != 0; m &= m - 1 {
			shift := bits.TrailingZeros64(m) - 7
			if g.ids[shift/8] != id {
				continue
			}
			mark := uint64(1)
			if matching(w, 0) != 0 { // a search ends at a group with an empty slot
				mark = 0
			}
			atomic.StoreUint64(&g.control, w&^(0xff<<shift)|mark<<shift)
			return mark == 1
		}
		if matching(w, 0) != 0 {
			return false
		}
		i = next(i, len(t.groups))
	}
	return false
}

func next(g, groups int) int {
	if g++; g == groups {
		return 0
	}
	return g
}

// find returns the number of the block with that hash, 0 if there is none. guess is tried first.
func (r *reading) find(hash uint64, guess uint32) uint32 {
	if n := r.at(guess); guess != 0 && n != nil && n.hash.Load() == hash {
		return guess
	}
	i, control := place(hash, len(r.table))
	for range r.table {
		g := &r.table[i]
		w := atomic.LoadUint64(&g.control)
		for m := matching(w, control); m != 0; m &= m - 1 {
			id := atomic.LoadUint32(&g.ids[bits.TrailingZeros64(m)/8])
			if n := r.at(id); n != nil && n.hash.Load() == hash {
				return id
			}
		}
		if matching(w, 0) != 0 {
			return 0
		}
		i = next(i, len(r.table))
	}
	return 0
}

// findAtOnce is the largest number of blocks that findAll finds.
const findAtOnce = 16

// findAll is find for several blocks. It makes each step for all of them before the next, so that their memory
// accesses overlap.
func (r *reading) findAll(hashes []uint64, ids *[findAtOnce]uint32) {
	for k, hash := range hashes {
		i, control := place(hash, len(r.table))
		g := &r.table[i]
		at := bits.TrailingZeros64(matching(atomic.LoadUint64(&g.control), control)|1<<63) / 8
		ids[k] = atomic.LoadUint32(&g.ids[at])
	}
	for k, hash := range hashes {
		if n := r.at(ids[k]); n == nil || n.hash.Load() != hash {
			ids[k] = r.find(hash, 0)
		}
	}
}
