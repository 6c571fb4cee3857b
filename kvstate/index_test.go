package kvstate

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// chain makes block hashes of a prompt that is a path in a tree: prompts with a common beginning share hashes.
func chain(path ...byte) []uint64 {
	hashes, h := make([]uint64, len(path)), uint64(14695981039346656037)
	for i, p := range path {
		h = (h ^ uint64(p+1)) * 1099511628211
		hashes[i] = h
	}
	return hashes
}

// long returns a prompt of n blocks that branches off the one with branch 0 after shared of them.
func long(n, shared int, branch byte) []uint64 {
	path := make([]byte, n)
	for i := shared; i < n; i++ {
		path[i] = branch
	}
	return chain(path...)
}

func TestIndexForgets(t *testing.T) {
	s := New(Options{EndpointBlocks: 64})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a", Role: RolePrefill}, {Addr: "d", Role: RoleDecode}})
	p := s.Pool("p")
	hit := func(hashes []uint64) int {
		var v View
		s.View(p, hashes, &v)
		return v.Endpoints[0].Hit
	}
	kept, lost := long(8, 0, 1), long(8, 0, 2)
	s.Routed(p, p.Endpoint("a"), kept)
	s.Routed(p, p.Endpoint("a"), lost)
	require.Equal(t, 8, hit(kept))
	for i := range byte(12) { // 96 new blocks, three generations
		s.Routed(p, p.Endpoint("a"), long(8, 0, 10+i))
		s.Routed(p, p.Endpoint("a"), kept)
	}
	require.Equal(t, 8, hit(kept), "what is asked for again stays")
	require.Equal(t, 0, hit(lost))
	require.LessOrEqual(t, p.IndexStats().Blocks, 64)
}

// An engine that counts from 0 again has an empty cache, whichever replica scraped it. Others keep theirs.
func TestIndexForgetsARestartedEngine(t *testing.T) {
	now := time.Unix(1e9, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "p"}, pd(2, 1))
	p := s.Pool("p")
	hits := func(hashes []uint64) (hits []int) {
		var v View
		s.View(p, hashes, &v)
		for _, c := range v.Endpoints {
			hits = append(hits, c.Hit)
		}
		return hits
	}
	scraped := func(w AnswerCounters) Signals {
		now = now.Add(2 * time.Second)
		return Signals{Running: 0, Waiting: 0, KVUsage: .5, KVTokens: 1e6, At: now, Answers: w}
	}
	many := AnswerCounters{Answers: 7, Tokens: 7, Generated: 7, Gaps: 0, GapTime: time.Microsecond + 1}
	prompt := long(8, 0, 1)
	for name, next := range map[string]AnswerCounters{
		"nothing counted yet": {}, "one request since": {Answers: 1, Tokens: 1, Generated: 1}, "streams alone": {Generated: 3},
	} {
		t.Run(name, func(t *testing.T) {
			for i, report := range []func(*Endpoint, Signals){s.Observe, func(e *Endpoint, g Signals) { s.ApplyObserved(e, g) }} {
				for e := range 2 {
					s.Observe(p.Endpoints()[e], scraped(many))
					s.Routed(p, p.Endpoints()[e], prompt)
				}
				require.Equal(t, []int{8, 8, 0}, hits(prompt))
				rounded := many
				rounded.GapTime = time.Microsecond
				report(p.Endpoints()[i], scraped(rounded))
				report(p.Endpoints()[i], Signals{Running: -1, Waiting: 1, KVUsage: -1, KVTokens: -1, At: now.Add(time.Millisecond)})
				require.Equal(t, []int{8, 8, 0}, hits(prompt), "it goes on")
				report(p.Endpoints()[i], scraped(next))
				want := []int{8, 8, 0}
				want[i] = 0
				require.Equal(t, want, hits(prompt), "it has restarted")
				s.Routed(p, p.Endpoints()[i], prompt)
				report(p.Endpoints()[i], scraped(many))
				require.Equal(t, []int{8, 8, 0}, hits(prompt), "what came since is kept")
			}
		})
	}
}

func TestIndexForgetsWithTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{RoutedTTL: 10 * time.Minute})
		s.SetPool(PoolSpec{Name: "p"}, pd(1, 0))
		p := s.Pool("p")
		go s.Run(t.Context())
		var v View
		hit := func() int { s.View(p, long(8, 0, 1), &v); return v.Endpoints[0].Hit }
		for range 5 { // blocks that are looked up stay
			s.Routed(p, p.Endpoints()[0], long(8, 0, 1))
			<-time.After(4 * time.Minute)
			require.Equal(t, 8, hit())
		}
		<-time.After(11 * time.Minute)
		require.Zero(t, hit())
		require.Zero(t, p.IndexStats().Entries)
	})
}

