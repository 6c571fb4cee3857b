package kvstate

// EachBlock calls f for the blocks that are known to lie on an endpoint, in parts of no particular order; hashes are f's
// only while it runs. A snapshot for another replica is made of them. Decisions wait for some milliseconds at most.
func (p *Pool) EachBlock(e *Endpoint, f func(hashes []uint64)) {
	x := p.index
	x.writing.Lock()
	defer x.writing.Unlock() // readers go on
	part := make([]uint64, 0, 4096)
	for _, generation := range []map[uint64]holders{x.old, x.now} {
		for hash, h := range generation {
			if !h.has(e.slot) {
				continue
			}
			if part = append(part, hash); len(part) == cap(part) {
				f(part)
				part = part[:0]
			}
		}
	}
	if len(part) > 0 {
		f(part)
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
	if len(x.now) >= x.half {
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
