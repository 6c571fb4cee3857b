package kvstate

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// twin is what was routed to one endpoint as one would write it without thinking of speed: two generations of blocks, and
// a walk over every block.
type twin struct {
	room     int
	now, old map[uint64]bool
}

func newTwin(room int) *twin { return &twin{room, map[uint64]bool{}, map[uint64]bool{}} }

func (t *twin) add(hashes []uint64) {
	hashes = hashes[:min(len(hashes), t.room/2)]
	fresh := 0
	for _, h := range hashes {
		if !t.now[h] {
			fresh++
		}
	}
	if fresh > 0 && len(t.now)+fresh > t.room/2 {
		t.turn()
	}
	for _, h := range hashes {
		t.now[h] = true
		delete(t.old, h)
	}
}

func (t *twin) turn() { t.old, t.now = t.now, map[uint64]bool{} }

func (t *twin) hit(hashes []uint64) int {
	for i, h := range hashes {
		if !t.now[h] && !t.old[h] {
			return i
		}
	}
	return len(hashes)
}

// chain makes block hashes of a prompt that is a path in a tree: prompts with a common beginning share hashes.
func chain(path ...byte) []uint64 {
	hashes, h := make([]uint64, len(path)), uint64(14695981039346656037)
	for i, p := range path {
		h = (h ^ uint64(p+1)) * 1099511628211
		hashes[i] = h
	}
	return hashes
}

// long is a prompt of n blocks that branches off the one with branch 0 after shared of them.
func long(n, shared int, branch byte) []uint64 {
	path := make([]byte, n)
	for i := shared; i < n; i++ {
		path[i] = branch
	}
	return chain(path...)
}

func testLimits(room int) indexLimits {
	return indexLimits{maxBytes: 1 << 40, endpointBlocks: room, feedBlocks: 1 << 20, ttl: time.Hour}
}

// indexProgram runs a program of random operations on index and twins and compares every look-up.
func indexProgram(t *testing.T, room int, next func(n int) int, steps int) {
	x := newPrefixIndex(testLimits(room))
	type endpoint struct {
		e    *Endpoint
		slow *twin
	}
	var all []endpoint
	join := func() {
		m := x.join(nil)
		all = append(all, endpoint{&Endpoint{EndpointSpec{}, &live{routed: m, own: [1]int32{int32(m.slot)}}}, newTwin(room)})
	}
	prompt := func() []uint64 {
		path := make([]byte, 1+next(24))
		for i := range path {
			path[i] = byte(min(next(12), 2)) // mostly the same way on
		}
		return chain(path...)
	}
	var v View
	join()
	for range steps {
		switch op := next(16); {
		case op == 0 && len(all) < 150:
			join()
		case op == 1 && len(all) > 1:
			i := next(len(all))
			x.leave(all[i].e.routed)
			all = append(all[:i], all[i+1:]...)
		case op < 9:
			e, p := all[next(len(all))], prompt()
			e.slow.add(p)
			x.add(e.e.routed, p)
		}
		p := prompt()
		v.Endpoints = v.Endpoints[:0]
		for _, m := range all {
			v.Endpoints = append(v.Endpoints, Candidate{Endpoint: m.e})
		}
		x.hits(p, &v, 1, 1, routedSlots)
		for i, m := range all {
			require.Equal(t, m.slow.hit(p), v.Endpoints[i].Hit, "endpoint in slot %d", m.e.routed.slot)
			require.Equal(t, len(m.slow.now)+len(m.slow.old), m.e.routed.held)
			require.Equal(t, len(m.slow.now), m.e.routed.current)
		}
	}
	requireTallies(t, x)
	for _, m := range all {
		x.leave(m.e.routed)
	}
	require.Zero(t, x.store.blocks, "what nobody holds is forgotten")
}

