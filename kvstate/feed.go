package kvstate

import (
	"slices"
	"sync/atomic"
	"time"
)

// BlockEvent is a change of an engine's KV cache, as [tandem/kvstate/kvevents] reads it from the wire.
type BlockEvent struct {
	Kind EventKind
	// Keys are the engine's own hashes of the blocks, consecutive ones of one prompt where they are stored.
	Keys []uint64
	// Host: not in GPU memory but in CPU memory, on disk, or further away.
	Host bool

	// For BlocksStored: the engine's hash of the block before the first; what each block holds (TokenBlock), none where the
	// engine does not say, which it does not for blocks that move between tiers; where the prompt begins (TokenRoot); and
	// the tokens in a block.
	Parent    uint64
	HasParent bool
	Blocks    []uint64
	Root      uint64
	BlockSize int
	LoRA      []byte // the adapter in Root, nil for the base model; read at once
}

// EventKind is what happened.
type EventKind uint8

// The kinds of events.
const (
	BlocksStored EventKind = iota + 1
	BlocksRemoved
	AllBlocksCleared
)

// FeedStats are a feed's numbers.
type FeedStats struct {
	Stored, Removed uint64 // blocks, ever
	Clears          uint64
	Unusable        uint64 // blocks stored that could not be taken: of an unknown tier copy, or for want of room
	Held            int    // blocks now, those set aside included
	Aside           int    // blocks now that are known but no prefix leads to: one before them is unknown or gone
}

// Feed is where the KV events of one publisher go: an endpoint's engine, or one data-parallel rank of it. A block that it
// stores counts as held when all blocks before it are; until then it is set aside: under the hash of the block before it,
// or, where that was never seen (its event was lost), under the engine's name for it.
//
// Storing twice is storing once, whatever the engine counts: of two copies of a block the first that is removed takes both.
// A miss costs some computing, a false hit costs a place in the wrong queue.
//
// Methods may be called by one goroutine at a time.
type Feed struct {
	x        *prefixIndex
	m        *member
	endpoint *live
	keys     keyTable // what is held, by the engine's hash
	aside    map[uint64]asideBlock
	byKey    map[uint64][]uint64 // set aside, by the engine's hash of the block before
	byHash   map[uint64][]uint64 // set aside, by our hash of it
	size     int                 // tokens in a block
	doubted  time.Time           // since when some of it may be gone; zero: it is certain
	stats    FeedStats
	shown    atomic.Pointer[FeedStats]
}

// Feed returns a new feed of an endpoint of the pool. It is to be closed by who asked for it, and of no use when the
// endpoint leaves the pool.
func (p *Pool) Feed(e *Endpoint) *Feed {
	f := &Feed{x: p.index, endpoint: e.live}
	f.m = p.index.join(f)
	f.shown.Store(&FeedStats{})
	e.changeSlots(func(slots []int32) []int32 { return append(slots, int32(f.m.slot)) })
	if e.fresh.Load() == nil {
		if fresh := p.index.joinFresh(); !e.fresh.CompareAndSwap(nil, fresh) {
			p.index.leave(fresh.m)
		}
	}
	p.index.resize()
	return f
}

// Close forgets the feed's blocks.
func (f *Feed) Close() {
	f.endpoint.changeSlots(func(slots []int32) []int32 {
		return slices.DeleteFunc(slots, func(s int32) bool { return s == int32(f.m.slot) })
	})
	if len(*f.endpoint.feeds.Load()) == 0 {
		f.endpoint.heard.Store(false)
		if fresh := f.endpoint.fresh.Swap(nil); fresh != nil {
			f.x.leave(fresh.m)
		}
	}
	f.x.leave(f.m)
	f.shown.Store(&FeedStats{})
	f.x.noteSizes()
}

// changeSlots changes which feeds are the endpoint's.
func (l *live) changeSlots(change func([]int32) []int32) {
	for {
		old := l.feeds.Load()
		var slots []int32
		if old != nil {
			slots = slices.Clone(*old)
		}
		if slots = change(slots); l.feeds.CompareAndSwap(old, &slots) {
			return
		}
	}
}

// Stats are the feed's numbers as of the last batch. They may be asked for at any time.
func (f *Feed) Stats() FeedStats { return *f.shown.Load() }

// Clear forgets all blocks: the engine has restarted, or events were lost for good.
func (f *Feed) Clear() { f.Apply([]BlockEvent{{Kind: AllBlocksCleared}}) }

// blocksAtOnce is how many blocks are written before others may.
const blocksAtOnce = 256

// Apply takes events in the order in which the engine sent them.
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
	stats.Held, stats.Aside = f.m.held+len(f.aside), len(f.aside)
	f.shown.Store(&stats)
}

