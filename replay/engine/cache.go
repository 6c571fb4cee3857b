package engine

import "slices"

// Cache is a prefix cache of blocks that evicts the least recently used. Blocks of running requests are pinned: they
// are in memory once, however many requests have them, and are not evicted.
type Cache struct {
	limited bool
	at      map[uint64]int32
	ring    []cacheEntry // entry 0 is the head of a circular list: newest after it, oldest before it
	free    int32
	pins    map[uint64]int32 // running requests that have the block, cached or not yet computed
	pinned  int              // of those blocks, the cached ones
}

type cacheEntry struct {
	block      uint64
	prev, next int32
	tokens     int32 // of the block that are computed
}

// NewCache returns an empty cache; one that is not limited never evicts.
func NewCache(limited bool) *Cache {
	return &Cache{limited: limited, at: map[uint64]int32{}, ring: make([]cacheEntry, 1), free: -1,
		pins: map[uint64]int32{}}
}

// Hit returns the number of leading blocks that the cache holds whole, and the tokens that it has of the next one. They
// count as used.
func (c *Cache) Hit(blocks []uint64) (whole, tokens int) {
	whole, tokens = c.peek(blocks)
	last := whole
	if tokens == 0 {
		last--
	}
	for i := last; i >= 0; i-- { // the first block last: it is the most useful
		c.touch(c.at[blocks[i]])
	}
	return whole, tokens
}

// peek is Hit, but does not count the blocks as used.
func (c *Cache) peek(blocks []uint64) (whole, tokens int) {
	for i, b := range blocks {
		at, ok := c.at[b]
		if !ok {
			return i, 0
		}
		if n := c.ring[at].tokens; n < BlockTokens {
			return i, int(n)
		}
	}
	return len(blocks), 0
}

// has reports whether the cache holds a block whole.
func (c *Cache) has(b uint64) bool {
	at, ok := c.at[b]
	return ok && c.ring[at].tokens == BlockTokens
}

// pin counts a running request's blocks.
func (c *Cache) pin(blocks []uint64) {
	for _, b := range blocks {
		if c.pins[b]++; c.pins[b] == 1 {
			if _, ok := c.at[b]; ok {
				c.pinned++
			}
		}
	}
}

// unpin reverses pin. Cached blocks stay cached.
func (c *Cache) unpin(blocks []uint64) {
	for _, b := range blocks {
		if c.pins[b]--; c.pins[b] > 0 {
			continue
		}
		delete(c.pins, b)
		if _, ok := c.at[b]; ok {
			c.pinned--
		}
	}
}

// unpinned returns how many of the blocks no running request has.
func (c *Cache) unpinned(blocks []uint64) (n int) {
	for _, b := range blocks {
		if c.pins[b] == 0 {
			n++
		}
	}
	return n
}

func (c *Cache) touch(i int32) {
	c.unlink(i)
	c.link(i)
}

func (c *Cache) unlink(i int32) {
	e := &c.ring[i]
	c.ring[e.prev].next, c.ring[e.next].prev = e.next, e.prev
}

func (c *Cache) link(i int32) {
	first := c.ring[0].next
	c.ring[i].prev, c.ring[i].next = 0, first
	c.ring[first].prev, c.ring[0].next = i, i
}

// Add stores blocks, the last of which has so many tokens. If there are more than limit then, pinned ones included, the
// oldest that are not pinned are evicted.
func (c *Cache) Add(blocks []uint64, last, limit int) {
	for i, b := range slices.Backward(blocks) {
		tokens := int32(BlockTokens)
		if i == len(blocks)-1 {
			tokens = int32(last)
		}
		if at, ok := c.at[b]; ok {
			c.ring[at].tokens = max(c.ring[at].tokens, tokens)
			c.touch(at)
			continue
		}
		at := c.free
		if at >= 0 {
			c.free = c.ring[at].next
		} else {
			at = int32(len(c.ring))
			c.ring = append(c.ring, cacheEntry{})
		}
		c.ring[at].block, c.ring[at].tokens = b, tokens
		c.at[b] = at
		c.link(at)
		if c.pins[b] > 0 {
			c.pinned++
		}
	}
	if !c.limited {
		return
	}
	for left := len(c.at); left > 0 && len(c.at)-c.pinned > max(limit-len(c.pins), 0); left-- {
		oldest := c.ring[0].prev
		block := c.ring[oldest].block
		if c.pins[block] > 0 {
			c.touch(oldest)
			continue
		}
		c.unlink(oldest)
		delete(c.at, block)
		c.ring[oldest].next, c.free = c.free, oldest
	}
}
