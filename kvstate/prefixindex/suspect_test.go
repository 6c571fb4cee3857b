package prefixindex

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// What is in doubt is kept for a while; what the engine stores again, or stores something behind, is kept for good.
func TestDoubt(t *testing.T) { synctest.Test(t, testDoubt) } // in a time that does not go on by itself

func testDoubt(t *testing.T) {
	f, hit := lone(t, 1<<20)
	a, b, c := sequenceOf(1, []byte{1, 1, 1}), sequenceOf(1, []byte{2, 2, 2}), sequenceOf(1, []byte{3, 3, 3, 3})
	f.Apply([]BlockEvent{storedFrom(a, 0, 3, false), storedFrom(b, 0, 3, false), storedFrom(c, 0, 3, false)})
	require.False(t, f.HasSuspects())
	f.Suspect()
	require.True(t, f.HasSuspects())
	f.Apply([]BlockEvent{storedFrom(b, 0, 2, false), storedFrom(c, 3, 4, false)})
	hits := func() []int { return []int{hit(a.hashes), hit(b.hashes), hit(c.hashes)} }
	f.ExpireSuspects(time.Now().Add(suspectFor - time.Second))
	require.Equal(t, []int{3, 3, 4}, hits())
	f.ExpireSuspects(time.Now().Add(suspectFor + time.Second))
	require.Equal(t, []int{0, 2, 4}, hits())
	require.False(t, f.HasSuspects())
	require.Equal(t, 6, f.Stats().Held)
	f.ExpireSuspects(time.Now().Add(3 * suspectFor))
	require.Equal(t, []int{0, 2, 4}, hits(), "no doubt, no end")

	f.Suspect()
	f.Clear()
	require.False(t, f.HasSuspects())
}

// What follows a block that the engine removes is set aside; what of that is in doubt does not come back with the block.
func TestDoubtBehindARemovedBlock(t *testing.T) {
	f, hit := lone(t, 1<<20)
	seq, other := sequenceOf(5, []byte{0, 1, 2}), sequenceOf(5, []byte{0, 7})
	f.Apply([]BlockEvent{storedFrom(seq, 0, 3, false)})
	f.Suspect()
	f.Apply([]BlockEvent{storedFrom(other, 0, 2, false), {Kind: BlocksRemoved, Keys: seq.keys[:1]}, storedFrom(seq, 0, 1, false)})
	require.Equal(t, []int{1, 2}, []int{hit(seq.hashes), hit(other.hashes)})
}

// Blocks that come out of doubt are in the tier where the engine has just stored: from another one they may have gone.
func TestDoubtOfATier(t *testing.T) {
	f, hit := lone(t, 1<<20)
	seq := sequenceOf(5, []byte{0, 1, 2})
	f.Apply([]BlockEvent{storedFrom(seq, 0, 3, false), storedFrom(seq, 0, 3, true)})
	f.Suspect()
	f.Apply([]BlockEvent{storedFrom(seq, 1, 2, false)})
	f.ExpireSuspects(time.Now().Add(2 * suspectFor))
	require.Equal(t, 2, hit(seq.hashes))
	f.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: seq.keys[:2]}})
	require.Zero(t, f.Stats().Held)
}

// Also a block that so much followed that it was not counted any more goes when its doubt ends, whether time ends it or want
// of room.
func TestDoubtOfABlockWithManyBehind(t *testing.T) {
	many := func() (*Feed, func([]uint64) int, sequence) {
		f, hit := lone(t, 4*kidsMax)
		seq := sequenceOf(5, []byte{0, 1})
		f.Apply([]BlockEvent{storedFrom(seq, 0, 2, false)})
		for i := range uint64(kidsMax + 50) {
			f.Apply([]BlockEvent{{Kind: BlocksStored, Keys: []uint64{i + 1000}, Blocks: []uint64{i + 1000}, HasParent: true, Parent: seq.keys[1], BlockSize: 16}})
		}
		f.Suspect()
		return f, hit, seq
	}
	f, hit, seq := many()
	require.Equal(t, 2, hit(seq.hashes))
	f.ExpireSuspects(time.Now().Add(suspectFor + time.Second))
	require.Zero(t, f.Stats().Held)
	require.Zero(t, f.m.current)

	f, hit, seq = many()
	for i := range f.m.limit {
		f.Apply([]BlockEvent{storedFrom(sequenceOf(5, []byte{1, byte(i), byte(i >> 8)}), 0, 3, false)})
	}
	require.Zero(t, hit(seq.hashes))
	require.False(t, f.HasSuspects())
}

// Doubts that come often do not make one that lasts for ever.
func TestDoubtsDoNotProlongEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, hit := lone(t, 1<<20)
		old, seq := sequenceOf(5, []byte{0, 1, 2}), sequenceOf(5, []byte{3, 4, 5})
		f.Apply([]BlockEvent{storedFrom(old, 0, 3, false)})
		for minutes := range 60 {
			f.Apply([]BlockEvent{storedFrom(seq, 0, 3, false)})
			if minutes%3 == 0 {
				f.Suspect()
			}
			f.ExpireSuspects(time.Now())
			require.Equal(t, 3, hit(seq.hashes))
			if minutes >= 10 {
				require.Zero(t, hit(old.hashes))
			}
			time.Sleep(time.Minute)
		}
	})
}

// What is set aside when a doubt begins does not come back with the block that it waited for: it may be gone as well.
func TestDoubtOfWhatIsSetAside(t *testing.T) {
	f, hit := lone(t, 1<<20)
	seq := sequenceOf(5, []byte{0, 1, 2})
	f.Apply([]BlockEvent{storedFrom(seq, 0, 3, false), {Kind: BlocksRemoved, Keys: seq.keys[:1]}})
	require.Equal(t, 2, f.Stats().Orphans)
	f.Suspect()
	require.Zero(t, f.Stats().Held)
	f.ExpireSuspects(time.Now().Add(2 * suspectFor))
	f.Apply([]BlockEvent{storedFrom(seq, 0, 1, false)})
	require.Equal(t, 1, hit(seq.hashes))
}

// A feed that is suspectSince when it is full stays within its bound by not much.
func TestDoubtIsBounded(t *testing.T) {
	f, _ := lone(t, 100)
	for i := range 300 {
		if i%20 == 0 {
			f.Suspect()
		}
		f.Apply([]BlockEvent{storedFrom(sequenceOf(0, []byte{byte(i), byte(i >> 8), 1, 2, 3, 4, 5}), 0, 7, false)})
		require.LessOrEqual(t, f.Stats().Held, 100)
	}
}
