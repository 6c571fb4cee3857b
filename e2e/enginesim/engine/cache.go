package engine

import (
	"context"
	"slices"
	"sync"
)

// Pool is the engine's KV memory, modelled after vLLM's BlockPool and KVCacheManager: numbered blocks, a reference
// count for each, a queue of free blocks in which the least recently used is taken first, and an index of full blocks
// by the hash of everything up to them (the prefix cache). A free block keeps its content and can be hit until it is
// reused. Block 0 is vLLM's null block and is never given out.
//
// Beyond vLLM's bookkeeping each block records *its content*, by which a read of stale blocks is detected.
//
// Long prompts put thousands of blocks into the prefix cache and evict as many, and the cache misses of a hash table
// would be most of the simulator's work. So a cached block is found from the block before it (child), and only first
// blocks and those at a fork are in the hash table.
type Pool struct {
	mu        sync.Mutex
	BlockSize int
	blocks    []block
	index     map[uint64]int32 // by key
	freeCount int
	fresh     int32 // the first unused block; unused ones go before freed ones, as in vLLM's initial queue
	head      int32 // least recently freed
	last      int32
	waiting   []*waiter
	events    *Events // publishes changes of the prefix cache; may be nil
	host      *hostTier
}

type block struct {
	prev, next int32 // in the free queue
	refs       int32
	child      int32  // the cached block that was first found to follow this one; 0: none
	parent     int32  // the block whose child this is; 0: it is in the index
	key        uint64 // in the prefix cache under this key; 0: not cached
	full       uint64 // content, if every token of it is known; 0: unknown
	tail       uint64 // content of its first tokens, if a prompt ended inside it
}

type waiter struct{ ready chan struct{} }

const noBlock = -1

// NewPool returns a pool with all blocks free. Block 0 is never given out.
func NewPool(blocks, blockSize int) *Pool {
	p := &Pool{BlockSize: blockSize}
	p.reset(blocks)
	return p
}

// reset makes every block new. All blocks must be free.
func (p *Pool) reset(blocks int) {
	p.blocks = make([]block, blocks)
	p.index = map[uint64]int32{}
	p.fresh = 1
	p.head, p.last = noBlock, noBlock
	p.freeCount = blocks - 1
}

// ResetPrefixCache empties the prefix cache, as POST /reset_prefix_cache does. It returns false while blocks are in
// use.
func (p *Pool) ResetPrefixCache() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.freeCount != len(p.blocks)-1 {
		return false
	}
	p.reset(len(p.blocks))
	p.host.clear()
	p.events.cleared()
	return true
}

// Usage returns the share of the blocks in use, 0..1: vllm:kv_cache_usage_perc.
func (p *Pool) Usage() float64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := len(p.blocks) - 1
	return float64(all-p.freeCount) / float64(all)
}

// Grant is the blocks of one sequence, in order; the first hits of them came from the prefix cache.
type Grant struct {
	Blocks []int32
	Hits   int   // blocks
	Loaded int   // of those, from CPU memory
	tip    int32 // the last of the sequence's cached blocks, or an equal one of another; noBlock before the first
}

// Admit allocates blocks for a call's sequences, all or none, and waits in line while there are too few. lens[i] is
// the number of tokens whose KV sequence i will have computed at its end. queued is called when the wait starts and
// ends.
func (p *Pool) Admit(ctx context.Context, prompts []*Prompt, lens []int, queued func(delta int64)) ([]Grant, error) {
	p.mu.Lock()
	if len(p.waiting) == 0 {
		if g := p.tryAdmit(prompts, lens); g != nil {
			p.mu.Unlock()
			return g, nil
		}
	}
	w := &waiter{make(chan struct{}, 1)}
	p.waiting = append(p.waiting, w)
	p.mu.Unlock()
	queued(1)
	defer queued(-1)
	for {
		var err error
		select {
		case <-w.ready:
		case <-ctx.Done():
			err = ctx.Err()
		}
		p.mu.Lock()
		var g []Grant
		if err == nil && p.waiting[0] == w {
			g = p.tryAdmit(prompts, lens)
		}
		if g != nil || err != nil {
			p.leave(w)
			p.mu.Unlock()
			return g, err
		}
		p.mu.Unlock()
	}
}

