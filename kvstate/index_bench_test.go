package kvstate

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

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

// scene is an index with endpoints, and one long prompt of which they hold parts of different lengths.
type scene struct {
	x      *prefixIndex
	v      View
	prompt []uint64
}

// newScene makes endpoints that hold entries blocks in all, those of the prompt included, of which each holds as many as
// depth says.
func newScene(endpoints, entries, promptBlocks int, depth func(endpoint int) int) *scene {
	return sceneOf(endpoints, entries, promptBlocks, depth, func(*prefixIndex, []uint64) {})
}

func sceneOf(endpoints, entries, promptBlocks int, depth func(endpoint int) int, before func(*prefixIndex, []uint64)) *scene {
	x := newPrefixIndex(testLimits(1 << 30))
	s := &scene{x: x, prompt: randomPrompt(promptBlocks, 1)}
	before(x, s.prompt)
	for i := range endpoints {
		m := x.join(nil)
		s.v.Endpoints = append(s.v.Endpoints, Candidate{Endpoint: &Endpoint{EndpointSpec{}, &live{routed: m, own: [1]int32{int32(m.slot)}}}})
		x.add(m, s.prompt[:depth(i)])
		for j := depth(i); j < entries/endpoints; j += 512 {
			x.add(m, randomPrompt(min(512, entries/endpoints-j), uint64(i)<<32|uint64(j)+2))
		}
	}
	return s
}

func randomPrompt(n int, seed uint64) []uint64 {
	hashes := make([]uint64, n)
	for i := range hashes {
		seed += 0x9e3779b97f4a7c15
		z := (seed ^ seed>>30) * 0xbf58476d1ce4e5b9
		hashes[i] = z ^ z>>27
	}
	return hashes
}

func (s *scene) lookup(prompt []uint64) {
	for i := range s.v.Endpoints {
		s.v.Endpoints[i].Hit = 0
	}
	s.x.hits(prompt, &s.v, 1, 1, routedSlots)
}

// The depths to which 1,024 endpoints hold an 8,192-block prompt.
func depths(distinct int) func(int) int {
	return func(i int) int { return (i%distinct + 1) * 8192 / distinct }
}

func TestLookupAllocates(t *testing.T) {
	for _, distinct := range []int{64, 1024} {
		s := newScene(1024, 0, 8192, depths(distinct))
		s.lookup(s.prompt)
		for i := range 1024 {
			require.Equal(t, depths(distinct)(i), s.v.Endpoints[i].Hit)
		}
		budget.Allocs(t, 20, 0, func() { s.lookup(s.prompt) })
	}
}

// shuffled gives the depths to the endpoints in another order, so that neighbours among the slots do not leave together.
func shuffled(depth func(int) int) func(int) int {
	order := rand.New(rand.NewPCG(1, 2)).Perm(1024)
	return func(i int) int { return depth(order[i]) }
}

// scatter makes a scene whose prompt came block by block, other prompts' blocks in between, so that no two blocks of it
// have numbers in a row and each is found through the table.
func scatter(endpoints, entries, promptBlocks int, depth func(int) int) *scene {
	return sceneOf(endpoints, entries, promptBlocks, depth, func(x *prefixIndex, prompt []uint64) {
		m, other := x.join(nil), x.join(nil)
		for i := range prompt {
			x.add(m, prompt[:i+1])
			x.add(other, randomPrompt(1+i%3, uint64(i)<<40|1<<39))
		}
		x.leave(other)
	})
}

// lookupCase is one look-up of an 8,192-block prompt over 1,024 endpoints that hold 10^6 blocks.
type lookupCase struct {
	name  string
	scene func() *scene
}

func lookups() []lookupCase {
	return []lookupCase{
		{"1depths", func() *scene { return newScene(1024, 1<<20, 8192, depths(1)) }},
		{"8depths", func() *scene { return newScene(1024, 1<<20, 8192, depths(8)) }},
		{"64depths", func() *scene { return newScene(1024, 1<<20, 8192, depths(64)) }},
		{"1024depths", func() *scene { return newScene(1024, 1<<20, 8192, depths(1024)) }},
		{"1024depths/shuffled", func() *scene { return newScene(1024, 1<<20, 8192, shuffled(depths(1024))) }},
		{"512depths/shuffled", func() *scene { return newScene(1024, 1<<20, 8192, shuffled(depths(512))) }},
		{"512depths/scattered", func() *scene { return scatter(1024, 1<<20, 8192, shuffled(depths(512))) }},
		{"64depths/scattered", func() *scene { return scatter(1024, 1<<20, 8192, depths(64)) }},
		{"1024depths/scattered", func() *scene { return scatter(1024, 1<<20, 8192, shuffled(depths(1024))) }},
	}
}

