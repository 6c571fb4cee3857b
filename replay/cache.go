package replay

import "slices"

// cache is a prefix cache of blocks that evicts the least recently used.
type cache struct {
	capacity int // blocks; 0: no limit
	at       map[uint64]int32
	ring     []cacheEntry // entry 0 is the head of a circular list: newest after it, oldest before it
	free     int32
}

type cacheEntry struct {
	block      uint64
	prev, next int32
}

func newCache(capacity int) *cache {
	return &cache{capacity: capacity, at: map[uint64]int32{}, ring: make([]cacheEntry, 1), free: -1}
}

// hit returns the number of leading blocks that the cache holds. They count as used.
func (c *cache) hit(blocks []uint64) int {
	n := c.peek(blocks)
	for i := n - 1; i >= 0; i-- { // the first block last: it is the most useful
		c.touch(c.at[blocks[i]])
	}
	return n
}

// peek is hit, but does not count the blocks as used.
func (c *cache) peek(blocks []uint64) int {
	for i, b := range blocks {
		if _, ok := c.at[b]; !ok {
			return i
		}
	}
	return len(blocks)
}

func (c *cache) touch(i int32) {
	c.unlink(i)
	c.link(i)
}

func (c *cache) unlink(i int32) {
	e := &c.ring[i]
	c.ring[e.prev].next, c.ring[e.next].prev = e.next, e.prev
}

func (c *cache) link(i int32) {
	first := c.ring[0].next
	c.ring[i].prev, c.ring[i].next = 0, first
	c.ring[first].prev, c.ring[0].next = i, i
}

// add stores blocks and evicts the oldest ones where it must. limit is the capacity for now, in blocks.
func (c *cache) add(blocks []uint64, limit int) {
	for _, b := range slices.Backward(blocks) {
		if at, ok := c.at[b]; ok {
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
		c.ring[at].block = b
		c.at[b] = at
		c.link(at)
	}
	for c.capacity > 0 && len(c.at) > max(limit, 0) {
		oldest := c.ring[0].prev
		c.unlink(oldest)
		delete(c.at, c.ring[oldest].block)
		c.ring[oldest].next, c.free = c.free, oldest
	}
}
