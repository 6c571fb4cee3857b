package prefixindex

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// twin has the prompts routed to one endpoint in the simplest form: two generations of blocks, and a walk over every
// block.
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
		t.nextGeneration()
	}
	for _, h := range hashes {
		t.now[h] = true
		delete(t.old, h)
	}
}

func (t *twin) nextGeneration() { t.old, t.now = t.now, map[uint64]bool{} }

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

// long returns a prompt of n blocks that branches off the one with branch 0 after shared of them.
func long(n, shared int, branch byte) []uint64 {
	path := make([]byte, n)
	for i := shared; i < n; i++ {
		path[i] = branch
	}
	return chain(path...)
}

func testLimits(routed int) Limits {
	return Limits{MaxBytes: 1 << 40, RoutedBlocks: routed, FeedBlocks: 1 << 20, TTL: time.Hour}
}

// joined returns n new owners of an index.
func joined(x *Index, n int) []*Owner {
	owners := make([]*Owner, n)
	for i := range owners {
		owners[i] = &Owner{}
		x.Join(owners[i])
	}
	x.Resize()
	return owners
}

// depths returns how many leading blocks of a prompt each owner holds.
func depths(x *Index, owners []*Owner, hashes []uint64, of func(*Owner) []int32) []int32 {
	var l Lookup
	if found := l.Find(x, hashes, len(owners), func(i int) []int32 { return of(owners[i]) }); found != nil {
		return found
	}
	return make([]int32, len(owners))
}

// indexProgram runs a program of random operations on index and twins and compares every look-up.
func indexProgram(t *testing.T, room int, next func(n int) int, steps int) {
	x := New(testLimits(room))
	var all []*Owner
	slow := map[*Owner]*twin{}
	join := func() {
		o := joined(x, 1)[0]
		all, slow[o] = append(all, o), newTwin(room)
	}
	prompt := func() []uint64 {
		path := make([]byte, 1+next(24))
		for i := range path {
			path[i] = byte(min(next(12), 2)) // mostly the same path
		}
		return chain(path...)
	}
	join()
	for range steps {
		switch op := next(16); {
		case op == 0 && len(all) < 150:
			join()
		case op == 1 && len(all) > 1:
			i := next(len(all))
			all[i].Leave()
			all = append(all[:i], all[i+1:]...)
		case op < 9:
			o, p := all[next(len(all))], prompt()
			slow[o].add(p)
			o.Add(p)
		}
		p := prompt()
		got := depths(x, all, p, (*Owner).Routed)
		for i, o := range all {
			twin := slow[o]
			require.Equal(t, int32(twin.hit(p)), got[i], "owner in slot %d", o.routed.slot)
			require.Equal(t, len(twin.now)+len(twin.old), o.routed.held)
			require.Equal(t, len(twin.now), o.routed.current)
		}
	}
	requireTallies(t, x)
	for _, o := range all {
		o.Leave()
	}
	require.Zero(t, x.store.blocks, "what nobody holds is forgotten")
}

