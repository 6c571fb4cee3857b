package prefixindex

import (
	"slices"
	"sync/atomic"
)

// Owner is one engine in the index: the slots of its members. The zero value becomes an owner by [Index.Join].
type Owner struct {
	own      [1]int32                    // slot of routed
	feeds    atomic.Pointer[[]int32]     // slots of the KV event feeds
	fresh    atomic.Pointer[freshMember] // prompts routed moments ago; nil: there is no feed
	reported atomic.Bool                 // a feed has reported blocks
	tiered   atomic.Bool                 // some of them outside GPU memory
	routed   *member                     // prompts routed to it
	index    *Index
}

// Join makes o an owner. Call [Index.Resize] when all have joined.
func (x *Index) Join(o *Owner) {
	o.index, o.routed = x, x.join(nil)
	o.own[0] = int32(o.routed.slot)
}

// Leave forgets the routed prompts of the owner. The caller closes its feeds.
func (o *Owner) Leave() {
	o.index.leave(o.routed)
	o.leaveFresh()
}

// Forget forgets the routed prompts: the engine has lost its cache. Its feeds receive that as an event.
func (o *Owner) Forget() {
	o.index.writing.Lock()
	defer o.index.unlock()
	o.index.clear(o.routed)
	if f := o.fresh.Load(); f != nil {
		o.index.clear(f.m)
	}
}

func (o *Owner) leaveFresh() {
	if f := o.fresh.Swap(nil); f != nil {
		o.index.leave(f.m)
	}
}

// Add records that the owner will hold the blocks of a prompt that was routed to it. It never waits for another
// writer.
func (o *Owner) Add(hashes []uint64) { o.index.add(o.routed, hashes) }

// AddFresh adds them to the prompts routed moments ago, if the owner's engine reports its blocks.
func (o *Owner) AddFresh(hashes []uint64) {
	if f := o.fresh.Load(); f != nil {
		o.index.add(f.m, hashes)
	}
}

// Learn records how much of a prompt the engine found in its cache, and how much the index had promised. Differences
// of at most slack mean nothing.
func (o *Owner) Learn(promised, found, slack int64) {
	o.routed.learn(promised, found, slack)
}

// Keeps sets how many routed blocks to remember, as far as there is memory.
func (o *Owner) Keeps(blocks int) {
	keeps := max(int64(blocks), minFits)
	if old := o.routed.keeps.Swap(keeps); old == keeps {
		return
	}
	o.index.writing.Lock()
	defer o.index.unlock()
	o.index.resize()
}

// Reported reports whether the owner's engine has reported blocks.
func (o *Owner) Reported() bool { return o.reported.Load() }

// Routed returns the slots of the prompts routed to the owner.
func (o *Owner) Routed() []int32 { return o.own[:] }

// Reports returns the slots of the blocks that the owner's engine has reported.
func (o *Owner) Reports() []int32 {
	if slots := o.feeds.Load(); slots != nil {
		return *slots
	}
	return nil
}

// Fresh returns the slots of the prompts routed to the owner moments ago.
func (o *Owner) Fresh() []int32 {
	if f := o.fresh.Load(); f != nil {
		return f.slot
	}
	return nil
}

// NewFeed returns a new feed of the owner. The caller closes it; it has no effect after the owner has left.
func (o *Owner) NewFeed() *Feed {
	x := o.index
	f := &Feed{x: x, owner: o}
	f.m = x.join(f)
	f.shown.Store(&FeedStats{})
	o.changeFeeds(func(slots []int32) []int32 { return append(slots, int32(f.m.slot)) })
	if o.fresh.Load() == nil {
		if fresh := x.joinFresh(); !o.fresh.CompareAndSwap(nil, fresh) {
			x.leave(fresh.m)
		}
	}
	x.Resize()
	return f
}

// changeFeeds changes the slots of the owner's feeds.
func (o *Owner) changeFeeds(change func([]int32) []int32) {
	for {
		old := o.feeds.Load()
		var slots []int32
		if old != nil {
			slots = slices.Clone(*old)
		}
		if slots = change(slots); o.feeds.CompareAndSwap(old, &slots) {
			return
		}
	}
}

// EachBlock calls f for the blocks of prompts routed to the owner, in parts, for the snapshot of another replica: the
// hashes of a part follow each other in a prompt, and parent is the hash of the block before the first, 0 at the
// beginning of a prompt. A part comes after the one that it follows. f must not keep hashes. The index is locked for a
// part at a time and not while f runs; concurrent changes may be included or not.
func (o *Owner) EachBlock(f func(parent uint64, hashes []uint64)) {
	x, m := o.index, o.routed
	x.writing.Lock()
	ids := slices.Clone(m.list)
	x.unlock()
	part := make([]uint64, 0, snapshotPart)
	for len(ids) > 0 {
		var parent uint64
		x.writing.Lock()
		parent, part, ids = x.nextPart(m, part[:0], ids)
		x.unlock()
		if len(part) > 0 {
			f(parent, part)
		}
	}
}

// nextPart returns the next consecutive blocks of ids, as far as the member still holds them.
func (x *Index) nextPart(m *member, part []uint64, ids []uint32) (parent uint64, filled []uint64, rest []uint32) {
	var last uint32
	for i, id := range ids {
		if _, ok := x.stateOf(m, id); !ok {
			continue
		}
		n := x.store.at(id)
		before := uint32(n.rest.Load() >> 32)
		if len(part) == cap(part) || len(part) > 0 && before != last {
			return parent, part, ids[i:]
		}
		if len(part) == 0 && before != 0 {
			parent = x.store.at(before).hash.Load()
		}
		part, last = append(part, n.hash.Load()), id
	}
	return parent, part, nil
}

const snapshotPart = 4096 // blocks

// Load records that the owner holds blocks of a prompt after the one with the hash parent: a part of
// [Owner.EachBlock] of another replica. If the parent is unknown, or the owner is full, it does nothing.
func (o *Owner) Load(parent uint64, hashes []uint64) {
	x, m := o.index, o.routed
	x.writing.Lock()
	defer x.unlock()
	var last uint32
	if parent != 0 {
		if _, last = x.state(m, parent); last == 0 {
			return
		}
	}
	for _, h := range hashes {
		if m.gone || m.held >= m.capacity() {
			return
		}
		last = x.hold(m, h, last, stateGPU)
	}
	if m.current > m.capacity()/2 {
		x.nextGeneration(m)
	}
}
