package prefixindex

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func ids(n int, from uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = from + uint32(i)
	}
	return out
}

func TestTokenMemoryIsBounded(t *testing.T) {
	m := NewTokenMemory(100_000)
	prompts := func(i int) []uint64 { return chain(1, 2, 3, byte(i), byte(i>>8), 4, 5, 6) }
	for i := range 1000 {
		m.Learn(TextPrompt{Blocks: prompts(i), BlockBytes: 512, Bytes: 8 * 512}, []int{16}, &TokenPrompt{IDs: ids(1000, uint32(i))})
		require.Equal(t, 8, m.Known(prompts(i)).TextBlocks)
		require.LessOrEqual(t, m.bytes, 100_000)
		require.LessOrEqual(t, len(m.at), 8*len(m.order))
	}
	require.Equal(t, 3, m.Known(prompts(0)).TextBlocks, "what all prompts begin with stays")
	m.mu.Lock() // a writer is active
	require.Zero(t, m.Known(prompts(0)))
	m.mu.Unlock()
}

func TestLoRA(t *testing.T) {
	f, _ := lone(t, 1<<20)
	x := f.x
	require.Empty(t, x.LoRA("sql"))
	f.Apply([]BlockEvent{{Kind: BlocksStored, Keys: []uint64{2}, Blocks: []uint64{1}, Root: TokenRoot("sql", 16), BlockSize: 16, LoRA: []byte("sql")}})
	require.Equal(t, "sql", x.LoRA("sql"))
	require.Empty(t, x.LoRA("base"))
	for i := range maxLoRAs + 10 {
		x.noteLoRA(fmt.Append(nil, i))
	}
	require.LessOrEqual(t, len(*x.loras.Load()), maxLoRAs)
}
