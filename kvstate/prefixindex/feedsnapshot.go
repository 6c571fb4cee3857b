package prefixindex

import (
	"math/bits"
	"slices"
	"sort"
)

// FeedSnapshot is a copy of a feed at one moment, for a replica that starts.
type FeedSnapshot struct {
	blocks  []heldBlock // by id
	orphans []namedOrphan
	loras   []string
	size    int
}

type heldBlock struct {
	key, hash         uint64
	id, parent, media uint32
}

type namedOrphan struct {
	key uint64
	orphan
}

// Snapshot copies the feed. It locks the index for a part at a time; only other members' blocks change meanwhile.
func (f *Feed) Snapshot() *FeedSnapshot {
	c := &FeedSnapshot{blocks: make([]heldBlock, 0, f.keys.n), size: f.size}
	f.x.writing.Lock()
	f.keys.each(func(key uint64, id uint32) {
		if len(c.blocks)%blocksAtOnce == blocksAtOnce-1 {
			f.x.unlock()
			f.x.writing.Lock()
		}
		if state, held := f.x.stateOf(f.m, id); held {
			n := f.x.store.at(id)
			c.blocks = append(c.blocks,
				heldBlock{key, n.hash.Load(), id, uint32(n.rest.Load() >> 32), state & stateMedia})
		}
	})
	f.x.unlock()
	for key, a := range f.orphans {
		if !a.hashed {
			c.orphans = append(c.orphans, namedOrphan{key, a})
		}
	}
	if known := f.x.loras.Load(); known != nil {
		for name := range *known {
			c.loras = append(c.loras, name)
		}
	}
	return c
}

// Each calls f with events that build an equal feed: each block after its predecessors. An event is valid until the
// next. Orphans after a block that the engine has evicted are left out; if the engine computes that block again, the
// new feed gets them when the engine stores them again.
func (c *FeedSnapshot) Each(f func(*BlockEvent)) {
	for _, name := range c.loras {
		f(&BlockEvent{Kind: BlocksStored, LoRA: []byte(name), BlockSize: c.size})
	}
	// mostly in the order of prompts
	slices.SortFunc(c.blocks, func(a, b heldBlock) int { return int(a.id) - int(b.id) })
	r := runs{c: c, f: f}
	sent := make([]bool, len(c.blocks))
	var path []int
	for i := range c.blocks {
		path = path[:0]
		for at := i; at >= 0 && !sent[at]; at = c.parentOf(at) {
			sent[at] = true
			path = append(path, at)
		}
		for _, at := range slices.Backward(path) {
			r.add(at)
		}
	}
	r.end()
	for _, a := range c.orphans {
		emitStored(f, &BlockEvent{Keys: []uint64{a.key}, Blocks: []uint64{a.hash}, Parent: a.parent, HasParent: true,
			BlockSize: c.size}, a.media)
	}
}

// parentOf returns the index of the block before one; -1: there is none.
func (c *FeedSnapshot) parentOf(at int) int {
	parent := c.blocks[at].parent
	if at > 0 && c.blocks[at-1].id == parent {
		return at - 1
	}
	i := sort.Search(len(c.blocks), func(i int) bool { return c.blocks[i].id >= parent })
	if parent == 0 || i == len(c.blocks) || c.blocks[i].id != parent {
		return -1
	}
	return i
}

// runs joins consecutive blocks into one event.
type runs struct {
	c     *FeedSnapshot
	f     func(*BlockEvent)
	e     BlockEvent
	last  uint32 // the block at its end
	media uint32
}

const runAtMost = 1 << 12 // blocks

func (r *runs) add(at int) {
	b := &r.c.blocks[at]
	parent := r.c.parentOf(at)
	if len(r.e.Keys) == 0 || b.parent != r.last || b.media != r.media || len(r.e.Keys) == runAtMost {
		r.end()
		r.media = b.media
		r.e = BlockEvent{Keys: r.e.Keys[:0], Blocks: r.e.Blocks[:0], BlockSize: r.c.size, Root: TokenRoot("", r.c.size)}
		if parent >= 0 {
			r.e.Parent, r.e.HasParent = r.c.blocks[parent].key, true
		}
	}
	before := r.e.Root // any root does: the event makes our hash with it
	if parent >= 0 {
		before = r.c.blocks[parent].hash
	}
	r.e.Keys, r.e.Blocks = append(r.e.Keys, b.key), append(r.e.Blocks, unchainTokenBlock(before, b.hash))
	r.last = b.id
}

func (r *runs) end() {
	if len(r.e.Keys) > 0 {
		emitStored(r.f, &r.e, r.media)
	}
	r.e.Keys, r.e.Blocks = r.e.Keys[:0], r.e.Blocks[:0]
}

// emitStored emits blocks that are stored in some tiers: with their content for the fastest, as copies for the others.
func emitStored(f func(*BlockEvent), e *BlockEvent, media uint32) {
	e.Kind, e.Tier = BlocksStored, Tier(bits.TrailingZeros32(media))
	f(e)
	for tier := e.Tier + 1; tier < Tiers; tier++ {
		if media>>tier&1 != 0 {
			f(&BlockEvent{Kind: BlocksStored, Keys: e.Keys, Tier: tier})
		}
	}
}

// unchainTokenBlock returns the [TokenBlock] from which [ChainTokenBlock] makes hash.
func unchainTokenBlock(parent, hash uint64) uint64 {
	return hash*0x4f74430c22a54005 ^ bits.RotateLeft64(parent, 27)
}
