package prefixindex

import (
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"unsafe"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// A key that is removed by its block is the one that the block has, and costs no search of the table.
func TestKeyTableRemovesByBlock(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	var table keyTable
	keys := map[uint32]uint64{} // by block
	for step := range uint32(300_000) {
		id := 1 + r.Uint32N(20_000)
		switch r.IntN(4) {
		case 0, 1: // another name, which is the only one
			table.removeID(id)
			keys[id] = r.Uint64()
			table.put(keys[id], id)
		case 2:
			table.removeID(id)
			delete(keys, id)
		case 3:
			if key, ok := keys[id]; ok {
				table.remove(key)
				delete(keys, id)
			}
		}
		if step%100_000 == 99_999 {
			keep := func(id uint32) bool { return id%3 > 0 }
			table.keep(keep)
			for id := range keys {
				if !keep(id) {
					delete(keys, id)
				}
			}
		}
		require.Equal(t, len(keys), table.n)
	}
	for id, key := range keys {
		got, ok := table.get(key)
		require.True(t, ok)
		require.Equal(t, id, got)
	}
	table.removeID(0) // builds the names anew
	require.Equal(t, len(keys), table.names.n)
}

// What it costs to name blocks anew must not grow with what an engine holds.
func BenchmarkRenamed(b *testing.B) {
	for _, held := range []int{10_000, 400_000} {
		b.Run(strconv.Itoa(held), func(b *testing.B) {
			var table keyTable
			for id := range held {
				table.put(uint64(id)*0x9e3779b97f4a7c15+1, uint32(id+1))
			}
			r := rand.New(rand.NewPCG(5, 6))
			table.removeID(1)
			for b.Loop() {
				id := 1 + r.Uint32N(uint32(held))
				table.removeID(id)
				table.put(r.Uint64(), id)
			}
		})
	}
}

// A table of keys behaves like a map, also if many keys belong to the same few slots.
func TestKeyTableAgainstMap(t *testing.T) {
	for name, key := range map[string]func(r *rand.Rand) uint64{
		"random":    func(r *rand.Rand) uint64 { return r.Uint64N(20_000) * 0xd1342543de82ef95 },
		"counted":   func(r *rand.Rand) uint64 { return r.Uint64N(20_000) },
		"one place": func(r *rand.Rand) uint64 { return (1<<63 + r.Uint64N(2_000)) * keyUnmix },
		"the end":   func(r *rand.Rand) uint64 { return -(1 + r.Uint64N(2_000)) * keyUnmix },
	} {
		t.Run(name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 2))
			var table keyTable
			want := map[uint64]uint32{}
			for step := range 200_000 {
				k := key(r)
				if growing := step/20_000%2 == 0; growing == (r.IntN(4) > 0) {
					table.put(k, uint32(step))
					want[k] = uint32(step)
				} else {
					table.remove(k)
					delete(want, k)
				}
				if step%50_000 == 49_999 {
					keep := func(id uint32) bool { return id%3 > 0 }
					table.keep(keep)
					for k, id := range want {
						if !keep(id) {
							delete(want, k)
						}
					}
				}
				id, ok := table.get(k)
				wanted, there := want[k]
				if ok != there || id != wanted || table.n != len(want) { // require alone takes most of the time
					require.Equal(t, there, ok)
					require.Equal(t, wanted, id)
					require.Equal(t, len(want), table.n)
				}
			}
			got := map[uint64]uint32{}
			table.each(func(k uint64, id uint32) { got[k] = id })
			if id, ok := got[zeroKey]; ok && name == "counted" { // the name of 0
				delete(got, zeroKey)
				got[0] = id
			}
			require.Equal(t, want, got)
			require.True(t, slices.IsSorted(slices.DeleteFunc(slices.Clone(table.keys), func(k uint64) bool { return k == 0 })))
		})
	}
}

// A block that one feed holds takes at most BytesPerEntry, even when its tables have just grown.
func TestIndexAllocatesItsBudget(t *testing.T) {
	if budget.Race {
		t.Skip("a million blocks in one goroutine: minutes under the race detector, which finds nothing there")
	}
	x := New(Limits{MaxBytes: 1 << 40, RoutedBlocks: 1 << 14, FeedBlocks: 1 << 30})
	var feeds []*Feed
	for _, o := range joined(x, 4) {
		feeds = append(feeds, o.NewFeed())
	}
	store := x.store
	apply := func(kind EventKind, i int) float64 {
		blocks := randomPrompt(128, uint64(i)<<16)
		feeds[i%4].Apply([]BlockEvent{{Kind: kind, Keys: blocks, Blocks: blocks, BlockSize: 16}})
		bytes := len(*store.chunks.Load())*int(unsafe.Sizeof(blockChunk{})) + len(store.table.Load().groups)*int(unsafe.Sizeof(tableGroup{})) + 4*cap(store.free)
		for _, f := range feeds {
			bytes += 8*len(f.keys.keys) + 4*len(f.keys.ids)
		}
		return float64(bytes) / float64(store.blocks)
	}
	const batches, window = 8192, 6144
	worst := 0.0
	for i := range batches {
		if each := apply(BlocksStored, i); i >= 2048 { // with fewer, a last chunk of 80 KB matters
			worst = max(worst, each)
		}
	}
	t.Logf("at most %.1f bytes a block while it grows to %d", worst, store.blocks)
	require.Less(t, worst, float64(BytesPerEntry))

	full := 0.0 // full engines: for each new block an old one goes
	for i := range window {
		apply(BlocksRemoved, i)
		full = max(full, apply(BlocksStored, batches+i))
	}
	t.Logf("at most %.1f in an index that is full", full)
	require.Less(t, full, float64(BytesPerEntry))
}
