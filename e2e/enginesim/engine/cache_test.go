package engine

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func promptOf(text, salt string) *Prompt {
	t := NewTokenizer(4, false)
	t.Piece([]byte(text))
	return t.Finish(salt)
}

func grab(t testing.TB, p *Pool, pr *Prompt, answer int) Grant {
	t.Helper()
	g, err := p.Admit(t.Context(), []*Prompt{pr}, []int{pr.N + answer - 1}, func(int64) {})
	require.NoError(t, err)
	return g[0]
}

func TestPrefixCache(t *testing.T) {
	p := NewPool(64, 4)
	first := promptOf(strings.Repeat("abcd", 18), "") // 18 tokens: four full blocks and a half
	g := grab(t, p, first, 1)
	require.Equal(t, []int32{1, 2, 3, 4, 5}, g.Blocks)
	require.Zero(t, g.Hits)
	p.Write(&g, first, 0, nil)
	p.Free(g.Blocks)
	require.Zero(t, p.Usage())

	require.Equal(t, 4, grab(t, p, first, 1).Hits)
	require.Zero(t, grab(t, p, promptOf(strings.Repeat("abcd", 18), "salt"), 1).Hits)
	require.Equal(t, 2, grab(t, p, promptOf(strings.Repeat("abcd", 11)+"xxxx", ""), 1).Hits)
	whole := promptOf(strings.Repeat("abcd", 16), "")
	require.Equal(t, 3, grab(t, p, whole, 1).Hits, "the last token is always computed")
}

func TestLeastRecentlyUsedGoesFirst(t *testing.T) {
	p := NewPool(1+6, 4)
	a, b, c := promptOf(strings.Repeat("aaaa", 9), ""), promptOf(strings.Repeat("bbbb", 9), ""), promptOf(strings.Repeat("cccc", 9), "")
	use := func(pr *Prompt) int {
		g := grab(t, p, pr, 1)
		p.Write(&g, pr, g.Hits, nil)
		p.Free(g.Blocks)
		return g.Hits
	}
	require.Zero(t, use(a))
	require.Zero(t, use(b))
	require.Equal(t, 2, use(a))
	require.Zero(t, use(c), "takes b's blocks")
	require.Equal(t, 2, use(a))
	require.Zero(t, use(b))
}

// TestPoolTwin drives the pool with random sequences and compares it with a map.
func TestPoolTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	p := NewPool(97, 4)
	index := map[uint64]int32{} // key to block, as vLLM's cached_block_hash_to_block
	keyOf := map[int32]uint64{}
	type running struct {
		g  Grant
		pr *Prompt
	}
	var live []running
	for step := range 4000 {
		if len(live) > 0 && (r.IntN(2) == 0 || len(live) > 4) {
			i := r.IntN(len(live))
			p.Free(live[i].g.Blocks)
			live = append(live[:i], live[i+1:]...)
			continue
		}
		var text strings.Builder
		for range 1 + r.IntN(60) {
			fmt.Fprintf(&text, "%04d", r.IntN(2))
		}
		pr := promptOf(text.String(), "")
		need := BlocksFor(pr.N, 4)
		if need > p.freeCount {
			continue
		}
		want := 0
		for want < min((pr.N-1)/4, len(pr.Full)) {
			if _, ok := index[pr.key(want)]; !ok {
				break
			}
			want++
		}
		g := grab(t, p, pr, 1)
		require.Equal(t, want, g.Hits, "step %d", step)
		for i, id := range g.Blocks {
			if i < g.Hits {
				require.Equal(t, index[pr.key(i)], id)
				continue
			}
			if k, ok := keyOf[id]; ok && index[k] == id {
				delete(index, k)
			}
			delete(keyOf, id)
		}
		p.Write(&g, pr, g.Hits, nil)
		for i := g.Hits; i < len(pr.Full); i++ {
			if _, ok := index[pr.key(i)]; !ok {
				index[pr.key(i)] = g.Blocks[i]
				keyOf[g.Blocks[i]] = pr.key(i)
			}
		}
		for i, got := range p.Read(g.Blocks, pr.Content) {
			require.Equal(t, pr.Content(i), got)
		}
		live = append(live, running{g, pr})
	}
	for _, l := range live {
		p.Free(l.g.Blocks)
	}
	require.Equal(t, 96, p.freeCount)
}

func TestAdmissionQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := NewPool(1+10, 4)
		big := promptOf(strings.Repeat("abcd", 40), "")
		holder := grab(t, p, big, 1)
		var queued atomic.Int64
		order := make(chan int, 3)
		for i := range 3 {
			go func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				pr := promptOf(strings.Repeat(fmt.Sprintf("%04d", i), 20), "")
				g, err := p.Admit(t.Context(), []*Prompt{pr}, []int{pr.N}, func(d int64) { queued.Add(d) })
				if err == nil {
					order <- i
					time.Sleep(time.Millisecond)
					p.Free(g[0].Blocks)
				}
			}()
		}
		time.Sleep(5 * time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 3, queued.Load())
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := p.Admit(ctx, []*Prompt{promptOf("abcd", "")}, []int{1}, func(int64) {})
		require.ErrorIs(t, err, context.DeadlineExceeded, "first come, first served")
		p.Free(holder.Blocks)
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		require.Zero(t, queued.Load())
		for i := range 3 {
			require.Equal(t, i, <-order)
		}
		require.Equal(t, 10, p.freeCount)
	})
}

// What GPU memory drops is still in CPU memory, and loaded from there with the right content, until that is full too.
func TestCPUMemory(t *testing.T) {
	p := NewPool(1+6, 4)
	p.host = newHostTier(7)
	use := func(letter string) (hits, loaded int) {
		pr := promptOf(strings.Repeat(letter, 4*13), "") // three full blocks and a token
		g := grab(t, p, pr, 1)
		require.Equal(t, pr.Full[:g.Hits], p.Read(g.Blocks[:g.Hits], func(i int) uint64 { return pr.Full[i] }))
		p.Write(&g, pr, g.Hits, nil)
		p.Free(g.Blocks)
		return g.Hits, g.Loaded
	}
	for _, step := range []struct {
		prompt       string
		hits, loaded int
	}{
		{"a", 0, 0}, {"b", 0, 0},
		{"a", 3, 1}, // its last block made room in GPU memory
		{"b", 3, 1},
		{"c", 0, 0}, // of nine blocks seven fit: the two that were used longest ago are a's first
		{"b", 3, 1},
		{"a", 0, 0},
	} {
		hits, loaded := use(step.prompt)
		require.Equal(t, []int{step.hits, step.loaded}, []int{hits, loaded}, "%+v", step)
	}
	require.True(t, p.ResetPrefixCache())
	hits, _ := use("a")
	require.Zero(t, hits)
}
