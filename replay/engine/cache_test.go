package engine

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// The cache is compared with one that keeps a list.
func TestCacheAgainstTwin(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	c := NewCache(true)
	var twin []uint64 // oldest first
	use := func(b uint64) {
		twin = append(slices.DeleteFunc(twin, func(o uint64) bool { return o == b }), b)
	}
	for range 5000 {
		prompt := []uint64{random.Uint64N(3), 10 + random.Uint64N(6), 20 + random.Uint64N(6)}[:1+random.IntN(3)]
		if random.IntN(2) == 0 {
			n := 0
			for n < len(prompt) && slices.Contains(twin, prompt[n]) {
				n++
			}
			whole, _ := c.Hit(prompt)
			require.Equal(t, n, whole)
			for i := n - 1; i >= 0; i-- {
				use(prompt[i])
			}
			continue
		}
		limit := 4 + random.IntN(5)
		c.Add(prompt, BlockTokens, limit)
		for _, p := range slices.Backward(prompt) {
			use(p)
		}
		twin = twin[max(len(twin)-limit, 0):]
		require.Len(t, c.at, len(twin))
	}
}

// Events run in order of time, and in the order of their calls if the time is the same.
func TestClock(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var c Clock
	var got []int
	var times []float64
	at := make([]float64, 200)
	for i := range at {
		at[i] = float64(random.IntN(20))
		c.After(at[i], func() { got = append(got, i); times = append(times, c.Now) })
	}
	for c.Step() {
	}
	require.True(t, slices.IsSorted(times))
	require.True(t, slices.IsSortedFunc(got, func(a, b int) int {
		if at[a] != at[b] {
			return int(at[a] - at[b])
		}
		return a - b
	}))
}

// A block of several running requests is in memory once, and none of theirs is evicted.
func TestPinnedBlocks(t *testing.T) {
	c := NewCache(true)
	c.pin([]uint64{1, 2})
	c.pin([]uint64{1, 3})
	require.Len(t, c.pins, 3)
	require.Equal(t, 1, c.unpinned([]uint64{1, 4}))
	c.Add([]uint64{1, 2}, BlockTokens, 10)
	c.Add([]uint64{7, 8, 9}, BlockTokens, 10)
	c.Add(nil, 0, 4) // block 3 is not computed yet, and takes its place as well
	require.Len(t, c.at, 3)
	whole, _ := c.peek([]uint64{1, 2})
	require.Equal(t, 2, whole)
	require.Equal(t, 2, c.pinned)
	c.unpin([]uint64{1, 2})
	require.Equal(t, 1, c.pinned, "another request still has block 1")
	c.Add(nil, 0, 2) // blocks 1 and 3
	whole, _ = c.peek([]uint64{1, 2})
	require.Equal(t, 1, whole, "the pinned one stays")
	require.Len(t, c.at, 1)
}
