package prefixindex

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// feedTwin is a feed in its simplest form: blocks by the engine's name, and everything is derived again after every
// event.
type feedTwin struct {
	blocks  map[uint64]*twinBlock
	waiting map[uint64]*twinBlock // those of them whose hash is unknown
}

func newFeedTwin() feedTwin { return feedTwin{map[uint64]*twinBlock{}, map[uint64]*twinBlock{}} }

type twinBlock struct {
	parent uint64
	block  uint64
	media  uint32
	hash   uint64
	hashed bool
}

func (t feedTwin) apply(e *BlockEvent) {
	switch e.Kind {
	case BlocksStored:
		parent, has := e.Parent, e.HasParent
		for i, key := range e.Keys {
			if len(e.Blocks) == 0 {
				if b := t.blocks[key]; b != nil {
					b.media |= e.media()
				}
				continue
			}
			b := t.blocks[key]
			if b == nil {
				b = &twinBlock{}
				t.blocks[key], t.waiting[key] = b, b
			}
			b.media |= e.media()
			if !b.hashed {
				b.parent, b.block = parent, e.Blocks[i]
			}
			if !has {
				b.hash, b.hashed = ChainTokenBlock(e.Root, b.block), true
				delete(t.waiting, key)
			}
			parent, has = key, true
			t.settle()
		}
	case BlocksRemoved:
		for _, key := range e.Keys {
			if b := t.blocks[key]; b != nil {
				if b.media &^= e.media(); b.media == 0 {
					delete(t.blocks, key)
					delete(t.waiting, key)
				}
			}
		}
	case AllBlocksCleared:
		clear(t.blocks)
		clear(t.waiting)
	}
}

func (t feedTwin) settle() {
	for again := true; again; {
		again = false
		for key, b := range t.waiting {
			if p := t.blocks[b.parent]; p != nil && p.hashed {
				b.hash, b.hashed, again = ChainTokenBlock(p.hash, b.block), true, true
				delete(t.waiting, key)
			}
		}
	}
}

func (t feedTwin) hit(hashes []uint64) int {
	held := make([]bool, len(hashes))
	for _, b := range t.blocks {
		if i := slices.Index(hashes, b.hash); b.hashed && i >= 0 {
			held[i] = true
		}
	}
	if i := slices.Index(held, false); i >= 0 {
		return i
	}
	return len(hashes)
}

// tiers returns [Held] of a prompt's first blocks. ordered is false if a block is in a faster tier than one before it.
func (t feedTwin) tiers(hashes []uint64, hit int) (held Held, ordered bool) {
	fastest, last := make([]Tier, hit), TierGPU
	for _, b := range t.blocks {
		if i := slices.Index(hashes[:hit], b.hash); b.hashed && i >= 0 {
			fastest[i] = Tier(bits.TrailingZeros32(b.media))
		}
	}
	for _, tier := range fastest {
		if tier < last {
			return held, false
		}
		last = tier
		for ; tier < Tiers; tier++ {
			held[tier]++
		}
	}
	return held, true
}

// sequence is a prompt that is a path in a tree, as token blocks and as what one engine calls them.
type sequence struct{ blocks, hashes, keys []uint64 }

func sequenceOf(engine uint64, path []byte) sequence {
	var s sequence
	h := TokenRoot("", 16)
	for _, p := range path {
		block := uint64(p)*0x9e3779b97f4a7c15 + 1
		h = ChainTokenBlock(h, block)
		s.blocks, s.hashes, s.keys = append(s.blocks, block), append(s.hashes, h), append(s.keys, (h^engine)*0xff51afd7ed558ccd)
	}
	return s
}