func BenchmarkLookup8192x1024(b *testing.B) {
	for _, c := range lookups() {
		s := c.scene()
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.lookup(s.prompt)
			}
		})
	}
	s := newScene(1024, 1<<20, 8192, depths(64))
	miss := randomPrompt(8192, 1<<60)
	b.Run("miss", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.x.hits(miss, &s.v, 1, 1, routedSlots)
		}
	})
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkIndexMemory reports what a block and one endpoint that holds it take, for blocks that one, two or sixteen hold.
func BenchmarkIndexMemory(b *testing.B) {
	const entries = 1 << 20
	for _, sharing := range []int{1, 2, 16} {
		b.Run(fmt.Sprintf("routed/%dholders", sharing), func(b *testing.B) {
			for range b.N {
				before := heap()
				x := newPrefixIndex(testLimits(1 << 30))
				for i := range 16 {
					m := x.join(nil)
					for j := range entries / 16 / 512 {
						x.add(m, randomPrompt(512, uint64(i/sharing)<<40|uint64(j)<<16))
					}
				}
				b.ReportMetric(float64(heap()-before)/entries, "bytes/entry")
				runtime.KeepAlive(x)
			}
		})
		b.Run(fmt.Sprintf("events/%dholders", sharing), func(b *testing.B) {
			for range b.N {
				before := heap()
				s := New(Options{MaxIndexBytes: 1 << 40, FeedBlocks: 1 << 30})
				s.SetPool(PoolSpec{Name: "p"}, pd(16, 0))
				p := s.Pool("p")
				var feeds []*Feed
				for i, e := range p.Endpoints() {
					f := p.Feed(e)
					for j := range entries / 16 / 512 {
						blocks := randomPrompt(512, uint64(i/sharing)<<40|uint64(j)<<16)
						f.Apply([]BlockEvent{{Kind: BlocksStored, Keys: blocks, Blocks: blocks, BlockSize: 16}})
					}
					feeds = append(feeds, f)
				}
				b.ReportMetric(float64(heap()-before)/entries, "bytes/entry")
				runtime.KeepAlive(feeds)
			}
		})
	}
}

// BenchmarkFeedApply is what a block of an event costs beside decoding it: stored, and removed again later, as in an
// engine that is full.
func BenchmarkFeedApply(b *testing.B) {
	s := New(Options{MaxIndexBytes: 1 << 40, FeedBlocks: 1 << 30})
	s.SetPool(PoolSpec{Name: "p"}, pd(16, 0))
	p := s.Pool("p")
	var feeds []*Feed
	for _, e := range p.Endpoints() {
		feeds = append(feeds, p.Feed(e))
	}
	const window, blocks = 2048, 32
	batches := make([][]BlockEvent, 2*window) // the second half of them removes what the first half stores, and the other way round
	for i := range batches {
		stored, removed := randomPrompt(blocks, uint64(i)<<16), randomPrompt(blocks, uint64((i+window)%(2*window))<<16)
		batches[i] = []BlockEvent{
			{Kind: BlocksStored, Keys: stored, Blocks: stored, BlockSize: 16},
			{Kind: BlocksRemoved, Keys: removed},
		}
	}
	b.ReportAllocs()
	n := 0
	for b.Loop() {
		feeds[n%16].Apply(batches[n%(2*window)])
		n++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks, "ns/block")
}

// TestIndexScaling prints the table of docs/benchmarks.md, up to so many entries:
// TANDEM_SCALING=10000000 go test ./kvstate -run IndexScaling -v
func TestIndexScaling(t *testing.T) {
	most, err := strconv.Atoi(os.Getenv("TANDEM_SCALING"))
	if err != nil {
		t.Skip("takes minutes and 1 GB: set TANDEM_SCALING=10000000")
	}
	t.Logf("| endpoints | entries | lookup of 8,192 blocks, 8 depths | first block misses | bytes an entry |")
	for _, endpoints := range []int{10, 100, 1000, 10_000} {
		for _, entries := range []int{100_000, 1_000_000, 10_000_000} {
			if entries < 100*endpoints || entries > most {
				continue // the endpoints themselves are more than what they hold
			}
			before := heap()
			s := newScene(endpoints, entries, 8192, func(i int) int { return min((i%8+1)*1024, max(entries/endpoints, 1)) })
			bytes := float64(heap() - before)
			miss := randomPrompt(8192, 1<<60)
			lookup := timed(func() { s.lookup(s.prompt) })
			first := timed(func() { s.x.hits(miss, &s.v, 1, 1, routedSlots) })
			held := 0
			for _, m := range s.x.members {
				held += m.held
			}
			t.Logf("| %d | %d | %v | %v | %.1f |", endpoints, held, lookup, first, bytes/float64(held))
		}
	}
}

// timed is the least of several runs, for a machine that does other work too.
func timed(f func()) time.Duration {
	least := time.Hour
	for range 1000 {
		began := time.Now()
		f()
		least = min(least, time.Since(began))
	}
	return least
}

// TestLookupLeast prints the least time of many look-ups, which says more than a mean where the machine does other work too.
func TestLookupLeast(t *testing.T) {
	if os.Getenv("TANDEM_SCALING") == "" {
		t.Skip("set TANDEM_SCALING")
	}
	for _, c := range lookups() {
		t.Run(c.name, func(t *testing.T) {
			s := c.scene()
			t.Log(timed(func() { s.lookup(s.prompt) }))
		})
	}
}

// TestLookupCold is TestLookupLeast where nothing is in the processor's own caches: each look-up comes after 8 MB of other
// memory. It prints the 20th fastest of 400, and the median.
func TestLookupCold(t *testing.T) {
	if os.Getenv("TANDEM_SCALING") == "" {
		t.Skip("set TANDEM_SCALING")
	}
	junk := make([]uint64, 1<<20)
	for _, c := range lookups() {
		t.Run(c.name, func(t *testing.T) {
			s := c.scene()
			var all []time.Duration
			for range 400 {
				for i := range junk {
					junk[i]++
				}
				began := time.Now()
				s.lookup(s.prompt)
				all = append(all, time.Since(began))
			}
			slices.Sort(all)
			t.Log(all[20], all[200])
		})
	}
}
