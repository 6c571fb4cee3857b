package kvstate

import "slices"

// EachBlock calls f for the blocks of prompts that are known to lie on an endpoint, in parts: hashes follow each other in a
// prompt, and parent is the hash of the block before the first, 0 where the prompt begins. Parts come after those that they
// follow. hashes are f's only while it runs. A snapshot for another replica is made of them, which takes time: the index is
// locked for a part at a time and not while f runs, and what changes meanwhile is in it or not.
func (p *Pool) EachBlock(e *Endpoint, f func(parent uint64, hashes []uint64)) {
	x, m := p.index, e.routed
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

// nextPart takes the next blocks that follow each other from ids, as far as the member still holds them.
func (x *prefixIndex) nextPart(m *member, part []uint64, ids []uint32) (parent uint64, filled []uint64, rest []uint32) {
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

// MakeRoom says that so many blocks are about to be loaded.
func (p *Pool) MakeRoom(blocks int) {
	x := p.index
	x.writing.Lock()
	defer x.unlock()
	x.store.reserve(min(x.store.blocks+blocks, x.limits.maxBytes/bytesPerEntry))
}

// LoadBlocks notes that an endpoint holds blocks of a prompt, behind the one with the hash parent: a part of
// [Pool.EachBlock] elsewhere. Where that one is not known, or there is no room, it notes nothing.
func (p *Pool) LoadBlocks(e *Endpoint, parent uint64, hashes []uint64) {
	x, m := p.index, e.routed
	x.writing.Lock()
	defer x.unlock()
	var last uint32
	if parent != 0 {
		if _, last = x.state(m, parent); last == 0 {
			return
		}
	}
	for _, h := range hashes {
		if m.gone || m.held >= m.room() {
			return
		}
		last = x.hold(m, h, last, stateGPU)
	}
	if m.current > m.room()/2 {
		x.turn(m)
	}
}

// Blocks is how many blocks the pool's prefix index knows.
func (p *Pool) Blocks() int {
	p.index.writing.Lock()
	defer p.index.unlock()
	return p.index.store.blocks
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