// feedProgram runs random events of several engines on feeds and twins, with events lost, repeated and out of order, and
// compares look-ups.
func feedProgram(t *testing.T, next func(n int) int, steps, compareEvery int) {
	x := New(testLimits(1 << 14))
	owners := joined(x, 3)
	feeds, twins := make([]*Feed, 5), make([]feedTwin, 5) // endpoint 0 has three ranks
	owner := []int{0, 0, 0, 1, 2}
	for i := range feeds {
		feeds[i], twins[i] = owners[owner[i]].NewFeed(), newFeedTwin()
	}
	path := func() []byte {
		path := make([]byte, 1+next(10))
		for i := range path {
			path[i] = byte(min(next(9), 2))
		}
		return path
	}
	for step := range steps {
		f := next(len(feeds))
		seq := sequenceOf(uint64(f), path())
		var e BlockEvent
		switch op := next(20); {
		case op < 11: // stores the end of a sequence, whose beginning may be unknown
			from := next(len(seq.keys) + 1)
			if next(3) > 0 {
				from = 0
			}
			if from == len(seq.keys) {
				continue
			}
			e = BlockEvent{Kind: BlocksStored, Keys: seq.keys[from:], Blocks: seq.blocks[from:], Root: TokenRoot("", 16), BlockSize: 16, Tier: Tier(max(next(12)-8, 0))}
			if from > 0 {
				e.HasParent, e.Parent = true, seq.keys[from-1]
			}
		case op == 11: // a copy in another tier, of which only the name is reported
			e = BlockEvent{Kind: BlocksStored, Keys: seq.keys[next(len(seq.keys)):], Tier: 1 + Tier(next(3)), HasParent: false}
		case op < 18: // removes from the end, one somewhere, or from the beginning
			from := next(len(seq.keys))
			e = BlockEvent{Kind: BlocksRemoved, Keys: seq.keys[from:], Tier: Tier(max(next(7)-3, 0))}
			if next(2) == 0 {
				e.Keys = seq.keys[from : from+1]
			}
		case op == 18 && next(40) == 0:
			e = BlockEvent{Kind: AllBlocksCleared}
		case op == 19 && next(40) == 0:
			feeds[f].Close()
			feeds[f], twins[f] = owners[owner[f]].NewFeed(), newFeedTwin()
			continue
		}
		feeds[f].Apply([]BlockEvent{e})
		twins[f].apply(&e)
		if step%compareEvery > 0 {
			continue
		}
		require.Equal(t, len(twins[f].blocks), feeds[f].Stats().Held)
		want := sequenceOf(0, path())
		got := depths(x, owners, want.hashes, (*Owner).Reports)
		best := make([]int, 3)
		for i, twin := range twins {
			best[owner[i]] = max(best[owner[i]], twin.hit(want.hashes))
		}
		for i, hit := range best {
			require.Equal(t, int32(hit), got[i], "step %d, endpoint %d", step, i)
			held := owners[i].Tiers(want.hashes, got[i])
			require.True(t, slices.IsSorted(held[:]) && held[Tiers-1] == got[i], "step %d, endpoint %d: %v", step, i, held)
			if exact, ordered := twins[2+i].tiers(want.hashes, hit); i > 0 && ordered {
				require.Equal(t, exact, held, "step %d, endpoint %d", step, i)
			}
		}
	}
	for _, f := range feeds {
		f.Close()
	}
	require.Equal(t, Stats{Members: 3}, x.Stats(), "what nobody holds is forgotten")
}

func TestFeedAgainstTwin(t *testing.T) {
	steps := 1_000_000
	if testing.Short() || budget.Race {
		steps = 30_000
	}
	feedProgram(t, rand.New(rand.NewPCG(1, 2)).IntN, steps, 97)
	for seed := range uint64(20) {
		feedProgram(t, rand.New(rand.NewPCG(seed, 3)).IntN, 1000, 1)
	}
}

func FuzzFeed(f *testing.F) {
	f.Add([]byte("\x00\x05\x01\x01\x01\x01\x01\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, program []byte) { feedProgram(t, programOf(program), min(len(program)/8+1, 300), 1) })
}

// Engines whose hashes are small numbers (simulators) reuse a name for another block, or have two for one.
func TestFeedWithNamesUsedAgain(t *testing.T) {
	f, hit := lone(t, 1<<20)
	a, b := sequenceOf(0, []byte{1, 1, 1}), sequenceOf(0, []byte{2, 2})
	store := func(blocks []uint64, keys ...uint64) BlockEvent {
		return BlockEvent{Kind: BlocksStored, Keys: keys, Blocks: blocks, Root: TokenRoot("", 16), BlockSize: 16}
	}
	f.Apply([]BlockEvent{store(a.blocks, 1, 0, 3)})
	require.Equal(t, 3, hit(a.hashes))
	f.Apply([]BlockEvent{store(b.blocks, 0, 5)}) // 0 is another block now
	require.Equal(t, []int{1, 2}, []int{hit(a.hashes), hit(b.hashes)})
	f.Apply([]BlockEvent{store(a.blocks, 1, 7, 3)})
	require.Equal(t, []int{3, 2}, []int{hit(a.hashes), hit(b.hashes)})
	f.Apply([]BlockEvent{store(a.blocks, 11, 7, 3)}) // 11 is what was 1
	f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: []uint64{1}}})
	require.Equal(t, 3, hit(a.hashes), "nobody is called 1 any more")
	f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: []uint64{11}}})
	require.Equal(t, 0, hit(a.hashes))
	require.Equal(t, FeedStats{Stored: 11, Removed: 2, Held: 4, Orphans: 2}, f.Stats())
}