func (p *Pool) leave(w *waiter) {
	for i, other := range p.waiting {
		if other == w {
			p.waiting = append(p.waiting[:i], p.waiting[i+1:]...)
			break
		}
	}
	p.wakeFirst()
}

func (p *Pool) wakeFirst() {
	if len(p.waiting) > 0 {
		select {
		case p.waiting[0].ready <- struct{}{}:
		default:
		}
	}
}

// fits reports whether the sequences could ever be admitted.
func (p *Pool) fits(lens []int) bool {
	need := 0
	for _, n := range lens {
		need += BlocksFor(n, p.BlockSize)
	}
	return need < len(p.blocks)
}

func (p *Pool) tryAdmit(prompts []*Prompt, lens []int) []Grant {
	if len(prompts) > 1 { // without counting hits: simpler, and only for requests that are never split
		need := 0
		for _, n := range lens {
			need += BlocksFor(n, p.BlockSize)
		}
		if need > p.freeCount {
			return nil
		}
	}
	grants := make([]Grant, len(prompts))
	for i, pr := range prompts {
		g, ok := p.tryOne(pr, BlocksFor(lens[i], p.BlockSize))
		if !ok {
			return nil
		}
		grants[i] = g
	}
	return grants
}

// tryOne allocates hits and free blocks for one sequence. As in vLLM the last prompt token is never taken from the
// cache: it has to be computed for the first answer token.
func (p *Pool) tryOne(pr *Prompt, total int) (Grant, bool) {
	g := Grant{Blocks: make([]int32, 0, total), tip: noBlock}
	idle := 0 // hits that are in the free queue now
	for g.Hits < min((pr.N-1)/p.BlockSize, len(pr.Full)) {
		id := p.find(g.tip, pr.key(g.Hits))
		if id == noBlock {
			break
		}
		g.tip = id
		if p.blocks[id].refs == 0 {
			idle++
		}
		g.Blocks = append(g.Blocks, id)
		g.Hits++
	}
	if total-g.Hits+idle > p.freeCount {
		return Grant{}, false
	}
	host := make([]uint64, g.Hits, total) // what blocks after the hits have in CPU memory
	for len(host) < min((pr.N-1)/p.BlockSize, len(pr.Full)) {
		full, ok := p.host.get(pr.key(len(host)))
		if !ok {
			break
		}
		host = append(host, full)
	}
	for _, id := range g.Blocks {
		if b := &p.blocks[id]; b.refs == 0 {
			p.unlink(id)
		}
		p.blocks[id].refs++
	}
	for len(g.Blocks) < total {
		id := p.head
		if int(p.fresh) < len(p.blocks) {
			id = p.fresh
			p.fresh++
			p.freeCount--
		} else {
			p.unlink(id)
		}
		b := &p.blocks[id]
		if b.key != 0 {
			p.events.removed(b.key, mediumGPU)
			if b.parent == 0 {
				delete(p.index, b.key)
			}
		}
		b.child, b.parent, b.key = 0, 0, 0
		b.full, b.tail, b.refs = 0, 0, 1
		g.Blocks = append(g.Blocks, id)
	}
	p.store(&g, pr, g.Hits, len(host), host)
	g.Loaded = len(host) - g.Hits
	g.Hits = len(host)
	return g, true
}

func (p *Pool) unlink(id int32) {
	b := &p.blocks[id]
	if b.prev == noBlock {
		p.head = b.next
	} else {
		p.blocks[b.prev].next = b.next
	}
	if b.next == noBlock {
		p.last = b.prev
	} else {
		p.blocks[b.next].prev = b.prev
	}
	p.freeCount--
}

