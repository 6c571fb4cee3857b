package residency

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// turn plays a turn of a conversation whose prompt has so many blocks of 100 tokens, and returns its conversation.
func turn(t *Table, at, name, blocks int, now float64) *Conversation {
	prompt := make([]uint64, blocks)
	for i := range prompt {
		prompt[i] = uint64(name*1000 + i + 1)
	}
	c := t.Arrive(prompt, blocks, float64(blocks*100), 0, now)
	t.Sent(c, at)
	t.End(c, float64(blocks*100), now)
	return c
}

func TestPromptThatExtendsAnotherContinuesItsConversation(t *testing.T) {
	table := New([]float64{10_000, 10_000})
	c := turn(table, 0, 1, 10, 0)
	require.Same(t, c, turn(table, 0, 1, 12, 5))
	require.NotSame(t, c, turn(table, 0, 2, 12, 6))
	require.NotSame(t, c, turn(table, 0, 1, 10, 7), "an older prompt again: a fork")
}

func TestEngineDiscardsTheLeastRecentlyUsed(t *testing.T) {
	table := New([]float64{3000})
	for name := range 3 {
		turn(table, 0, name, 10, float64(name))
	}
	m := table.Memory(0, 3)
	require.Zero(t, m.Free)
	require.Len(t, m.Old, 3)
	turn(table, 0, 0, 11, 4) // the oldest becomes the newest, and grows: the end of 1 is discarded
	m = table.Memory(0, 4)
	require.Len(t, m.Old, 3)
	require.Equal(t, []float64{900, 1000, 1100}, []float64{m.Old[0].Tokens, m.Old[1].Tokens, m.Old[2].Tokens})
}

func TestCopyOfWhatLivesElsewhereIsWorthNothing(t *testing.T) {
	table := New([]float64{5000, 5000})
	c := table.Arrive([]uint64{1, 2}, 2, 200, 0, 0)
	table.Copy(c, 0) // computed there
	table.Sent(c, 1) // answered here
	table.End(c, 300, 1)
	require.Zero(t, table.Memory(0, 1).Old[0].Back)
	require.Zero(t, table.Memory(0, 1).Returns)
	require.Positive(t, table.Memory(1, 1).Old[0].Back)
}

func TestRunningConversationsAreNotDiscarded(t *testing.T) {
	table := New([]float64{1500})
	c := table.Arrive([]uint64{1}, 1, 1000, 0, 0)
	table.Sent(c, 0)
	require.Empty(t, table.Memory(0, 0).Old)
	turn(table, 0, 2, 10, 1)
	require.InDelta(t, 500, table.Memory(0, 1).Old[0].Tokens, 0, "half of 2 fits beside 1")
	table.End(c, 1000, 2)
	require.Len(t, table.Memory(0, 2).Old, 2)
}

// What is learned comes near to the chance with which conversations really return.
func TestReturnsAreLearned(t *testing.T) {
	for name, chance := range map[string]float64{"agents": 0.9, "single questions": 0} {
		table, random, now := New([]float64{1e9}), rand.New(rand.NewPCG(1, 2)), 0.0
		type due struct {
			at           float64
			name, blocks int
		}
		var waiting []due
		for i := range 3000 {
			now += 0.5
			if i%4 == 0 {
				waiting = append(waiting, due{now, i, 5})
			}
			for k := 0; k < len(waiting); k++ {
				d := waiting[k]
				if d.at > now {
					continue
				}
				turn(table, 0, d.name, d.blocks, now)
				waiting = append(waiting[:k], waiting[k+1:]...)
				if random.Float64() < chance && d.blocks < 40 {
					waiting = append(waiting, due{now + 5 + 10*random.Float64(), d.name, d.blocks + 1})
				}
				k--
			}
			table.sweep(now)
		}
		require.InDelta(t, chance, table.back(0), 0.1, name)
		require.Less(t, table.back(200), 0.1, name)
	}
}

// What is free and what is held add up to the memory, whatever happens.
func TestMemoryAddsUp(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	table, now := New([]float64{20_000, 20_000, 20_000}), 0.0
	sizes := map[int]int{}
	for range 500 {
		now += random.Float64() * 3
		name := random.IntN(30)
		sizes[name] = min(sizes[name]+1+random.IntN(5), 50)
		turn(table, random.IntN(3), name, sizes[name], now)
		at := random.IntN(3)
		used := 0.0
		for _, h := range table.memory[at].held {
			used += h.tokens
		}
		require.LessOrEqual(t, used, 20_000.0)
		m := table.Memory(at, now)
		require.InDelta(t, 20_000-used, m.Free, 1e-6)
		for _, p := range m.Old {
			require.False(t, p.Back < 0 || p.Back > 1 || math.IsNaN(p.Back))
		}
	}
}

func TestOldConversationsAreForgotten(t *testing.T) {
	table := New([]float64{1e9})
	for i := range 100 {
		turn(table, 0, i, 3, float64(i))
	}
	table.sweep(forgotten + 200)
	require.Empty(t, table.all)
	require.Empty(t, table.tips)
	require.Zero(t, table.Live())
}
