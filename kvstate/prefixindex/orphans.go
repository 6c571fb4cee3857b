package prefixindex

import "slices"

// Orphans are blocks that an engine holds although, as far as is known, it does not hold all blocks before them.

// orphan is a block whose predecessor is not held.
type orphan struct {
	parent uint64 // our hash of the block before where hashed, else the engine's
	hash   uint64 // ours where hashed, else TokenBlock
	media  uint32
	hashed bool
}

// addOrphan records a block whose parent, by the engine's name, is not held.
func (f *Feed) addOrphan(key, parent, block uint64, media uint32) {
	if id, ok := f.keys.get(key); ok { // the engine has it already, at a known place
		if state, held := f.x.stateOf(f.m, id); held {
			f.x.setState(f.m, id, state|media)
			return
		}
	}
	a := orphan{parent: parent, hash: block, media: media}
	if old, ok := f.orphans[key]; ok {
		if old.hashed || old.parent == parent {
			old.media |= media
			f.orphans[key] = old
			return
		}
		f.dropOrphan(key, old)
	}
	if p, ok := f.orphans[parent]; ok && p.hashed {
		a = orphan{parent: p.hash, hash: ChainTokenBlock(p.hash, block), media: media, hashed: true}
	}
	if !f.wait(key, a) {
		return
	}
	if a.hashed {
		f.hashChildren(key, a.hash)
	}
}

// hashChildren computes our hashes of the orphans that follow a block whose own hash has become known.
func (f *Feed) hashChildren(key, hash uint64) {
	for _, child := range slices.Clone(f.byKey[key]) {
		if a, ok := f.orphans[child]; ok && !a.hashed {
			f.dropOrphan(child, a)
			a = orphan{parent: hash, hash: ChainTokenBlock(hash, a.hash), media: a.media, hashed: true}
			f.wait(child, a)
			f.hashChildren(child, a.hash)
		}
	}
}

func (f *Feed) wait(key uint64, a orphan) bool {
	if len(f.orphans) >= max(f.m.limit/8, 64) {
		f.stats.Unusable++
		return false
	}
	if f.orphans == nil {
		f.orphans, f.byKey, f.byHash = map[uint64]orphan{}, map[uint64][]uint64{}, map[uint64][]uint64{}
	}
	f.orphans[key] = a
	if a.hashed {
		f.byHash[a.parent] = append(f.byHash[a.parent], key)
	} else {
		f.byKey[a.parent] = append(f.byKey[a.parent], key)
	}
	return true
}

func (f *Feed) dropOrphan(key uint64, a orphan) {
	delete(f.orphans, key)
	waiting := f.byKey
	if a.hashed {
		waiting = f.byHash
	}
	left := slices.DeleteFunc(waiting[a.parent], func(k uint64) bool { return k == key })
	if len(left) == 0 {
		delete(waiting, a.parent)
	} else {
		waiting[a.parent] = left
	}
}

// attach holds the orphans that follow the block just stored, and their followers.
func (f *Feed) attach(key, hash uint64, id uint32) {
	if len(f.orphans) == 0 {
		return
	}
	for _, child := range slices.Clone(f.byKey[key]) {
		if a, ok := f.orphans[child]; ok && !a.hashed {
			hash := ChainTokenBlock(hash, a.hash)
			f.renamed(child, hash, id)
			f.attach(child, hash, f.hold(child, hash, id, a.media))
		}
	}
	for _, child := range slices.Clone(f.byHash[hash]) {
		if a, ok := f.orphans[child]; ok && a.hashed && a.parent == hash {
			f.renamed(child, a.hash, id)
			f.attach(child, a.hash, f.hold(child, a.hash, id, a.media))
		}
	}
}

// detach turns everything that follows a block into orphans, before the block is removed. Engines evict the end of a
// prefix before its beginning, so this is rare. Only the first call, and the first after a generation has ended, visits
// all that the feed holds.
func (f *Feed) detach(top uint32) {
	if f.kin == nil {
		f.kin = kinTable{}
		f.keys.each(func(_ uint64, id uint32) {
			if _, held := f.x.stateOf(f.m, id); held {
				f.kin.join(id, f.x.parentOf(id))
			}
		})
	}
	below := f.kin.followers(top)
	for _, id := range slices.Backward(below) { // those that follow first, so that counts and kin stay true
		state, held := f.x.stateOf(f.m, id)
		key, named := f.keys.keyOf(id)
		if !held || !named {
			continue
		}
		n := f.x.store.at(id)
		a := orphan{
			parent: f.x.store.at(f.x.parentOf(id)).hash.Load(), hash: n.hash.Load(),
			media: state & stateMedia, hashed: true,
		}
		f.keys.remove(key)
		f.x.unhold(f.m, id)
		f.wait(key, a)
	}
}

// kin are a block's relatives among the blocks that a feed holds; 0 for none. They let a feed find what follows a
// block.
type kin struct{ first, next, before uint32 } // its latest follower; its neighbours in its parent's list

// kinTable has the kin of the blocks that follow another or are followed. It is made when first needed: most engines
// never remove a block before those that follow it.
type kinTable map[uint32]kin

// join makes a block one of those that follow parent; 0: none.
func (t kinTable) join(id, parent uint32) {
	if t == nil || parent == 0 {
		return
	}
	p, own := t[parent], t[id]
	own.next, own.before = p.first, 0
	if p.first != 0 {
		n := t[p.first]
		n.before = id
		t[p.first] = n
	}
	p.first = id
	t[parent], t[id] = p, own
}

// leave removes a block from those that follow parent.
func (t kinTable) leave(id, parent uint32) {
	own, found := t[id]
	if !found {
		return
	}
	delete(t, id)
	if own.next != 0 {
		n := t[own.next]
		n.before = own.before
		t[own.next] = n
	}
	if own.before != 0 {
		b := t[own.before]
		b.next = own.next
		t[own.before] = b
	} else if p, found := t[parent]; found && p.first == id {
		p.first = own.next
		t[parent] = p
	}
}

// followers returns all that follow a block, each after the one before it.
func (t kinTable) followers(top uint32) (out []uint32) {
	for id := t[top].first; id != 0; id = t[id].next {
		out = append(out, id)
	}
	for i := 0; i < len(out); i++ {
		for id := t[out[i]].first; id != 0; id = t[id].next {
			out = append(out, id)
		}
	}
	return out
}
