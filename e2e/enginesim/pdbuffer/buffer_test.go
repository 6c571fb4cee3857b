package pdbuffer

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/engine"
)

// testBuffer counts violations in bad.
func testBuffer(bad *int) *Buffer {
	return New(Options{Ranks: 1, Chunk: DefaultChunk, Tokens: 1024, BlockSize: 16, Timeout: 50 * time.Millisecond, Lease: time.Minute,
		Violate: func(*engine.Violation, string) { *bad++ }})
}

// pushPrompt pushes a prompt, as P does.
func (b *Buffer) pushPrompt(id string, p *engine.Prompt) (err error) {
	Chunks(p.Full, 16, DefaultChunk, p.N, func(key uint64, n int) bool {
		err = b.Alloc(id, id, key, n)
		return err == nil
	})
	if err == nil {
		b.Push(id, id, p.Full, Pushed{N: p.N})
	}
	return err
}

// prompt returns a prompt of n tokens that begins with an earlier one of the same text.
func prompt(text string, n int) *engine.Prompt {
	tokens := engine.NewTokenizer(16, false)
	tokens.Piece([]byte(strings.Repeat(text, n)))
	return tokens.Finish("")
}

// Prompts that each have a part of the buffer wait for each other: routers prevent this by pushing one after the
// other.
func TestLMCacheBufferDeadlock(t *testing.T) {
	bad := 0
	b := testBuffer(&bad)
	require.NoError(t, b.Alloc("a", "a", 1, 40))
	require.NoError(t, b.Alloc("b", "b", 2, 24))
	require.Error(t, b.Alloc("a", "a", 3, 16))
	require.Equal(t, 1, bad)
	b.Timeout = time.Hour
	freed := make(chan error, 1)
	go func() { freed <- b.Alloc("a", "a", 3, 16) }()
	b.mu.Lock()
	b.free(2)
	b.mu.Unlock()
	require.NoError(t, <-freed)
}

// What D's own cache has stays in the buffer. A repeat of it needs no memory, but one more retrieval; a later turn
// leaves what came before; and once it has filled the buffer, nobody can push.
func TestLMCacheBufferKeepsWhatDHas(t *testing.T) {
	bad := 0
	b := testBuffer(&bad)
	p := prompt("abcd", 593) // chunks of 16, 16 and 5 blocks, and the token that is always computed
	for i := range 12 {
		id := fmt.Sprint(i)
		require.NoError(t, b.pushPrompt(id, p))
		local := 37
		if i == 0 {
			local = 0
		}
		found, err := b.Take(id, p, local)
		require.NoError(t, err)
		require.Equal(t, 37, found)
	}
	require.Equal(t, 37, b.Held(), "one copy, though it was pushed eleven times for nothing")

	later := prompt("abcd", 900)
	require.NoError(t, b.pushPrompt("later", later))
	found, err := b.Take("later", later, 37)
	require.NoError(t, err)
	require.Equal(t, 56, found)
	require.Equal(t, 37, b.Held(), "its first two chunks were there, and D took the others")

	require.Error(t, b.pushPrompt("other", prompt("wxyz", 600)))
	require.Equal(t, 1, bad)
	for range 12 {
		_, err = b.Take("evicted", p, 0)
		require.NoError(t, err)
	}
	require.Equal(t, 16, b.Held(), "as many retrievals as pushes have freed it")
}