// Free frees blocks. The end of a sequence is freed first and so reused first: its beginning is more likely to be
// shared.
func (p *Pool) Free(ids []int32) {
	if len(ids) == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range slices.Backward(ids) {
		b := &p.blocks[id]
		if b.refs--; b.refs > 0 {
			continue
		}
		b.prev, b.next = p.last, noBlock
		if p.last == noBlock {
			p.head = id
		} else {
			p.blocks[p.last].next = id
		}
		p.last = id
		p.freeCount++
	}
	p.wakeFirst()
}

// Write records that the blocks of g, from block "from" on, now have the sequence's KV, and puts full ones into the
// prefix cache. actual, if not nil, has the real content of each block (KV that another engine sent), 0 meaning
// "nothing". A sequence with tail 0 leaves the tail of its last block unchanged.
func (p *Pool) Write(g *Grant, seq *Prompt, from int, actual []uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	full := max(from, min(len(g.Blocks), len(seq.Full)))
	p.store(g, seq, from, full, actual)
	if full < len(g.Blocks) && seq.tail != 0 {
		p.blocks[g.Blocks[full]].tail = actualOr(actual, full, seq.tail)
	}
}

// store is Write for full blocks, up to block "to".
func (p *Pool) store(g *Grant, seq *Prompt, from, to int, actual []uint64) {
	stored := from // blocks from there to i are newly cached
	for i := from; i < to; i++ {
		id := g.Blocks[i]
		b := &p.blocks[id]
		b.full = actualOr(actual, i, seq.Full[i])
		was := b.key
		if g.tip = p.cache(g.tip, id, seq.key(i)); g.tip != id || was != 0 { // an equal one was there already
			p.events.stored(seq, stored, i, p.BlockSize)
			stored = i + 1
		}
	}
	p.events.stored(seq, stored, to, p.BlockSize)
	for i := from; i < to && p.host != nil; i++ {
		copied, gone := p.host.put(seq.key(i), p.blocks[g.Blocks[i]].full)
		if copied {
			p.events.copied(seq.key(i))
		}
		if gone != 0 {
			p.events.removed(gone, mediumCPU)
		}
	}
}

// find looks a cached block up, given the cached block before it (noBlock for the first of a sequence).
func (p *Pool) find(before int32, key uint64) int32 {
	if before != noBlock {
		child := p.blocks[before].child
		if child == 0 {
			return noBlock // nothing ever followed it
		}
		if p.blocks[child].key == key && p.blocks[child].parent == before {
			return child
		}
	}
	if id, ok := p.index[key]; ok {
		return id
	}
	return noBlock
}

// cache puts a block into the prefix cache after the one before it, and returns the cached block: an equal one may
// have been there already.
func (p *Pool) cache(before, id int32, key uint64) int32 {
	if there := p.find(before, key); there != noBlock {
		return there
	}
	b := &p.blocks[id]
	b.key = key
	if before != noBlock {
		if child := p.blocks[before].child; child == 0 || p.blocks[child].parent != before {
			p.blocks[before].child, b.parent = id, before
			return id
		}
	}
	p.index[key] = id
	return id
}

func actualOr(actual []uint64, i int, want uint64) uint64 {
	if actual == nil {
		return want
	}
	return actual[i]
}

// Read returns the content of blocks: for each block the wanted content if it is there, else the other one.
func (p *Pool) Read(ids []int32, want func(i int) uint64) []uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]uint64, len(ids))
	for i, id := range ids {
		b := &p.blocks[id]
		switch w := want(i); {
		case b.full == w || b.tail == w:
			out[i] = w
		case b.full != 0:
			out[i] = b.full
		default:
			out[i] = b.tail
		}
	}
	return out
}

// Prefix returns the number of leading blocks that the prefix cache has.
func (p *Pool) Prefix(blocks []uint64) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for before := int32(noBlock); n < len(blocks); n++ {
		if before = p.find(before, max(blocks[n], 1)); before == noBlock {
			break
		}
	}
	return n
}

// Size returns the number of usable blocks, and of those in use.
func (p *Pool) Size() (all, used int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	all = len(p.blocks) - 1
	return all, all - p.freeCount
}

// All returns the number of usable blocks; they are numbered from 1.
func (p *Pool) All() int { return len(p.blocks) - 1 }
