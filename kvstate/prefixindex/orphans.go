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
// prefix before its beginning, so this is rare; it visits all that the feed holds.
func (f *Feed) detach(top uint32) {
	below := map[uint32]bool{0: false, top: true}
	var path []uint32
	follows := func(id uint32) bool {
		path = path[:0]
		known, found := below[id]
		for !found {
			path = append(path, id)
			id = uint32(f.x.store.at(id).rest.Load() >> 32)
			known, found = below[id]
		}
		for _, on := range path {
			below[on] = known
		}
		return known
	}
	type leaving struct {
		key uint64
		id  uint32
		a   orphan
	}
	var all []leaving
	f.keys.each(func(key uint64, id uint32) {
		if state, held := f.x.stateOf(f.m, id); held && id != top && follows(id) {
			n := f.x.store.at(id)
			parent := f.x.store.at(uint32(n.rest.Load() >> 32))
			a := orphan{parent: parent.hash.Load(), hash: n.hash.Load(), media: state & stateMedia, hashed: true}
			all = append(all, leaving{key, id, a})
		}
	})
	for _, l := range all {
		f.keys.remove(l.key)
	}
	for _, l := range all {
		if _, held := f.x.stateOf(f.m, l.id); held {
			f.x.unhold(f.m, l.id) // if its parent was removed just before, unhold changes no count
		}
		f.wait(l.key, l.a)
	}
}