// fleetOf makes a pool of n endpoints, of which the first half prefills; all of those know the first 100 blocks of
// long(430, 100, x), and some of them more.
func fleetOf(n int) (*State, *Pool) {
	s := New(Options{})
	var eps []EndpointSpec
	for i := range n {
		role := RolePrefill
		if i >= n/2 {
			role = RoleDecode
		}
		eps = append(eps, EndpointSpec{Addr: fmt.Sprintf("10.0.%d.%d:8000", i/256, i%256), Role: role})
	}
	s.SetPool(PoolSpec{Name: "p", Models: []string{"*"}}, eps)
	p := s.Pool("p")
	for i := range n / 2 {
		s.Routed(p, p.endpoints[i], long(430, 100, byte(i%8)))
	}
	return s, p
}

func TestViewAllocates(t *testing.T) {
	for _, n := range []int{64, 512} {
		s, p := fleetOf(n)
		hashes := long(430, 100, 3)
		var v View
		s.View(p, hashes, &v)
		require.Equal(t, 100, v.Endpoints[1].Hit)
		require.Equal(t, 430, v.Endpoints[3].Hit)
		budget.Allocs(t, 100, 0, func() { s.View(p, hashes, &v) })
		budget.Allocs(t, 100, 0, func() { s.Routed(p, p.endpoints[3], hashes) })
	}
}

func BenchmarkView(b *testing.B) {
	for _, n := range []int{64, 512} {
		s, p := fleetOf(n)
		for _, c := range []struct {
			name   string
			hashes []uint64
		}{{"NoPrompt", nil}, {"New", long(430, 0, 99)}, {"Shared", long(430, 100, 99)}, {"Known", long(430, 100, 3)}, {"Known8192", long(8192, 100, 3)}} {
			b.Run(fmt.Sprintf("%d/%s", n, c.name), func(b *testing.B) {
				if len(c.hashes) > 1000 {
					s.Routed(p, p.endpoints[0], c.hashes)
				}
				var v View
				b.ReportAllocs()
				for b.Loop() {
					s.View(p, c.hashes, &v)
				}
			})
		}
	}
}

func BenchmarkRouted(b *testing.B) {
	for _, grown := range []int{1, 32, 430} { // blocks of the prompt that are new
		b.Run(fmt.Sprintf("430blocks/%dnew", grown), func(b *testing.B) {
			s, p := fleetOf(64)
			hashes, tail := long(430, 0, 5), rand.Uint64()
			b.ReportAllocs()
			for b.Loop() {
				for i := 430 - grown; i < 430; i++ {
					tail++
					hashes[i] = tail * 0x9e3779b97f4a7c15
				}
				s.Routed(p, p.endpoints[0], hashes)
			}
		})
	}
}

// A view has the popularity of its prompt's blocks, from requests that arrive here and prefills of other replicas.
func TestViewHasSharedPrefixes(t *testing.T) {
	s, p := fleetOf(4)
	known := long(64, 0, 1)
	var v View
	for range 3 {
		s.CountPrompt(p, known)
		s.ApplyRouted(p, p.endpoints[0], known)
		s.ApplyRouted(p, p.endpoints[3], known) // decode: the second leg of the same request
	}
	s.View(p, append(known[:32:32], long(64, 0, 2)[32:]...), &v)
	require.Len(t, v.Uses, 1)
	require.Equal(t, int32(32), v.Uses[0].Blocks)
	require.Greater(t, v.Uses[0].Uses, float32(5))
	var w View
	w.Copy(&v)
	require.Equal(t, v.Uses, w.Uses)
	s.View(p, nil, &v)
	require.Empty(t, v.Uses)
}

// The index remembers twice an engine's memory, CPU memory included, and a default if the engine does not report it.
func TestTheIndexIsTwiceTheEngine(t *testing.T) {
	for _, c := range []struct {
		tokens int64
		host   HostMemory
		want   int
	}{
		{-1, HostMemory{}, 1 << 14},
		{-1, HostMemory{Tokens: 64_000}, 1 << 14},
		{64_000, HostMemory{}, 1000},      // 4 bytes a token, 512 a block: 500 blocks
		{4_096_000, HostMemory{}, 64_000}, // more than is usual
		{64_000, HostMemory{Tokens: 192_000}, 4000},
		{64_000, HostMemory{Bytes: 192_000 * TokenBytes}, 4000},
	} {
		tokens, want := c.tokens, c.want
		s := New(Options{})
		s.SetPool(PoolSpec{Name: "chat", Models: []string{"*"}}, []EndpointSpec{{Addr: "p", Role: RolePrefill}})
		p := s.Pool("chat")
		e := p.Endpoint("p")
		s.Observe(e, Signals{Running: 0, KVUsage: 0, KVTokens: tokens, Host: c.host, At: time.Now()})
		prompts := make([][]uint64, 700)
		for i := range prompts {
			for k := range 100 {
				prompts[i] = append(prompts[i], uint64(i)<<32|uint64(k)+1)
			}
			s.Routed(p, e, prompts[i])
		}
		found := 0
		var v View
		for _, prompt := range prompts {
			s.View(p, prompt, &v)
			found += v.Endpoints[0].Hit
		}
		require.LessOrEqual(t, found, want, "%d tokens", tokens)
		require.Greater(t, found, want*2/5, "%d tokens: all but the generation before", tokens)
	}
}
