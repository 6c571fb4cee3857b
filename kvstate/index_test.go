package kvstate

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// twin is the index as one would write it without thinking of speed: sets of endpoints by name, one map for each
// generation, and a walk over every block.
type twin struct {
	now, old map[uint64]map[int]bool
}

func newTwin() *twin { return &twin{map[uint64]map[int]bool{}, map[uint64]map[int]bool{}} }

func (t *twin) turn() { t.old, t.now = t.now, map[uint64]map[int]bool{} }

func (t *twin) add(endpoint int, hashes []uint64) {
	for _, h := range hashes {
		if t.now[h] == nil {
			t.now[h] = map[int]bool{}
			for e := range t.old[h] {
				t.now[h][e] = true
			}
		}
		t.now[h][endpoint] = true
	}
}

func (t *twin) forget(endpoint int) {
	for _, generation := range []map[uint64]map[int]bool{t.now, t.old} {
		for _, set := range generation {
			delete(set, endpoint)
		}
	}
}

func (t *twin) hit(endpoint int, hashes []uint64) int {
	for i, h := range hashes {
		set, ok := t.now[h]
		if !ok {
			set = t.old[h]
		}
		if !set[endpoint] {
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

// indexProgram runs a program of random operations on index and twin and compares every look-up.
func indexProgram(t *testing.T, limit int, next func(n int) int, steps int) {
	x, slow := newPrefixIndex(limit, limit), newTwin()
	type member struct {
		name int
		e    *Endpoint
	}
	var members []member
	names := 0
	join := func() {
		members = append(members, member{names, &Endpoint{EndpointSpec{Role: RolePrefill}, &live{slot: x.takeSlot()}}})
		names++
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
		before := x.generation
		switch op := next(16); {
		case op == 0 && len(members) < 150:
			join()
		case op == 1 && len(members) > 1:
			i := next(len(members))
			slow.forget(members[i].name)
			x.dropSlot(members[i].e.slot)
			members = append(members[:i], members[i+1:]...)
		case op < 9:
			m, p := members[next(len(members))], prompt()
			slow.add(m.name, p)
			x.add(m.e.slot, p)
		}
		for ; before < x.generation; before++ {
			slow.turn()
		}
		p := prompt()
		v.Endpoints = v.Endpoints[:0]
		for _, m := range members {
			v.Endpoints = append(v.Endpoints, Candidate{Endpoint: m.e})
		}
		x.hits(p, &v)
		for i, m := range members {
			require.Equal(t, slow.hit(m.name, p), v.Endpoints[i].Hit, "endpoint %d in slot %d", m.name, m.e.slot)
		}
	}
}

func TestIndexAgainstTwin(t *testing.T) {
	for seed := range uint64(20) {
		for _, limit := range []int{10, 60, 400, 1 << 20} {
			r := rand.New(rand.NewPCG(seed, uint64(limit)))
			indexProgram(t, limit, r.IntN, 800)
		}
	}
}

func FuzzIndex(f *testing.F) {
	f.Add(uint16(60), []byte("\x02\x00\x05\x01\x01\x0b\x02\x09\x00\x01"))
	f.Fuzz(func(t *testing.T, limit uint16, program []byte) {
		at := 0
		next := func(n int) int {
			if at == len(program) {
				return 0
			}
			at++
			return int(program[at-1]) % n
		}
		indexProgram(t, int(limit)%500+2, next, min(len(program)/8+1, 500))
	})
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
	require.LessOrEqual(t, len(p.index.now)+len(p.index.old), 64+8)
}

// A slot is not given to another endpoint while blocks still name the one that left.
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
	require.Less(t, len(s.Pool("p").index.slots), 3*maxDropped, "slots must not pile up")
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
		require.Zero(t, testing.AllocsPerRun(100, func() { s.View(p, hashes, &v) }))
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

// BenchmarkIndexMemory reports what a full index takes for each block.
func BenchmarkIndexMemory(b *testing.B) {
	for range b.N {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		x := newPrefixIndex(1<<20, 1<<20)
		slot := x.takeSlot()
		h := uint64(1)
		for range 1 << 10 {
			hashes := make([]uint64, 1<<10)
			for i := range hashes {
				h++
				hashes[i] = h * 0x9e3779b97f4a7c15
			}
			x.add(slot, hashes)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/float64(len(x.now)+len(x.old)), "bytes/block")
		runtime.KeepAlive(x)
	}
}
