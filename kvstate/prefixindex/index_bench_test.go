package prefixindex

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// scene is an index with endpoints, and one long prompt of which they hold parts of different lengths.
type scene struct {
	x      *Index
	owners []*Owner
	lookup Lookup
	prompt []uint64
}

// newScene creates endpoints that hold entries blocks in total, those of the prompt included, of which each holds
// depth(endpoint).
func newScene(endpoints, entries, promptBlocks int, depth func(endpoint int) int) *scene {
	return sceneOf(endpoints, entries, promptBlocks, depth, func(*Index, []uint64) {})
}

func sceneOf(endpoints, entries, promptBlocks int, depth func(endpoint int) int, before func(*Index, []uint64)) *scene {
	x := New(testLimits(1 << 30))
	s := &scene{x: x, prompt: randomPrompt(promptBlocks, 1)}
	before(x, s.prompt)
	for i := range endpoints {
		o := joined(x, 1)[0]
		s.owners = append(s.owners, o)
		o.Add(s.prompt[:depth(i)])
		for j := depth(i); j < entries/endpoints; j += 512 {
			o.Add(randomPrompt(min(512, entries/endpoints-j), uint64(i)<<32|uint64(j)+2))
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

func (s *scene) find(prompt []uint64) []int32 {
	return s.lookup.Find(s.x, prompt, len(s.owners), func(i int) []int32 { return s.owners[i].Routed() })
}

// The depths to which 1,024 endpoints hold an 8,192-block prompt.
func steps(distinct int) func(int) int {
	return func(i int) int { return (i%distinct + 1) * 8192 / distinct }
}

func TestLookupAllocates(t *testing.T) {
	if budget.Race {
		t.Skip("a million blocks take minutes under the race detector; make test runs this again without")
	}
	for _, distinct := range []int{64, 1024} {
		s := newScene(1024, 0, 8192, steps(distinct))
		found := s.find(s.prompt)
		for i := range 1024 {
			require.Equal(t, int32(steps(distinct)(i)), found[i])
		}
		budget.Allocs(t, 20, 0, func() { s.find(s.prompt) })
	}
}

// shuffled gives the depths to the endpoints in another order, so that neighbours among the slots do not leave together.
func shuffled(depth func(int) int) func(int) int {
	order := rand.New(rand.NewPCG(1, 2)).Perm(1024)
	return func(i int) int { return depth(order[i]) }
}

// scatter returns a scene whose prompt was stored block by block, with other prompts' blocks in between, so that no
// two blocks of it have consecutive numbers and each is found through the table.
func scatter(endpoints, entries, promptBlocks int, depth func(int) int) *scene {
	return sceneOf(endpoints, entries, promptBlocks, depth, func(x *Index, prompt []uint64) {
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
		{"1depths", func() *scene { return newScene(1024, 1<<20, 8192, steps(1)) }},
		{"8depths", func() *scene { return newScene(1024, 1<<20, 8192, steps(8)) }},
		{"64depths", func() *scene { return newScene(1024, 1<<20, 8192, steps(64)) }},
		{"1024depths", func() *scene { return newScene(1024, 1<<20, 8192, steps(1024)) }},
		{"1024depths/shuffled", func() *scene { return newScene(1024, 1<<20, 8192, shuffled(steps(1024))) }},
		{"512depths/shuffled", func() *scene { return newScene(1024, 1<<20, 8192, shuffled(steps(512))) }},
		{"512depths/scattered", func() *scene { return scatter(1024, 1<<20, 8192, shuffled(steps(512))) }},
		{"64depths/scattered", func() *scene { return scatter(1024, 1<<20, 8192, steps(64)) }},
		{"1024depths/scattered", func() *scene { return scatter(1024, 1<<20, 8192, shuffled(steps(1024))) }},
	}
}

func BenchmarkLookup8192x1024(b *testing.B) {
	for _, c := range lookups() {
		s := c.scene()
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				s.find(s.prompt)
			}
		})
	}
	s := newScene(1024, 1<<20, 8192, steps(64))
	miss := randomPrompt(8192, 1<<60)
	b.Run("miss", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			s.find(miss)
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

// BenchmarkIndexMemory reports the memory of a block and one endpoint that holds it, for blocks with one, two or
// sixteen holders.
func BenchmarkIndexMemory(b *testing.B) {
	const entries = 1 << 20
	for _, sharing := range []int{1, 2, 16} {
		b.Run(fmt.Sprintf("routed/%dholders", sharing), func(b *testing.B) {
			for range b.N {
				before := heap()
				x := New(testLimits(1 << 30))
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
				var feeds []*Feed
				for i, o := range joined(New(Limits{MaxBytes: 1 << 40, RoutedBlocks: 1 << 14, FeedBlocks: 1 << 30}), 16) {
					f := o.NewFeed()
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

// BenchmarkFeedApply measures a block of an event without decoding: stored, and removed again later, as in a full
// engine.
func BenchmarkFeedApply(b *testing.B) {
	var feeds []*Feed
	for _, o := range joined(New(Limits{MaxBytes: 1 << 40, RoutedBlocks: 1 << 14, FeedBlocks: 1 << 30}), 16) {
		feeds = append(feeds, o.NewFeed())
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
// TANDEM_SCALING=10000000 go test ./kvstate/prefixindex -run IndexScaling -v
func TestIndexScaling(t *testing.T) {
	most, err := strconv.Atoi(os.Getenv("TANDEM_SCALING"))
	if err != nil {
		t.Skip("takes minutes and 1 GB: set TANDEM_SCALING=10000000")
	}
	t.Logf("| endpoints | entries | lookup of 8,192 blocks, 8 depths | first block misses | bytes an entry |")
	for _, endpoints := range []int{10, 100, 1000, 10_000} {
		for _, entries := range []int{100_000, 1_000_000, 10_000_000} {
			if entries < 100*endpoints || entries > most {
				continue // the endpoints themselves are more than the entries
			}
			before := heap()
			s := newScene(endpoints, entries, 8192, func(i int) int { return min((i%8+1)*1024, max(entries/endpoints, 1)) })
			bytes := float64(heap() - before)
			miss := randomPrompt(8192, 1<<60)
			lookup := timed(func() { s.find(s.prompt) })
			first := timed(func() { s.find(miss) })
			held := 0
			for _, m := range s.x.members {
				held += m.held
			}
			t.Logf("| %d | %d | %v | %v | %.1f |", endpoints, held, lookup, first, bytes/float64(held))
		}
	}
}

// timed returns the least of several runs, for a busy machine.
func timed(f func()) time.Duration {
	least := time.Hour
	for range 1000 {
		began := time.Now()
		f()
		least = min(least, time.Since(began))
	}
	return least
}

// TestLookupLeast prints the least time of many look-ups, which is more meaningful than a mean on a busy machine.
func TestLookupLeast(t *testing.T) {
	if os.Getenv("TANDEM_SCALING") == "" {
		t.Skip("set TANDEM_SCALING")
	}
	for _, c := range lookups() {
		t.Run(c.name, func(t *testing.T) {
			s := c.scene()
			t.Log(timed(func() { s.find(s.prompt) }))
		})
	}
}

// TestLookupCold is TestLookupLeast with cold processor caches: each look-up comes after 8 MB of other memory. It
// prints the 20th fastest of 400, and the median.
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
				s.find(s.prompt)
				all = append(all, time.Since(began))
			}
			slices.Sort(all)
			t.Log(all[20], all[200])
		})
	}
}

// cpu returns the processor time of this process in seconds, which depends less on other load of the machine.
func cpu() float64 {
	var r syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &r)
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1e9
}

// BenchmarkFeedLongPrompts is what a prompt of 100k tokens costs the index of a fleet of 100 engines with caches of a
// million tokens, under the default limits: its 6,250 blocks stored in steps of 8,192 tokens, once while caches fill
// and once when they are full and each step evicts as many blocks, one event each (vLLM). Half of the prompts begin
// with one of 200 documents that other engines hold, too.
func BenchmarkFeedLongPrompts(b *testing.B) {
	const engines, prompt, step, cache = 100, 6250, 512, 62_500
	for _, full := range []bool{false, true} {
		b.Run(map[bool]string{false: "filling", true: "full"}[full], func(b *testing.B) {
			var feeds []*Feed
			stored := make([][][]uint64, engines) // by engine, the oldest prompt first
			n := 0
			next := func() []uint64 {
				n++
				if n%2 == 0 {
					return randomPrompt(prompt, uint64(n)<<20)
				}
				document := randomPrompt(prompt, uint64(n/2%200)<<20|1<<50)
				return append(document[:prompt*4/5], randomPrompt(prompt/5, uint64(n)<<20)...)
			}
			fleet := func() {
				feeds = nil
				for i, o := range joined(New(Limits{MaxBytes: 512 << 20, RoutedBlocks: 1 << 14, FeedBlocks: 1 << 20}), engines) {
					feeds, stored[i] = append(feeds, o.NewFeed()), nil
				}
			}
			apply := func(engine int, blocks []uint64, evicted []uint64) {
				for at := 0; at < len(blocks); at += step {
					part := blocks[at:min(at+step, len(blocks))]
					events := []BlockEvent{{Kind: BlocksStored, Keys: part, Blocks: part, BlockSize: 16}}
					if at > 0 {
						events[0].Parent, events[0].HasParent = blocks[at-1], true
					}
					for i := at; i < min(at+step, len(evicted)); i++ {
						events = append(events, BlockEvent{Kind: BlocksRemoved, Keys: evicted[len(evicted)-1-i:][:1]})
					}
					feeds[engine].Apply(events)
				}
			}
			fleet()
			if full {
				for i := range cache / prompt * engines {
					p := next()
					apply(i%engines, p, nil)
					stored[i%engines] = append(stored[i%engines], p)
				}
			}
			b.ReportAllocs()
			i, blocks, began := 0, 0, cpu()
			for b.Loop() {
				engine, p := i%engines, next()
				if i++; !full && i%(cache/prompt*engines) == 0 {
					fleet()
				}
				var evicted []uint64
				if full {
					evicted = stored[engine][0]
					stored[engine] = append(stored[engine][1:], p)
				}
				apply(engine, p, evicted)
				blocks += len(p)
			}
			b.ReportMetric((cpu()-began)*1e9/float64(blocks), "cpu-ns/block")
			stats := feeds[0].x.Stats()
			b.ReportMetric(float64(stats.Entries)/engines, "entries/engine")
		})
	}
}
