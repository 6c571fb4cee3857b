package kvstate

import "math/bits"

// EachBlock calls f for every endpoint with the blocks that are known to lie on it, in no particular order. A snapshot for
// another replica is made of them. Nobody waits while f runs; those who note what was routed wait before, some 30 ms for a
// million blocks.
func (p *Pool) EachBlock(f func(e *Endpoint, hashes []uint64)) {
	x := p.index
	bySlot := make(map[int][]uint64, len(p.endpoints))
	collect := func(generation map[uint64]holders) {
		for hash, h := range generation {
			for w := range 1 + len(h.rest) {
				for set := h.word(w); set != 0; set &= set - 1 {
					slot := w*64 + bits.TrailingZeros64(set)
					bySlot[slot] = append(bySlot[slot], hash)
				}
			}
		}
	}
	x.writing.Lock() // readers go on
	old := x.old     // is not written to any more
	collect(x.now)
	x.writing.Unlock()
	collect(old)
	for _, e := range p.endpoints {
		if hashes := bySlot[e.slot]; len(hashes) > 0 {
			f(e, hashes)
		}
	}
}

// LoadBlocks notes that an endpoint holds blocks, in any order: those of [Pool.EachBlock] elsewhere.
func (p *Pool) LoadBlocks(e *Endpoint, hashes []uint64) {
	x := p.index
	x.writing.Lock()
	defer x.writing.Unlock()
	if !x.slots[e.slot].used {
		return
	}
	for len(hashes) > 0 {
		n := min(len(hashes), addAtOnce)
		x.write(e.slot, hashes[:n])
		hashes = hashes[n:]
	}
	if len(x.now) >= 2*x.half { // what is loaded is two generations of another index, and comes endpoint by endpoint
		x.mu.Lock()
		defer x.mu.Unlock()
		x.turn()
	}
}

// Blocks is how many blocks the pool's prefix index knows.
func (p *Pool) Blocks() int {
	x := p.index
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.now) + len(x.old)
}

// EachSession calls f for every session of the pool whose endpoints are still in it. Decisions that note a session wait.
func (s *State) EachSession(p *Pool, f func(name uint64, prefill, decode *Endpoint)) {
	byLive := make(map[*live]*Endpoint, len(p.endpoints))
	for _, e := range p.endpoints {
		byLive[e.live] = e
	}
	s.sessions.mu.RLock()
	defer s.sessions.mu.RUnlock()
	for _, generation := range []map[sessionKey]session{s.sessions.old, s.sessions.now} {
		for k, at := range generation {
			if k.pool != p.Spec.Name {
				continue
			}
			if prefill, decode := byLive[at.prefill], byLive[at.decode]; prefill != nil || decode != nil {
				f(k.name, prefill, decode)
			}
		}
	}
}
