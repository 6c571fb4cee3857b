package prefixindex

import (
	"slices"
	"sync/atomic"
)

// BlockEvent is a change of an engine's KV cache, as package kvevents reads it from the wire.
type BlockEvent struct {
	Kind EventKind
	// Keys are the engine's own hashes of the blocks; stored ones follow each other in a prompt.
	Keys []uint64
	Tier Tier // that the blocks were stored in or removed from

	// For BlocksStored: the engine's hash of the block before the first; the content of each block (TokenBlock),
	// none if the engine does not report it, as for blocks that move between tiers; the root of the prompt
	// (TokenRoot); and the tokens in a block.
	Parent    uint64
	HasParent bool
	Blocks    []uint64
	Root      uint64
	BlockSize int
	LoRA      []byte // the adapter in Root, nil for the base model; valid only during Apply
}

// Tier is a kind of memory in which an engine keeps blocks. The lower, the faster.
type Tier uint8

// The tiers. An engine computes with blocks in GPU memory only, and loads the others first.
const (
	TierGPU Tier = iota
	TierCPU
	TierDisk
	TierRemote // a store that several engines may share
	Tiers      // how many there are
)

// EventKind is the kind of a BlockEvent.
type EventKind uint8

// The kinds of events.
const (
	BlocksStored EventKind = iota + 1
	BlocksRemoved
	AllBlocksCleared
)

// FeedStats are the statistics of a feed.
type FeedStats struct {
	Stored, Removed uint64 // blocks in total
	Clears          uint64
	Unusable        uint64 // stored blocks that could not be recorded: copies of unknown blocks, or no capacity left
	Held            int    // current blocks, orphans included
	Orphans         int    // current blocks whose predecessor is unknown or gone
}

// Feed takes the KV events of one publisher: an engine, or one data-parallel rank of it. A stored block counts as held
// when all blocks before it are; until then it is an orphan: under the hash of the block before it, or, if that was
// never seen (its event was lost), under the engine's hash of it.
//
// A block that is stored twice is held once, whatever the engine counts: the first removal takes both copies. A miss
// costs some computing, a false hit a place in the wrong queue.
//
// Only one goroutine may call methods at a time.
type Feed struct {
	x       *Index
	m       *member
	owner   *Owner
	keys    keyTable // held blocks, by the engine's hash
	orphans map[uint64]orphan
	byKey   map[uint64][]uint64 // orphans, by the engine's hash of the block before
	byHash  map[uint64][]uint64 // orphans, by our hash of the block before
	kin     kinTable            // nil until needed
	size    int                 // tokens in a block
	stats   FeedStats
	shown   atomic.Pointer[FeedStats]
}

// Close forgets the feed's blocks.
func (f *Feed) Close() {
	f.owner.changeFeeds(func(slots []int32) []int32 {
		return slices.DeleteFunc(slots, func(s int32) bool { return s == int32(f.m.slot) })
	})
	if len(*f.owner.feeds.Load()) == 0 {
		f.owner.reported.Store(false)
		f.owner.tiered.Store(false)
		f.owner.leaveFresh()
	}
	f.x.leave(f.m)
	f.shown.Store(&FeedStats{})
	f.x.noteSizes()
}

// Stats returns the feed's statistics as of the last batch. It may be called at any time.
func (f *Feed) Stats() FeedStats { return *f.shown.Load() }

// Clear forgets all blocks: the engine has restarted, or events were lost for good.
func (f *Feed) Clear() { f.Apply([]BlockEvent{{Kind: AllBlocksCleared}}) }

// blocksAtOnce is the number of blocks that are written before others may take the lock.
const blocksAtOnce = 256

// Apply records events, in the order in which the engine sent them.
func (f *Feed) Apply(events []BlockEvent) {
	f.x.writing.Lock()
	defer f.x.unlock()
	if f.m.gone {
		return
	}
	written := 0
	for i := range events {
		e := &events[i]
		if written += len(e.Keys); written > blocksAtOnce {
			f.x.unlock()
			f.x.writing.Lock()
			written = 0
			if f.m.gone {
				return
			}
		}
		switch e.Kind {
		case BlocksStored:
			f.stored(e)
		case BlocksRemoved:
			f.removed(e)
		case AllBlocksCleared:
			f.stats.Clears++
			f.x.clear(f.m)
		}
	}
	f.show()
}

func (f *Feed) show() {
	stats := f.stats
	stats.Held, stats.Orphans = f.m.held+len(f.orphans), len(f.orphans)
	f.shown.Store(&stats)
}

func (f *Feed) forget() {
	f.keys, f.kin = keyTable{}, nil
	f.orphans, f.byKey, f.byHash = nil, nil, nil
}

// media is the event's tier as a bit of a state.
func (e *BlockEvent) media() uint32 { return 1 << e.Tier }

func (f *Feed) stored(e *BlockEvent) {
	f.stats.Stored += uint64(len(e.Keys))
	f.owner.reported.Store(true)
	if e.Tier != TierGPU {
		f.owner.tiered.Store(true)
	}
	if len(e.Blocks) != len(e.Keys) {
		f.copied(e)
		return
	}
	if len(e.LoRA) > 0 {
		f.x.noteLoRA(e.LoRA)
	}
	if e.BlockSize != f.size {
		f.size = e.BlockSize
		f.x.noteSizesLocked()
	}
	keys, blocks := e.Keys, e.Blocks
	if room := f.m.limit / 2; len(keys) > room {
		f.stats.Unusable += uint64(len(keys) - room)
		keys, blocks = keys[:room], blocks[:room]
	}
	f.makeRoom(len(keys))
	parent, hasParent := e.Parent, e.HasParent
	var id uint32
	hash := e.Root
	if hasParent {
		id, hash = f.held(parent)
	}
	for i, key := range keys {
		own := ChainTokenBlock(hash, blocks[i])
		if hasParent && id == 0 {
			f.addOrphan(key, parent, blocks[i], e.media())
			id, hash = f.held(key) // it may exist already
		} else if next := f.plain(key, own, id, e.media()); next != 0 {
			id, hash = next, own
		} else if f.renamed(key, own, id) {
			f.addOrphan(key, parent, blocks[i], e.media())
			id, hash = f.held(key)
		} else {
			hash = own
			id = f.hold(key, hash, id, e.media())
			f.attach(key, hash, id)
		}
		parent, hasParent = key, true
	}
}