// requireTallies holds the tally of every block to who holds it.
func requireTallies(t *testing.T, x *prefixIndex) {
	for id := uint32(1); id < x.store.used; id++ {
		var want uint32
		for slot := range x.members {
			if _, ok := x.store.sets.state(uint32(x.store.at(id).rest.Load()), slot); ok {
				want = (want + 1<<16) ^ uint32(slot)
			}
		}
		require.Equal(t, want, x.store.tally(id).Load(), "block %d", id)
	}
}

// A long prompt, in rows or scattered, that endpoints hold to different lengths, some of them to the same, and of which not
// all are asked for.
func TestLookupOfLongPrompts(t *testing.T) {
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 3))
		blocks, endpoints := 1+r.IntN(600), 1+r.IntN(90)
		lengths := make([]int, endpoints)
		for i := range lengths {
			lengths[i] = r.IntN(blocks + 1)
			if spread := []int{1, 3, 20}[seed%3]; r.IntN(2) > 0 {
				lengths[i] -= lengths[i] % spread
			}
		}
		scene := newScene
		if seed%2 == 0 {
			scene = scatter
		}
		s := scene(endpoints, 0, blocks, func(i int) int { return lengths[i] })
		requireTallies(t, s.x)
		asked := s.prompt[:1+r.IntN(blocks)]
		left := r.IntN(endpoints)
		s.v.Endpoints = append(s.v.Endpoints[:left], s.v.Endpoints[left+1:]...)
		s.lookup(asked)
		for i, length := range append(lengths[:left], lengths[left+1:]...) {
			require.Equal(t, min(length, len(asked)), s.v.Endpoints[i].Hit, "seed %d, endpoint %d", seed, i)
		}
	}
}

func TestIndexAgainstTwin(t *testing.T) {
	seeds := uint64(20)
	if testing.Short() || budget.Race {
		seeds = 4
	}
	for seed := range seeds {
		for _, room := range []int{4, 60, 400, 1 << 20} {
			r := rand.New(rand.NewPCG(seed, uint64(room)))
			indexProgram(t, room, r.IntN, 800)
		}
	}
}

func FuzzIndex(f *testing.F) {
	f.Add(uint16(60), []byte("\x02\x00\x05\x01\x01\x0b\x02\x09\x00\x01"))
	f.Fuzz(func(t *testing.T, room uint16, program []byte) {
		indexProgram(t, int(room)%500+2, programOf(program), min(len(program)/8+1, 500))
	})
}

// programOf reads choices from bytes; when they are spent, every choice is the first.
func programOf(program []byte) func(n int) int {
	at := 0
	return func(n int) int {
		if at == len(program) {
			return 0
		}
		at++
		return int(program[at-1]) % n
	}
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

func TestIndexForgetsWithTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{RoutedTTL: 10 * time.Minute})
		s.SetPool(PoolSpec{Name: "p"}, pd(1, 0))
		p := s.Pool("p")
		go s.Run(t.Context())
		var v View
		hit := func() int { s.View(p, long(8, 0, 1), &v); return v.Endpoints[0].Hit }
		for range 5 { // what is asked for stays
			s.Routed(p, p.Endpoints()[0], long(8, 0, 1))
			<-time.After(4 * time.Minute)
			require.Equal(t, 8, hit())
		}
		<-time.After(11 * time.Minute)
		require.Zero(t, hit())
		require.Zero(t, p.IndexStats().Entries)
	})
}

// An endpoint that keeps less than it was thought to is thought to keep less.
func TestIndexLearnsWhatEnginesKeep(t *testing.T) {
	s := New(Options{EndpointBlocks: 4096})
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 0))
	e := s.Pool("p").Endpoints()[0]
	require.Equal(t, 4096, e.routed.room())
	s.Prefilled(e, 10_000, 0)
	require.Equal(t, 4096-512, e.routed.room())
	for range 50 {
		s.Prefilled(e, 10_000, 0)
	}
	require.Equal(t, minFits, e.routed.room(), "but never less than a prompt")
	for range 500 {
		s.Prefilled(e, 10_000, 9_990)
	}
	require.Equal(t, 4096, e.routed.room())
	s.Prefilled(e, 0, 0)
	require.Equal(t, 4096, e.routed.room(), "a prompt that was new says nothing")
}

