package prefixindex

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// lone returns a feed of that capacity by itself, and a look-up of prompts in it.
func lone(t testing.TB, blocks int) (f *Feed, hit func(hashes []uint64) int) {
	t.Helper()
	x := New(Limits{MaxBytes: 1 << 40, RoutedBlocks: 1 << 14, FeedBlocks: blocks, TTL: time.Hour})
	owners := joined(x, 1)
	return owners[0].NewFeed(), func(hashes []uint64) int {
		return int(depths(x, owners, hashes, (*Owner).Reports)[0])
	}
}

func storedFrom(seq sequence, from, to int, tier Tier) BlockEvent {
	e := BlockEvent{Kind: BlocksStored, Keys: seq.keys[from:to], Blocks: seq.blocks[from:to], Root: TokenRoot("", 16), BlockSize: 16, Tier: tier}
	if from > 0 {
		e.HasParent, e.Parent = true, seq.keys[from-1]
	}
	return e
}

// A feed made of what another one holds finds the same prompts, in all tiers, and goes on with the engine's own names: what
// it lacks is at most what was set aside behind a block that the engine had evicted.
func TestSnapshotMakesTheSameFeed(t *testing.T) {
	for seed := range uint64(30) {
		next := rand.New(rand.NewPCG(seed, 11)).IntN
		f, hit := lone(t, 1<<20)
		path := func() []byte {
			path := make([]byte, 1+next(10))
			for i := range path {
				path[i] = byte(min(next(9), 2))
			}
			return path
		}
		event := func() BlockEvent {
			seq := sequenceOf(5, path())
			from := next(len(seq.keys))
			switch next(8) {
			case 0:
				return storedFrom(seq, from, len(seq.keys), Tier(next(2))) // perhaps behind what was never seen
			case 1:
				return BlockEvent{Kind: BlocksStored, Keys: seq.keys, Tier: 1 + Tier(next(3))}
			case 2, 3:
				return BlockEvent{Kind: BlocksRemoved, Keys: seq.keys[from:], Tier: Tier(next(3))}
			}
			return storedFrom(seq, 0, len(seq.keys), Tier(max(next(7)-3, 0)))
		}
		for range 300 {
			f.Apply([]BlockEvent{event()})
		}
		copied, hitCopy := lone(t, 1<<20)
		f.Snapshot().Each(func(e *BlockEvent) { copied.Apply([]BlockEvent{*e}) })
		require.LessOrEqual(t, copied.Stats().Held, f.Stats().Held)
		require.Equal(t, f.m.held, copied.m.held, "what prefixes lead to")
		require.Zero(t, copied.Stats().Unusable)
		for range 100 {
			seq := sequenceOf(0, path())
			depth := hit(seq.hashes)
			require.Equal(t, depth, hitCopy(seq.hashes))
			require.Equal(t, f.owner.Tiers(seq.hashes, int32(depth)), copied.owner.Tiers(seq.hashes, int32(depth)))
		}
		for range 300 {
			e := event()
			f.Apply([]BlockEvent{e})
			copied.Apply([]BlockEvent{e})
			seq := sequenceOf(0, path())
			require.LessOrEqual(t, hitCopy(seq.hashes), hit(seq.hashes))
		}
	}
}
