package kvstate

import (
	"math/bits"
	"sync/atomic"
)

// blockStore is the memory of the prefix index: every block that some member holds, found by its hash. One goroutine
// writes at a time; readers need no lock. All that they read is atomic and never moves, and what they were led to they check
// against the hash that they came with. So a reader may overlook a block that is just being written, and never takes one
// block for another.
//
// A block takes 16 bytes, some 6 in the table, and nothing that the garbage collector looks into. Blocks of a prompt get
// numbers in a row where that is possible; [reading.find] tries the next number first, which saves the table.
type blockStore struct {
	chunks atomic.Pointer[[]*[chunkBlocks]block]
	table  atomic.Pointer[blockTable]
	sets   setStore

	free    []uint32 // numbers given back, last out first
	used    uint32   // numbers ever given out; 0 stands for no block
	blocks  int      // now
	deleted int      // slots of the table that are neither full nor empty
}

// block is one block of one or more prompts.
type block struct {
	hash atomic.Uint64 // of it and everything before; 0: the number is free
	rest atomic.Uint64 // the number of the block before, 0 for none, <<32 | who holds it (see setStore)
}

const chunkBlocks = 1 << 12

func newBlockStore() *blockStore {
	b := &blockStore{}
	b.chunks.Store(&[]*[chunkBlocks]block{})
	b.table.Store(newBlockTable(8))
	b.sets.chunks.Store(&[]*[chunkWords]atomic.Uint32{})
	b.used = 1
	return b
}

// at is block id, which must have been given out.
func (b *blockStore) at(id uint32) *block {
	return &(*b.chunks.Load())[id/chunkBlocks][id%chunkBlocks]
}

// find is the number of the block with that hash, 0 if there is none. near is the block before it, or any other.
func (b *blockStore) find(hash uint64, near uint32) uint32 {
	r := b.read()
	return r.find(hash, near+1)
}

// add makes a block that is held by nobody yet.
func (b *blockStore) add(hash uint64, parent uint32) uint32 {
	id := b.number()
	n := b.at(id)
	n.rest.Store(uint64(parent) << 32)
	n.hash.Store(hash)
	t := b.table.Load()
	if (b.blocks+b.deleted+1)*8 > len(t.ids)*7 {
		t = b.rebuild(t)
	}
	if t.insert(hash, id) {
		b.deleted--
	}
	b.blocks++
	return id
}

func (b *blockStore) number() uint32 {
	if n := len(b.free); n > 0 {
		id := b.free[n-1]
		b.free = b.free[:n-1]
		return id
	}
	id := b.used
	b.used++
	if chunks := *b.chunks.Load(); int(id/chunkBlocks) == len(chunks) {
		chunks = append(chunks, new([chunkBlocks]block)) // readers of the old slice do not look behind its end
		b.chunks.Store(&chunks)
	}
	return id
}

// remove forgets a block that nobody holds any more.
func (b *blockStore) remove(id uint32) {
	n := b.at(id)
	if b.table.Load().remove(n.hash.Load(), id) {
		b.deleted++
	}
	n.hash.Store(0)
	n.rest.Store(0)
	b.free = append(b.free, id)
	b.blocks--
}

// rebuild makes a larger table, or one as large where the old one is full of deleted slots. Readers go on with the old one.
func (b *blockStore) rebuild(old *blockTable) *blockTable {
	groups := len(old.words)
	if b.blocks*4 > len(old.ids)*3 {
		groups += groups/4 + 1
	}
	t := newBlockTable(groups)
	for i := range old.words {
		for m := old.words[i].Load() & msb; m != 0; m &= m - 1 {
			id := old.ids[i*8+bits.TrailingZeros64(m)/8].Load()
			t.insert(b.at(id).hash.Load(), id)
		}
	}
	b.deleted = 0
	b.table.Store(t)
	return t
}

// blockTable finds numbers by hash: open addressing in groups of eight slots, with a control byte a slot: 0 empty, 1
// deleted, else 0x80 and seven bits of the hash. Entries never move, so readers cannot miss one that stays.
type blockTable struct {
	words []atomic.Uint64 // the control bytes of a group
	ids   []atomic.Uint32
}

const (
	lsb = 0x0101010101010101
	msb = 0x8080808080808080
)

func newBlockTable(groups int) *blockTable {
	return &blockTable{make([]atomic.Uint64, groups), make([]atomic.Uint32, groups*8)}
}

// place is the group in which a search begins, and the control byte.
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
	g, control := place(hash, len(t.words))
	for ; ; g = next(g, len(t.words)) {
		w := t.words[g].Load()
		if m := ^w & msb; m != 0 {
			shift := bits.TrailingZeros64(m) - 7
			t.ids[g*8+shift/8].Store(id)
			t.words[g].Store(w&^(0xff<<shift) | control<<shift)
			return w>>shift&0xff == 1
		}
	}
}

func (t *blockTable) remove(hash uint64, id uint32) (leftMark bool) {
	g, control := place(hash, len(t.words))
	for range t.words {
		w := t.words[g].Load()
		for m := matching(w, control); m != 0; m &= m - 1 {
			shift := bits.TrailingZeros64(m) - 7
			if t.ids[g*8+shift/8].Load() != id {
				continue
			}
			mark := uint64(1)
			if matching(w, 0) != 0 { // no search goes on behind a group that has an empty slot
				mark = 0
			}
			t.words[g].Store(w&^(0xff<<shift) | mark<<shift)
			return mark == 1
		}
		if matching(w, 0) != 0 {
			return false
		}
		g = next(g, len(t.words))
	}
	return false
}

func next(g, groups int) int {
	if g++; g == groups {
		return 0
	}
	return g
}

// reading is what a reader sees of a store: a moment's table and chunks.
type reading struct {
	chunks []*[chunkBlocks]block
	table  *blockTable
	sets   []*[chunkWords]atomic.Uint32
}

func (b *blockStore) read() reading {
	return reading{*b.chunks.Load(), b.table.Load(), *b.sets.chunks.Load()}
}

// at is block id, nil if it is newer than this reading.
func (r *reading) at(id uint32) *block {
	if int(id/chunkBlocks) >= len(r.chunks) {
		return nil
	}
	return &r.chunks[id/chunkBlocks][id%chunkBlocks]
}

// find is the number of the block with that hash, 0 if there is none. guess is tried first.
func (r *reading) find(hash uint64, guess uint32) uint32 {
	if n := r.at(guess); guess != 0 && n != nil && n.hash.Load() == hash {
		return guess
	}
	g, control := place(hash, len(r.table.words))
	for range r.table.words {
		w := r.table.words[g].Load()
		for m := matching(w, control); m != 0; m &= m - 1 {
			id := r.table.ids[g*8+bits.TrailingZeros64(m)/8].Load()
			if n := r.at(id); n != nil && n.hash.Load() == hash {
				return id
			}
		}
		if matching(w, 0) != 0 {
			return 0
		}
		g = next(g, len(r.table.words))
	}
	return 0
}