// An endpoint's slot goes to another at once, and nothing of the old one with it.
func TestIndexSlotsOfThoseWhoLeft(t *testing.T) {
	s := New(Options{EndpointBlocks: 64})
	spec := PoolSpec{Name: "p"}
	prompt := long(8, 0, 1)
	var v View
	for i := range 500 {
		s.SetPool(spec, []EndpointSpec{{Addr: fmt.Sprint("pod-", i), Role: RoleBoth}})
		p := s.Pool("p")
		s.View(p, prompt, &v)
		require.Zero(t, v.Endpoints[0].Hit, "pod %d holds what another held", i)
		s.Routed(p, p.Endpoints()[0], prompt)
		s.View(p, prompt, &v)
		require.Equal(t, 8, v.Endpoints[0].Hit)
	}
	require.LessOrEqual(t, len(s.Pool("p").index.members), 2)
}

// A request never waits for a writer: neither to look up nor to note what was routed.
func TestRequestsDoNotWaitForWriters(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, pd(2, 0))
	p := s.Pool("p")
	known := long(8, 0, 1)
	s.Routed(p, p.Endpoints()[0], known)

	p.index.writing.Lock() // somebody writes, and takes long
	var v View
	s.View(p, known, &v)
	require.Equal(t, []int{8, 0}, []int{v.Endpoints[0].Hit, v.Endpoints[1].Hit})
	for i := range byte(100) {
		s.Routed(p, p.Endpoints()[1], long(8, 0, 1+i))
	}
	p.index.unlock()

	s.View(p, long(8, 0, 100), &v)
	require.Equal(t, 8, v.Endpoints[1].Hit, "what was routed meanwhile is noted in the end")
}

// Readers run beside writers, endpoints that come and go, and tables that grow. A hit is never more than was ever routed.
func TestIndexUnderConcurrency(t *testing.T) {
	x := newPrefixIndex(testLimits(2000))
	var eps []*Endpoint
	for range 40 {
		m := x.join(nil)
		eps = append(eps, &Endpoint{EndpointSpec{}, &live{routed: m, own: [1]int32{int32(m.slot)}}})
	}
	x.add(eps[0].routed, long(100, 0, 7))
	var writers, readers sync.WaitGroup
	var stop atomic.Bool
	for w := range 4 {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for range 3000 {
				x.add(eps[1+r.IntN(39)].routed, long(60, r.IntN(50), byte(r.IntN(250))))
			}
		})
	}
	writers.Go(func() {
		for range 300 {
			m := x.join(nil)
			x.add(m, long(60, 30, 3))
			x.leave(m)
		}
	})
	readers.Go(func() { // snapshots are made
		for range 100 {
			(&Pool{index: x}).EachBlock(eps[3], func(_ uint64, hashes []uint64) {
				if len(hashes) == 0 || slices.Contains(hashes, 0) {
					t.Errorf("a part of %d blocks, or one of them is none", len(hashes))
				}
			})
		}
	})
	for range 4 {
		readers.Go(func() {
			var v View
			for !stop.Load() {
				v.Endpoints = v.Endpoints[:0]
				for _, e := range eps {
					v.Endpoints = append(v.Endpoints, Candidate{Endpoint: e})
				}
				x.hits(long(100, 0, 7), &v, 1, 1, routedSlots)
				if v.Endpoints[0].Hit != 100 {
					t.Errorf("a block that nobody touched was not found: %d of 100", v.Endpoints[0].Hit)
					return
				}
				for _, c := range v.Endpoints[1:] {
					if c.Hit > 60 {
						t.Errorf("a hit of %d blocks where at most 60 were routed", c.Hit)
						return
					}
				}
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	readers.Wait()
}
