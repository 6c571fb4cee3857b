package kvstate

import "math/bits"

// keyTable maps the engine's name of a block (its hash) to our number of it: linear probing, 12 bytes a slot, seven to nine
// tenths full.
type keyTable struct {
	keys []uint64 // 0: empty
	ids  []uint32
	n    int
}

// zeroKey stands for the key 0, which some simulator may well use.
const zeroKey = 0x2545f4914f6cdd1d

func (t *keyTable) home(key uint64) int {
	hi, _ := bits.Mul64(key*0x9e3779b97f4a7c15, uint64(len(t.keys)))
	return int(hi)
}

func (t *keyTable) slot(key uint64) (int, bool) {
	if len(t.keys) == 0 {
		return 0, false
	}
	i := t.home(key)
	for t.keys[i] != 0 && t.keys[i] != key {
		i = next(i, len(t.keys))
	}
	return i, t.keys[i] == key
}

func notZero(key uint64) uint64 {
	if key == 0 {
		return zeroKey
	}
	return key
}

func (t *keyTable) get(key uint64) (id uint32, ok bool) {
	i, ok := t.slot(notZero(key))
	if !ok {
		return 0, false
	}
	return t.ids[i], true
}

func (t *keyTable) put(key uint64, id uint32) {
	key = notZero(key)
	i, ok := t.slot(key)
	if !ok {
		if (t.n+1)*10 > len(t.keys)*9 {
			t.resize(t.n + t.n/4 + 8)
			i, _ = t.slot(key)
		}
		t.keys[i] = key
		t.n++
	}
	t.ids[i] = id
}

func (t *keyTable) resize(slots int) {
	old := *t
	t.keys, t.ids = make([]uint64, slots), make([]uint32, slots)
	for i, key := range old.keys {
		if key != 0 {
			to, _ := t.slot(key)
			t.keys[to], t.ids[to] = key, old.ids[i]
		}
	}
}

// remove takes a key out and moves later ones of its run back, so that no tombstones are needed.
func (t *keyTable) remove(key uint64) {
	i, ok := t.slot(notZero(key))
	if !ok {
		return
	}
	t.n--
	size := len(t.keys)
	for j := next(i, size); t.keys[j] != 0; j = next(j, size) {
		if home := t.home(t.keys[j]); (j-home+size)%size >= (j-i+size)%size {
			t.keys[i], t.ids[i] = t.keys[j], t.ids[j]
			i = j
		}
	}
	t.keys[i] = 0
	if size > 64 && t.n*4 < size {
		t.resize(t.n + t.n/4 + 8)
	}
}

func (t *keyTable) each(f func(key uint64, id uint32)) {
	for i, key := range t.keys {
		if key != 0 {
			f(key, t.ids[i])
		}
	}
}

// keep drops entries whose block is not held any more.
func (t *keyTable) keep(held func(id uint32) bool) {
	kept := keyTable{}
	t.each(func(key uint64, id uint32) {
		if held(id) {
			kept.put(key, id)
		}
	})
	*t = kept
}

// removeID takes the key of a block out. It looks at all of them.
func (t *keyTable) removeID(id uint32) {
	for i, key := range t.keys {
		if key != 0 && t.ids[i] == id {
			t.remove(key)
			return
		}
	}
}