// requireTallies compares the tally of every block with its holders.
func requireTallies(t *testing.T, x *Index) {
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

// A long prompt, in rows or scattered, which endpoints hold to different lengths, some of them to the same; not all of
// them are candidates.
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
		s.owners = append(s.owners[:left], s.owners[left+1:]...)
		got := s.find(asked)
		for i, length := range append(lengths[:left], lengths[left+1:]...) {
			require.Equal(t, int32(min(length, len(asked))), got[i], "seed %d, endpoint %d", seed, i)
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

// programOf reads choices from bytes; at their end every choice is the first.
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

// The estimate of an endpoint that keeps less than expected is lowered.
func TestIndexLearnsWhatEnginesKeep(t *testing.T) {
	e := joined(New(testLimits(4096)), 1)[0]
	prefilled := func(promised, found int64) { e.Learn(promised, found, 256+promised/16) }
	require.Equal(t, 4096, e.routed.capacity())
	prefilled(10_000, 0)
	require.Equal(t, 4096-512, e.routed.capacity())
	for range 50 {
		prefilled(10_000, 0)
	}
	require.Equal(t, minFits, e.routed.capacity(), "but never less than a prompt")
	for range 500 {
		prefilled(10_000, 9_990)
	}
	require.Equal(t, 4096, e.routed.capacity())
	prefilled(0, 0)
	require.Equal(t, 4096, e.routed.capacity(), "a prompt that was new says nothing")
}

// An owner's slot goes to another at once, without anything of the old one.
func TestIndexReusesSlots(t *testing.T) {
	x := New(testLimits(64))
	prompt := long(8, 0, 1)
	for i := range 500 {
		o := joined(x, 1)
		require.Equal(t, []int32{0}, depths(x, o, prompt, (*Owner).Routed), "owner %d holds what another held", i)
		o[0].Add(prompt)
		require.Equal(t, []int32{8}, depths(x, o, prompt, (*Owner).Routed))
		o[0].Leave()
	}
	require.LessOrEqual(t, len(x.members), 2)
}

// A request never waits for a writer: neither to look up nor to record a routed prompt.
func TestRequestsDoNotWaitForWriters(t *testing.T) {
	x := New(testLimits(1 << 14))
	o := joined(x, 2)
	known := long(8, 0, 1)
	o[0].Add(known)

	x.writing.Lock() // a slow writer
	require.Equal(t, []int32{8, 0}, depths(x, o, known, (*Owner).Routed))
	for i := range byte(100) {
		o[1].Add(long(8, 0, 1+i))
	}
	x.unlock()
	require.Equal(t, int32(8), depths(x, o, long(8, 0, 100), (*Owner).Routed)[1], "what was routed meanwhile is noted in the end")
}

// Readers run concurrently with writers, endpoints that come and go, and tables that grow. A hit never exceeds what
// was routed.
func TestIndexUnderConcurrency(t *testing.T) {
	x := New(testLimits(2000))
	owners := joined(x, 40)
	owners[0].Add(long(100, 0, 7))
	var writers, readers sync.WaitGroup
	var stop atomic.Bool
	for w := range 4 {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			for range 3000 {
				owners[1+r.IntN(39)].Add(long(60, r.IntN(50), byte(r.IntN(250))))
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
	seq := sequenceOf(1, make([]byte, 40))
	for i := range 3 { // an engine's blocks move between tiers, in sets of all sizes
		feed := owners[2*i].NewFeed()
		writers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(i), 9))
			for range 1000 {
				from, tier := r.IntN(40), Tier(r.IntN(int(Tiers)))
				feed.Apply([]BlockEvent{storedFrom(seq, 0, 40, tier)})
				feed.Apply([]BlockEvent{{Kind: BlocksRemoved, Keys: seq.keys[from:], Tier: tier}})
			}
		})
	}
	readers.Go(func() {
		for !stop.Load() {
			for i, depth := range depths(x, owners, seq.hashes, (*Owner).Reports) {
				if held := owners[i].Tiers(seq.hashes, depth); !slices.IsSorted(held[:]) || held[Tiers-1] != depth {
					t.Errorf("tiers %v of %d blocks", held, depth)
					return
				}
			}
		}
	})
	readers.Go(func() { // snapshots are made
		for range 100 {
			owners[3].EachBlock(func(_ uint64, hashes []uint64) {
				if len(hashes) == 0 || slices.Contains(hashes, 0) {
					t.Errorf("a part of %d blocks, or one of them is none", len(hashes))
				}
			})
		}
	})
	for range 4 {
		readers.Go(func() {
			for !stop.Load() {
				got := depths(x, owners, long(100, 0, 7), (*Owner).Routed)
				if got[0] != 100 {
					t.Errorf("a block that nobody touched was not found: %d of 100", got[0])
					return
				}
				for _, depth := range got[1:] {
					if depth > 60 {
						t.Errorf("a hit of %d blocks where at most 60 were routed", depth)
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
