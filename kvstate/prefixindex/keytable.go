package prefixindex

import "math/bits"

// keyTable maps the engine's hash of a block to our number: linear probing, 12 bytes a slot, 91 to 93 per cent full
// while it grows. Keys are mixed and sorted, so a search ends at the first larger key, and a larger table is filled in
// one pass, which makes growing in small steps cheap.
type keyTable struct {
	keys  []uint64 // mixed; 0: empty
	ids   []uint32
	homes int // slots for keys' home positions; some more after them take the overflow of the last
	n     int
	// names has the upper half of each block's mixed key, which leads to its slot. It is made when a key is first
	// searched by its block: most engines never store a block again under another name, and need none.
	names *keyTable
}

const (
	// zeroKey replaces the key 0, which some simulator may use.
	zeroKey = 0x2545f4914f6cdd1d

	keyMix   = 0x9e3779b97f4a7c15
	keyUnmix = 0xf1de83e19937733d // keyMix * keyUnmix = 1

	keyTail = 64 // slots after the homes
)

func mixedKey(key uint64) uint64 {
	if key == 0 {
		key = zeroKey
	}
	return key * keyMix
}

func (t *keyTable) home(mixed uint64) int {
	hi, _ := bits.Mul64(mixed, uint64(t.homes))
	return int(hi)
}

// slot returns the index of a key, or the index at which to insert it.
func (t *keyTable) slot(mixed uint64) (i int, found bool) {
	for i = t.home(mixed); i < len(t.keys) && t.keys[i]-1 < mixed-1; { // 0, an empty one, is the largest then
		i++
	}
	return i, i < len(t.keys) && t.keys[i] == mixed
}

func (t *keyTable) get(key uint64) (id uint32, ok bool) {
	i, ok := t.slot(mixedKey(key))
	if !ok {
		return 0, false
	}
	return t.ids[i], true
}

func (t *keyTable) put(key uint64, id uint32) {
	mixed := mixedKey(key)
	i, ok := t.slot(mixed)
	if t.names != nil {
		if ok {
			t.names.forget(t.ids[i], mixed)
		}
		t.names.put(uint64(id), uint32(mixed>>32))
	}
	if ok {
		t.ids[i] = id
		return
	}
	t.place(i, mixed, id)
}

// insert puts a key that is not there at the index that slot returned for it.
func (t *keyTable) insert(i int, mixed uint64, id uint32) {
	if t.names != nil {
		t.names.put(uint64(id), uint32(mixed>>32))
	}
	t.place(i, mixed, id)
}

func (t *keyTable) place(i int, mixed uint64, id uint32) {
	if (t.n+1)*100 > t.homes*93 {
		t.resize(t.n+t.n/10+8, keyTail)
		i, _ = t.slot(mixed)
	}
	end := t.empty(i)
	for end == len(t.keys) {
		t.resize(t.homes, 2*(len(t.keys)-t.homes))
		i, _ = t.slot(mixed)
		end = t.empty(i)
	}
	copy(t.keys[i+1:end+1], t.keys[i:end])
	copy(t.ids[i+1:end+1], t.ids[i:end])
	t.keys[i], t.ids[i] = mixed, id
	t.n++
}

// empty returns the first empty slot from i on.
func (t *keyTable) empty(i int) int {
	for i < len(t.keys) && t.keys[i] != 0 {
		i++
	}
	return i
}

// resize changes the number of slots, and adds slots after the homes if needed.
func (t *keyTable) resize(homes, tail int) {
	old := *t
	t.homes, t.keys, t.ids = homes, make([]uint64, homes+tail), make([]uint32, homes+tail)
	at := 0
	for i, mixed := range old.keys {
		if mixed == 0 {
			continue
		}
		if at = max(at, t.home(mixed)); at == len(t.keys) {
			*t = old
			t.resize(homes, 2*tail)
			return
		}
		t.keys[at], t.ids[at] = mixed, old.ids[i]
		at++
	}
}

// remove removes a key. Later ones that are not at home move back, so that no tombstones are needed.
func (t *keyTable) remove(key uint64) {
	if i, ok := t.slot(mixedKey(key)); ok {
		t.removeAt(i)
	}
}

// removeAt removes the key at an index.
func (t *keyTable) removeAt(i int) {
	t.n--
	if t.names != nil {
		t.names.forget(t.ids[i], t.keys[i])
	}
	end := i + 1
	for end < len(t.keys) && t.keys[end] != 0 && t.home(t.keys[end]) < end {
		end++
	}
	copy(t.keys[i:], t.keys[i+1:end])
	copy(t.ids[i:], t.ids[i+1:end])
	t.keys[end-1] = 0
	if t.homes > 64 && t.n*2 < t.homes {
		t.resize(t.n+t.n/4+8, keyTail)
	}
}

func (t *keyTable) each(f func(key uint64, id uint32)) {
	for i, mixed := range t.keys {
		if mixed != 0 {
			f(mixed*keyUnmix, t.ids[i])
		}
	}
}

// keep removes entries whose block is not held any more.
func (t *keyTable) keep(held func(id uint32) bool) {
	t.names = nil
	for i, mixed := range t.keys {
		if mixed != 0 && !held(t.ids[i]) {
			t.keys[i] = 0
			t.n--
		}
	}
	t.resize(t.n+t.n/10+8, keyTail)
}

// removeID removes the key of a block.
func (t *keyTable) removeID(id uint32) {
	if key, found := t.keyOf(id); found {
		t.remove(key)
	}
}

// keyOf returns the key of a block. Only the first call visits the whole table.
func (t *keyTable) keyOf(id uint32) (key uint64, found bool) {
	if t.names == nil {
		t.names = &keyTable{}
		// at once: sorted keys would all fall into the beginning of a table that grows
		t.names.resize(t.n+t.n/10+8, keyTail)
		t.each(func(key uint64, id uint32) { t.names.put(uint64(id), uint32(mixedKey(key)>>32)) })
	}
	upper, ok := t.names.get(uint64(id))
	if !ok {
		return 0, false
	}
	first := uint64(upper) << 32
	last := t.home(first | 1<<32 - 1)
	for i := t.home(first); i < len(t.keys); i++ {
		mixed := t.keys[i]
		if i > last && (mixed == 0 || uint32(mixed>>32) > upper) {
			return 0, false
		}
		if mixed != 0 && uint32(mixed>>32) == upper && t.ids[i] == id {
			return mixed * keyUnmix, true
		}
	}
	return 0, false
}

// forget removes a block's name from a table of names, unless it has a newer one.
func (t *keyTable) forget(id uint32, mixed uint64) {
	if upper, ok := t.get(uint64(id)); ok && upper == uint32(mixed>>32) {
		t.remove(uint64(id))
	}
}