// A feed stays within its bound, and keeps its newest blocks.
func TestFeedIsBounded(t *testing.T) {
	f, hit := lone(t, 100)
	for i := range 300 {
		seq := sequenceOf(0, []byte{byte(i), byte(i >> 8), 1, 2, 3, 4, 5})
		f.Apply([]BlockEvent{storedFrom(seq, 0, 7, TierGPU)})
		require.Equal(t, 7, hit(seq.hashes))
		require.LessOrEqual(t, f.Stats().Held, 100)
	}
	require.Equal(t, []int{16}, f.x.TokenBlockSizes())
	f.Close()
	require.Empty(t, f.x.TokenBlockSizes())
	require.Zero(t, hit(sequenceOf(0, []byte{43, 1, 1, 2, 3, 4, 5}).hashes))
}

// A block whose parent was lost is found when the parent comes after all.
func TestFeedUnknownParents(t *testing.T) {
	f, hit := lone(t, 1<<20)
	seq := sequenceOf(9, []byte{1, 2, 3, 4, 5, 6})
	part := func(from, to int) BlockEvent { return storedFrom(seq, from, to, TierGPU) }
	var got []string
	for _, e := range []BlockEvent{part(4, 6), part(2, 4), part(0, 1), part(1, 2), {Kind: BlocksRemoved, Keys: seq.keys[2:3]}, part(2, 3)} {
		f.Apply([]BlockEvent{e})
		got = append(got, fmt.Sprintf("%d of %d, %d orphans", hit(seq.hashes), f.Stats().Held, f.Stats().Orphans))
	}
	require.Equal(t, []string{"0 of 2, 2 orphans", "0 of 4, 4 orphans", "1 of 5, 4 orphans", "6 of 6, 0 orphans", "2 of 5, 3 orphans", "6 of 6, 0 orphans"}, got)
}

// Blocks that a feed cannot record are counted: those beyond its capacity, orphans beyond their limit, and copies of
// unknown blocks.
func TestFeedCountsWhatItCannotTake(t *testing.T) {
	numbered := func(from, n int) (out []uint64) {
		for i := range n {
			out = append(out, uint64(from+i))
		}
		return out
	}
	for what, c := range map[string]struct {
		event BlockEvent
		want  FeedStats
	}{
		"all has room":           {BlockEvent{Keys: numbered(1, 50), Blocks: numbered(1001, 50)}, FeedStats{Stored: 50, Held: 50}},
		"more than all its room": {BlockEvent{Keys: numbered(1, 53), Blocks: numbered(1001, 53)}, FeedStats{Stored: 53, Held: 50, Unusable: 3}},
		"copies of unknown ones": {BlockEvent{Keys: numbered(1, 4), Tier: TierCPU}, FeedStats{Stored: 4, Unusable: 4}},
		"behind a lost one":      {BlockEvent{Keys: numbered(1, 50), Blocks: numbered(1001, 50), HasParent: true, Parent: 9999}, FeedStats{Stored: 50, Held: 50, Orphans: 50}},
	} {
		f, _ := lone(t, 100)
		c.event.Kind, c.event.Root, c.event.BlockSize = BlocksStored, TokenRoot("", 16), 16
		f.Apply([]BlockEvent{c.event})
		require.Equal(t, c.want, f.Stats(), what)
		f.Close()
	}
	f, _ := lone(t, 100)
	for i := range 70 { // 64 may wait
		f.Apply([]BlockEvent{{Kind: BlocksStored, Keys: numbered(1+i, 1), Blocks: numbered(1001+i, 1), Root: TokenRoot("", 16), BlockSize: 16, HasParent: true, Parent: uint64(5000 + i)}})
	}
	require.Equal(t, FeedStats{Stored: 70, Held: 64, Orphans: 64, Unusable: 6}, f.Stats())
}

func TestTokenBlocks(t *testing.T) {
	ids := make([]uint32, 40)
	for i := range ids {
		ids[i] = uint32(i) * 7919
	}
	base := TokenPrompt{IDs: ids}
	hashes := base.Blocks(nil, 16)
	require.Len(t, hashes, 2, "full blocks only")
	require.Len(t, base.Blocks(nil, 32), 1)
	require.Empty(t, base.Blocks(nil, 0))
	for _, other := range []TokenPrompt{{IDs: ids, LoRA: "a"}, {IDs: ids, Salt: SaltKey("a")}, {IDs: ids[1:]}} {
		require.NotEqual(t, hashes[1], other.Blocks(nil, 16)[1])
	}
}