func (f *Feed) forget() {
	f.keys, f.doubted = keyTable{}, time.Time{}
	f.aside, f.byKey, f.byHash = nil, nil, nil
}

func (e *BlockEvent) media() uint32 {
	if e.Host {
		return stateHost
	}
	return stateGPU
}

func (f *Feed) stored(e *BlockEvent) {
	f.stats.Stored += uint64(len(e.Keys))
	f.endpoint.heard.Store(true)
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
	if f.m.current+len(keys) > f.m.limit/2 {
		f.turn()
		f.m.began = time.Now()
	}
	parent, hasParent := e.Parent, e.HasParent
	var id uint32
	hash := e.Root
	if hasParent {
		id, hash = f.parent(parent, e.media())
	}
	for i, key := range keys {
		if hasParent && id == 0 {
			f.setAside(key, parent, blocks[i], e.media())
			id, hash = f.parent(key, e.media()) // it may have been there before
		} else if own := ChainTokenBlock(hash, blocks[i]); f.renamed(key, own, id) {
			f.setAside(key, parent, blocks[i], e.media())
			id, hash = f.parent(key, e.media())
		} else {
			hash = own
			id = f.hold(key, hash, id, e.media())
			f.adopt(key, hash, id)
		}
		parent, hasParent = key, true
	}
}

// parent is the block that the engine calls key, behind which it stores others in a tier.
func (f *Feed) parent(key uint64, media uint32) (id uint32, hash uint64) {
	id, hash = f.held(key)
	f.vouch(id, media)
	return id, hash
}

// held is the block that the engine calls key, with our hash of it; 0 if no prefix leads to it.
func (f *Feed) held(key uint64) (id uint32, hash uint64) {
	if id, ok := f.keys.get(key); ok {
		if _, ok := f.x.stateOf(f.m, id); ok {
			return id, f.x.store.at(id).hash.Load()
		}
	}
	return 0, 0
}

// copied notes that blocks which are known have reached another tier. Older engines say no more of them than their hashes.
func (f *Feed) copied(e *BlockEvent) {
	for _, key := range e.Keys {
		if id, ok := f.keys.get(key); ok {
			if state, held := f.x.stateOf(f.m, id); held {
				f.x.setState(f.m, id, state|e.media())
				continue
			}
		}
		if a, ok := f.aside[key]; ok {
			a.media |= e.media()
			f.aside[key] = a
			continue
		}
		f.stats.Unusable++
	}
}

// renamed lets go of a block that the engine had another name for, or that had this name: engines whose hashes are small
// numbers use them again. It reports whether that took the parent of the block that is about to be stored.
func (f *Feed) renamed(key, hash uint64, parent uint32) (orphaned bool) {
	if old, ok := f.keys.get(key); ok && f.x.store.at(old).hash.Load() != hash {
		f.keys.remove(key)
		f.release(old)
	} else if id := f.x.store.find(hash, parent); !ok && id != 0 {
		if _, held := f.x.stateOf(f.m, id); held { // the newest name counts
			f.keys.removeID(id)
		}
	}
	if parent == 0 {
		return false
	}
	_, held := f.x.stateOf(f.m, parent)
	return !held
}

// hold notes a block to which a prefix leads.
func (f *Feed) hold(key, hash uint64, parent, media uint32) uint32 {
	if len(f.aside) > 0 {
		if a, ok := f.aside[key]; ok {
			media |= a.media
			f.dropAside(key, a)
		}
	}
	if f.Doubtful() {
		f.vouch(f.x.store.find(hash, parent), media)
	}
	id := f.x.hold(f.m, hash, parent, media)
	f.keys.put(key, id)
	return id
}

// removed takes blocks at the end of a prefix before those that lead to them, whichever of the two the engine names first.
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

// remove takes a block from a tier. One that leads to others only goes if it must.
func (f *Feed) remove(key uint64, media uint32, must bool) {
	if id, ok := f.keys.get(key); ok {
		state, held := f.x.stateOf(f.m, id)
		if left := state &^ media; held && left&stateMedia != 0 {
			if left != state {
				f.x.setState(f.m, id, left)
			}
		} else if must || state>>kidsShift == 0 {
			f.keys.remove(key)
			f.release(id)
		}
	} else if a, ok := f.aside[key]; ok {
		if a.media &^= media; a.media != 0 {
			f.aside[key] = a
		} else {
			f.dropAside(key, a)
		}
	}
}

// release lets go of a block; what follows it is set aside.
func (f *Feed) release(id uint32) {
	state, held := f.x.stateOf(f.m, id)
	if !held {
		return
	}
	if state>>kidsShift > 0 {
		f.unlead(id)
	}
	f.x.unhold(f.m, id)
}
