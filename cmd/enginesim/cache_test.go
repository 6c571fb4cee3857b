package main

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

func promptOf(text, salt string) *prompt {
	t := newTokenizer(4, false)
	t.piece([]byte(text))
	return t.finish(salt)
}

func grab(t testing.TB, p *pool, pr *prompt, answer int) grant {
	t.Helper()
	g, err := p.admit(t.Context(), []*prompt{pr}, []int{pr.n + answer - 1}, func(int64) {})
	require.NoError(t, err)
	return g[0]
}

func TestPrefixCache(t *testing.T) {
	p := newPool(64, 4)
	first := promptOf(strings.Repeat("abcd", 18), "") // 18 tokens: four full blocks and a half
	g := grab(t, p, first, 1)
	require.Equal(t, []int32{1, 2, 3, 4, 5}, g.blocks)
	require.Zero(t, g.hits)
	p.write(&g, first, 0, nil)
	p.free(g.blocks)
	require.Zero(t, p.usage())

	require.Equal(t, 4, grab(t, p, first, 1).hits)
	require.Zero(t, grab(t, p, promptOf(strings.Repeat("abcd", 18), "salt"), 1).hits)
	require.Equal(t, 2, grab(t, p, promptOf(strings.Repeat("abcd", 11)+"xxxx", ""), 1).hits)
	whole := promptOf(strings.Repeat("abcd", 16), "")
	require.Equal(t, 3, grab(t, p, whole, 1).hits, "the last token is always computed")
}

func TestLeastRecentlyUsedGoesFirst(t *testing.T) {
	p := newPool(1+6, 4)
	a, b, c := promptOf(strings.Repeat("aaaa", 9), ""), promptOf(strings.Repeat("bbbb", 9), ""), promptOf(strings.Repeat("cccc", 9), "")
	use := func(pr *prompt) int {
		g := grab(t, p, pr, 1)
		p.write(&g, pr, g.hits, nil)
		p.free(g.blocks)
		return g.hits
	}
	require.Zero(t, use(a))
	require.Zero(t, use(b))
	require.Equal(t, 2, use(a))
	require.Zero(t, use(c), "takes b's blocks")
	require.Equal(t, 2, use(a))
	require.Zero(t, use(b))
}

// TestPoolTwin drives the pool with random sequences and checks it against a map.
func TestPoolTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	p := newPool(97, 4)
	index := map[uint64]int32{} // key to block, as vLLM's cached_block_hash_to_block
	keyOf := map[int32]uint64{}
	type running struct {
		g  grant
		pr *prompt
	}
	var live []running
	for step := range 4000 {
		if len(live) > 0 && (r.IntN(2) == 0 || len(live) > 4) {
			i := r.IntN(len(live))
			p.free(live[i].g.blocks)
			live = append(live[:i], live[i+1:]...)
			continue
		}
		var text strings.Builder
		for range 1 + r.IntN(60) {
			fmt.Fprintf(&text, "%04d", r.IntN(2))
		}
		pr := promptOf(text.String(), "")
		need := blocksFor(pr.n, 4)
		if need > p.freeCount {
			continue
		}
		want := 0
		for want < min((pr.n-1)/4, len(pr.full)) {
			if _, ok := index[pr.key(want)]; !ok {
				break
			}
			want++
		}
		g := grab(t, p, pr, 1)
		require.Equal(t, want, g.hits, "step %d", step)
		for i, id := range g.blocks {
			if i < g.hits {
				require.Equal(t, index[pr.key(i)], id)
				continue
			}
			if k, ok := keyOf[id]; ok && index[k] == id {
				delete(index, k)
			}
			delete(keyOf, id)
		}
		p.write(&g, pr, g.hits, nil)
		for i := g.hits; i < len(pr.full); i++ {
			if _, ok := index[pr.key(i)]; !ok {
				index[pr.key(i)] = g.blocks[i]
				keyOf[g.blocks[i]] = pr.key(i)
			}
		}
		for i, got := range p.read(g.blocks, pr.content) {
			require.Equal(t, pr.content(i), got)
		}
		live = append(live, running{g, pr})
	}
	for _, l := range live {
		p.free(l.g.blocks)
	}
	require.Equal(t, 96, p.freeCount)
}

func TestAdmissionQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(1+10, 4)
		big := promptOf(strings.Repeat("abcd", 40), "")
		holder := grab(t, p, big, 1)
		var queued atomic.Int64
		order := make(chan int, 3)
		for i := range 3 {
			go func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				pr := promptOf(strings.Repeat(fmt.Sprintf("%04d", i), 20), "")
				g, err := p.admit(t.Context(), []*prompt{pr}, []int{pr.n}, func(d int64) { queued.Add(d) })
				if err == nil {
					order <- i
					time.Sleep(time.Millisecond)
					p.free(g[0].blocks)
				}
			}()
		}
		time.Sleep(5 * time.Millisecond)
		synctest.Wait()
		require.EqualValues(t, 3, queued.Load())
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err := p.admit(ctx, []*prompt{promptOf("abcd", "")}, []int{1}, func(int64) {})
		require.ErrorIs(t, err, context.DeadlineExceeded, "first come, first served")
		p.free(holder.blocks)
		time.Sleep(10 * time.Millisecond)
		synctest.Wait()
		require.Zero(t, queued.Load())
		for i := range 3 {
			require.Equal(t, i, <-order)
		}
		require.Equal(t, 10, p.freeCount)
	})
}

func TestLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(64, 4)
		l := newLedger(p, 30*time.Second)
		keep := func(id string) grant {
			g := grab(t, p, promptOf(strings.Repeat(id, 10), ""), 1)
			l.keep(id, "x", g.blocks, 10)
			return g
		}
		keep("aaaa")
		time.Sleep(29 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 3, l.held.Load())
		l.extend("aaaa") // two thirds of a lease from now
		time.Sleep(19 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 3, l.held.Load())
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Zero(t, l.held.Load())
		require.EqualValues(t, 1, l.expired.Load())
		l.extend("aaaa")

		keep("bbbb")
		require.True(t, l.release("bbbb"))
		require.False(t, l.release("bbbb"))
		g := keep("cccc")
		req := pullRequest{engineID: "e", requestID: "cccc", xid: "x", blockSize: 4, tokens: 10, ids: g.blocks, want: make([]uint64, 3)}
		require.Empty(t, l.pull("e", &req).refused)
		require.Zero(t, l.held.Load())
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 1, l.expired.Load())
		require.Equal(t, 63, p.freeCount)
		require.Equal(t, "released", l.past["bbbb"])
		l.forget()
		require.Empty(t, l.past)
	})
}

func TestLedgerRemembersBounded(t *testing.T) {
	l := newLedger(newPool(4, 4), time.Minute)
	for i := range rememberedHandOvers + 100 {
		id := fmt.Sprint(i)
		l.keep(id, "", nil, 0)
		l.release(id)
	}
	require.Len(t, l.past, rememberedHandOvers)
}