// What follows a removed block is found among its own followers, whatever else was stored, removed, renamed and
// forgotten before: the kin that a feed keeps are those that its blocks have.
func TestKinAreTrue(t *testing.T) {
	f, _ := lone(t, 2000)
	r := rand.New(rand.NewPCG(7, 8))
	detached := 0
	for range 4000 {
		seq := sequenceOf(0, []byte{byte(r.IntN(3)), byte(r.IntN(3)), byte(r.IntN(4)), byte(r.IntN(4)), byte(r.IntN(4)), byte(r.IntN(4))})
		if r.IntN(2) == 0 {
			f.Apply([]BlockEvent{storedFrom(seq, 0, 1+r.IntN(6), TierGPU)})
		} else {
			f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: []uint64{seq.keys[r.IntN(6)]}}})
		}
		if f.kin == nil {
			continue
		}
		detached++
		want := map[uint32][]uint32{}
		f.keys.each(func(_ uint64, id uint32) {
			if parent := f.x.parentOf(id); parent != 0 {
				want[parent] = append(want[parent], id)
			}
		})
		for parent, ids := range want {
			var got []uint32
			for id := f.kin[parent].first; id != 0; id = f.kin[id].next {
				got = append(got, id)
			}
			require.ElementsMatch(t, ids, got)
		}
		for id, k := range f.kin {
			require.True(t, k.first == 0 || len(want[id]) > 0)
		}
	}
	require.Greater(t, detached, 1000)
}

// What it costs to remove a block before those that follow it must not grow with what an engine holds.
func BenchmarkDetached(b *testing.B) {
	for _, held := range []int{10_000, 200_000} {
		b.Run(strconv.Itoa(held), func(b *testing.B) {
			f, _ := lone(b, 1<<20)
			event := func(key uint64, parent uint64) BlockEvent {
				return BlockEvent{Kind: BlocksStored, Keys: []uint64{key}, Blocks: []uint64{key}, Root: TokenRoot("", 16), BlockSize: 16, HasParent: parent > 0, Parent: parent}
			}
			for i := range held {
				f.Apply([]BlockEvent{event(uint64(i+1), uint64(i/4*4)*uint64(min(i%4, 1)))})
			}
			first, second := uint64(1<<40), uint64(1<<40+1)
			f.Apply([]BlockEvent{event(first, 0), event(second, first)})
			f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: []uint64{first}}, event(first, 0)}) // the first makes the tables
			for b.Loop() {
				f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: []uint64{first}}, event(first, 0)})
			}
		})
	}
}

// What members for routed prompts leave of the memory is the feeds'.
func TestFeedsGetWhatOthersLeave(t *testing.T) {
	const blocks = 10_000
	x := New(Limits{MaxBytes: blocks * BytesPerEntry, RoutedBlocks: 100, FeedBlocks: 1 << 20})
	owners := joined(x, 4)
	feed := owners[0].NewFeed()
	require.Equal(t, blocks-5*100, feed.m.limit, "four owners, and the prompts routed moments ago to the one with a feed")
	other := owners[1].NewFeed()
	require.Equal(t, (blocks-6*100)/2, feed.m.limit)
	owners[2].Keeps(1 << 20)
	require.Equal(t, blocks/8, owners[2].routed.limit, "an equal share")
	require.Equal(t, (blocks-5*100-blocks/8)/2, feed.m.limit)
	other.Close()
	x.Resize()
	require.Greater(t, feed.m.limit, blocks/2)
}

// A feed forgets nothing that its engine holds while that has room, however much the engine has stored in all. An engine
// that holds more loses its oldest blocks, and never has more than the feed's limit.
func TestFeedKeepsWhatHasRoom(t *testing.T) {
	const prompt, limit = 50, 1000
	for _, holds := range []int{300, 550, 950, 1200} {
		f, hit := lone(t, limit)
		var held []sequence
		for i := range 200 {
			path := make([]byte, prompt)
			path[0], path[1] = byte(i), byte(i>>4)
			seq := sequenceOf(3, path)
			if len(held)*prompt+prompt > holds {
				f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: held[0].keys}})
				held = held[1:]
			}
			f.Apply([]BlockEvent{storedFrom(seq, 0, prompt, TierGPU)})
			held = append(held, seq)
			require.LessOrEqual(t, f.Stats().Held, limit)
			if holds <= limit {
				require.Equal(t, len(held)*prompt, f.Stats().Held)
			}
			require.Equal(t, prompt, hit(seq.hashes))
		}
		require.Equal(t, holds <= limit, hit(held[0].hashes) == prompt, "an engine that holds %d", holds)
	}
}