// plain stores the block after parent and returns it, with one search for its name and one for its content. It returns
// 0, and has changed nothing, if orphans may follow it, or its name or its content is known under another.
func (f *Feed) plain(key, hash uint64, parent, media uint32) (id uint32) {
	if len(f.orphans) > 0 {
		return 0
	}
	x, mixed := f.x, mixedKey(key)
	at, named := f.keys.slot(mixed)
	if named {
		id = f.keys.ids[at]
		if state, held := x.stateOf(f.m, id); held && x.store.at(id).hash.Load() == hash {
			x.again(f.m, id, state, media)
			return id
		}
		return 0
	}
	if id = x.store.find(hash, parent); id != 0 {
		if _, held := x.stateOf(f.m, id); held {
			return 0
		}
	}
	id = x.gain(f.m, id, hash, parent, media)
	f.keys.insert(at, mixed, id)
	return id
}

// makeRoom forgets what has not been stored again for the longest time, if n more blocks do not fit.
func (f *Feed) makeRoom(n int) {
	m := f.m
	for range 2 { // the second forgets the rest, if nothing but the current generation was left
		if m.held+n > m.limit {
			f.x.nextGeneration(m)
		}
	}
	if m.current+n > m.limit/2 && m.current == m.held {
		m.parity, m.current = m.parity^stateParity, 0 // nothing is left of the generation before
	}
}

// held returns the block with the engine's hash key, and our hash of it; 0 if it is not held.
func (f *Feed) held(key uint64) (id uint32, hash uint64) {
	if id, ok := f.keys.get(key); ok {
		if _, ok := f.x.stateOf(f.m, id); ok {
			return id, f.x.store.at(id).hash.Load()
		}
	}
	return 0, 0
}

// copied records that known blocks have reached another tier. Older engines report only their hashes.
func (f *Feed) copied(e *BlockEvent) {
	for _, key := range e.Keys {
		if id, ok := f.keys.get(key); ok {
			if state, held := f.x.stateOf(f.m, id); held {
				f.x.setState(f.m, id, state|e.media())
				continue
			}
		}
		if a, ok := f.orphans[key]; ok {
			a.media |= e.media()
			f.orphans[key] = a
			continue
		}
		f.stats.Unusable++
	}
}

// renamed handles a reused name: it releases the block that had it, or removes this block's other name. Engines whose
// hashes are small numbers reuse them. It reports whether that removed the parent of the block that is about to be
// stored.
func (f *Feed) renamed(key, hash uint64, parent uint32) (orphaned bool) {
	old, known := f.keys.get(key)
	if known && f.x.store.at(old).hash.Load() != hash {
		f.keys.remove(key)
		f.release(old)
		known = false
	}
	if !known {
		if id := f.x.store.find(hash, parent); id != 0 {
			if _, held := f.x.stateOf(f.m, id); held { // the newest name counts
				f.keys.removeID(id)
			}
		}
	}
	if parent == 0 {
		return false
	}
	_, held := f.x.stateOf(f.m, parent)
	return !held
}

// hold records a block whose predecessors are held.
func (f *Feed) hold(key, hash uint64, parent, media uint32) uint32 {
	if len(f.orphans) > 0 {
		if a, ok := f.orphans[key]; ok {
			media |= a.media
			f.dropOrphan(key, a)
		}
	}
	id := f.x.hold(f.m, hash, parent, media)
	f.keys.put(key, id)
	return id
}

// removed removes blocks at the end of a prefix before their predecessors, in whichever order the engine names them.
func (f *Feed) removed(e *BlockEvent) {
	f.stats.Removed += uint64(len(e.Keys))
	if len(e.Keys) > 1 {
		for _, v := range slices.Backward(e.Keys) {
			f.remove(v, e.media(), false)
		}
		for _, key := range e.Keys {
			f.remove(key, e.media(), false)
		}
	}
	for _, key := range e.Keys {
		f.remove(key, e.media(), true)
	}
}

// remove removes a block from a tier. A block with followers is removed only with must.
func (f *Feed) remove(key uint64, media uint32, must bool) {
	if at, ok := f.keys.slot(mixedKey(key)); ok {
		id := f.keys.ids[at]
		state, held := f.x.stateOf(f.m, id)
		if left := state &^ media; held && left&stateMedia != 0 {
			if left != state {
				f.x.setState(f.m, id, left)
			}
		} else if must || state>>kidsShift == 0 {
			f.keys.removeAt(at)
			f.release(id)
		}
	} else if a, ok := f.orphans[key]; ok {
		if a.media &^= media; a.media != 0 {
			f.orphans[key] = a
		} else {
			f.dropOrphan(key, a)
		}
	}
}

// release forgets a block; its followers become orphans.
func (f *Feed) release(id uint32) {
	state, held := f.x.stateOf(f.m, id)
	if !held {
		return
	}
	if state>>kidsShift > 0 {
		f.detach(id)
	}
	f.x.unhold(f.m, id)
}
