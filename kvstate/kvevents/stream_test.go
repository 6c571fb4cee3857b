package kvevents

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate/prefixindex"
)

// engine is a publisher in its simplest form: a cache, numbered batches, and the last of them for replays.
type engine struct {
	clock   int
	seq     int
	cache   map[uint64][]int // content of a block and all before it, by name
	order   []uint64
	kept    []kept
	keep    int
	maps    bool // map form
	blocks  int
	process int
}

type kept struct {
	seq     uint64
	payload []byte
}

const engineBlock = 4

func newEngine(blocks, keep int, maps bool) *engine {
	e := &engine{blocks: blocks, keep: keep, maps: maps}
	e.restart()
	return e
}

func (e *engine) restart() {
	e.process++
	e.seq, e.cache, e.order, e.kept = 0, map[uint64][]int{}, nil, nil
}

// name returns the engine's name of a block, which differs after every start, as with random seeds.
func (e *engine) name(ids []int) uint64 {
	h := uint64(e.process) * 0x9e3779b97f4a7c15
	for _, id := range ids {
		h = (h ^ uint64(id)) * 0xff51afd7ed558ccd
	}
	return h
}

func (e *engine) stored(ids []int, from, to int) any {
	var names []any
	for i := from; i < to; i++ {
		names = append(names, e.name(ids[:(i+1)*engineBlock]))
	}
	var parent any
	if from > 0 {
		parent = e.name(ids[:from*engineBlock])
	}
	if e.maps {
		f := fields{"type", "BlockStored", "block_hashes", names, "token_ids", ids[from*engineBlock : to*engineBlock], "block_size", engineBlock, "medium", "GPU"}
		if parent != nil {
			f = append(f, "parent_block_hash", parent)
		}
		return f
	}
	return []any{"BlockStored", names, parent, ids[from*engineBlock : to*engineBlock], engineBlock, nil, "GPU"}
}

func (e *engine) removed(name uint64) any {
	if e.maps {
		return fields{"type", "BlockRemoved", "block_hashes", []any{name}, "medium", "GPU"}
	}
	return []any{"BlockRemoved", []any{name}, "GPU"}
}

// step serves a prompt, or clears the cache, and returns the batch about it.
func (e *engine) step(next func(n int) int) kept {
	var events []any
	if next(60) == 0 {
		e.cache, e.order = map[uint64][]int{}, nil
		events = append(events, []any{"AllBlocksCleared"})
	} else {
		ids := make([]int, engineBlock*(1+next(8)))
		for i := range ids {
			ids[i] = 1
			if i%engineBlock == 0 {
				ids[i] = min(next(6), 2) + 70_000
			}
		}
		hit := 0
		for ; hit < len(ids)/engineBlock && e.cache[e.name(ids[:(hit+1)*engineBlock])] != nil; hit++ { //nolint:revive // the condition does the work
		}
		for len(e.cache)+len(ids)/engineBlock-hit > e.blocks {
			victim := e.order[next(min(len(e.order), 3))] // now and then out of order
			events = append(events, e.removed(victim))
			e.evict(victim)
		}
		for hit = 0; hit < len(ids)/engineBlock && e.cache[e.name(ids[:(hit+1)*engineBlock])] != nil; hit++ { //nolint:revive // the condition does the work
		}
		if hit < len(ids)/engineBlock {
			events = append(events, e.stored(ids, hit, len(ids)/engineBlock))
		}
		for i := len(ids)/engineBlock - 1; i >= hit; i-- { // the end of a prompt goes first
			name := e.name(ids[:(i+1)*engineBlock])
			if e.cache[name] == nil {
				e.cache[name] = ids[:(i+1)*engineBlock]
				e.order = append(e.order, name)
			}
		}
	}
	e.clock++
	k := kept{uint64(e.seq), pack([]any{e.clock, events, 0})}
	e.seq++
	if e.kept = append(e.kept, k); len(e.kept) > e.keep {
		e.kept = e.kept[1:]
	}
	return k
}

func (e *engine) evict(name uint64) {
	delete(e.cache, name)
	for i, n := range e.order {
		if n == name {
			e.order = append(e.order[:i:i], e.order[i+1:]...)
			return
		}
	}
}

func (e *engine) replay(from uint64, each func(uint64, []byte)) error {
	for _, k := range e.kept {
		if k.seq >= from {
			each(k.seq, k.payload)
		}
	}
	return nil
}

// hit returns how many leading blocks of a prompt the engine holds.
func (e *engine) hit(ids []int) int {
	n := 0
	for n < len(ids)/engineBlock && e.cache[e.name(ids[:(n+1)*engineBlock])] != nil {
		n++
	}
	return n
}

func tokenPrompt(ids []int) prefixindex.TokenPrompt {
	var p prefixindex.TokenPrompt
	for _, id := range ids {
		p.IDs = append(p.IDs, uint32(id))
	}
	return p
}

// streamProgram runs an engine whose messages get lost, whose connection breaks, and which restarts. Whenever a
// message has arrived, the index must hold exactly the engine's blocks; if old batches were not available, no more
// than those.
func streamProgram(t *testing.T, next func(n int) int, steps int) {
	e := newEngine(24+next(40), 1+next(60), next(2) == 0)
	x := newEngineIndex()
	s := stream{sink: x.feed}
	ask, canReplay := replay(e.replay), next(4) > 0
	if !canReplay {
		ask = noReplay
	}
	connect := func() {
		if err := s.connected(ask); err != nil {
			require.ErrorIs(t, err, errNoReplay)
		}
	}
	connect()
	for range steps {
		switch next(30) {
		case 0: // the engine restarts
			e.restart()
		case 1: // some messages get lost
			for range 1 + next(10) {
				e.step(next)
			}
		case 2: // the connection breaks and is made again
			for range next(6) {
				e.step(next)
			}
			connect()
		case 3: // a message comes that a replay has brought already
			if n := len(e.kept); n > 0 && s.known && s.next == uint64(e.seq) {
				s.live(e.kept[n-1].seq, e.kept[n-1].payload, ask)
			}
		}
		k := e.step(next)
		s.live(k.seq, k.payload, ask)
		require.Equal(t, k.seq+1, s.next)
		for range 4 {
			ids := make([]int, engineBlock*8)
			for i := range ids {
				ids[i] = 1
				if i%engineBlock == 0 {
					ids[i] = min(next(6), 2) + 70_000
				}
			}
			want, got := e.hit(ids), x.hit(tokenPrompt(ids), engineBlock)
			require.LessOrEqual(t, got, want, "the index promises what is gone")
			if canReplay && len(e.kept) == e.seq { // every batch since the start of the engine was available
				require.Equal(t, want, got)
			}
		}
	}
	require.Zero(t, s.count.malformed.Load())
}

func TestStreamAgainstEngine(t *testing.T) {
	seeds := uint64(150)
	if testing.Short() || budget.Race {
		seeds = 15
	}
	for seed := range seeds {
		streamProgram(t, rand.New(rand.NewPCG(seed, 7)).IntN, 400)
	}
}

func FuzzStream(f *testing.F) {
	f.Add([]byte("\x00\x3b\x00\x01\x00\x05\x01\x02\x01\x07"))
	f.Fuzz(func(t *testing.T, program []byte) {
		at := 0
		next := func(n int) int {
			if at == len(program) {
				return 0
			}
			at++
			return int(program[at-1]) % n
		}
		streamProgram(t, next, min(len(program)/4+1, 200))
	})
}

// Each case is a sequence of steps and the resulting counts.
func TestStream(t *testing.T) {
	ids := func(n int) []int { return []int{n, 1, 1, 1} }
	type step struct {
		what  string
		do    func(e *engine, s *stream, ask replay)
		known string // the prompts 0..5 that the index knows to be held
	}
	publish := func(e *engine, n int) kept {
		e.clock++
		k := kept{uint64(e.seq), pack([]any{e.clock, []any{e.stored(ids(n), 0, 1)}, 0})}
		e.kept, e.seq = append(e.kept, k), e.seq+1
		return k
	}
	live := func(n int) func(*engine, *stream, replay) {
		return func(e *engine, s *stream, ask replay) { k := publish(e, n); s.live(k.seq, k.payload, ask) }
	}
	missed := func(n int) func(*engine, *stream, replay) {
		return func(e *engine, _ *stream, _ replay) { publish(e, n) }
	}
	connect := func(_ *engine, s *stream, ask replay) { _ = s.connected(ask) }
	for name, c := range map[string]struct {
		replay bool
		steps  []step
		want   [5]uint64 // gaps, recovered, lost, restarts, batches
	}{
		"an engine that has run for a while": {true, []step{
			{"published before we came", missed(0), ""}, {"connect", connect, "0"}, {"live", live(1), "01"},
		}, [5]uint64{0, 0, 0, 0, 2}},
		"and one that keeps no batches": {false, []step{
			{"published before we came", missed(0), ""}, {"connect", connect, ""}, {"live", live(1), "1"},
		}, [5]uint64{0, 0, 0, 0, 1}},
		"a gap is closed before what came after it": {true, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"lost", missed(1), "0"}, {"lost", missed(2), "0"}, {"live", live(3), "0123"},
		}, [5]uint64{1, 1, 0, 0, 4}},
		"a gap that cannot be closed": {false, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"lost", missed(1), "0"}, {"live", live(2), "2"},
		}, [5]uint64{1, 0, 1, 0, 2}},
		"a gap that the engine kept too little of": {true, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"lost", missed(1), "0"}, {"lost", missed(2), "0"},
			{"it forgets", func(e *engine, _ *stream, _ replay) { e.kept = e.kept[2:] }, "0"}, {"live", live(3), "23"},
		}, [5]uint64{1, 1, 1, 0, 3}},
		"a restart is seen by its numbers": {true, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"live", live(1), "01"},
			{"restart", func(e *engine, _ *stream, _ replay) { e.restart() }, "01"}, {"lost", missed(3), "01"}, {"live", live(2), "23"},
		}, [5]uint64{0, 0, 0, 1, 4}},
		"a restart is seen when the connection is made again": {true, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"live", live(1), "01"},
			{"restart", func(e *engine, _ *stream, _ replay) { e.restart() }, "01"}, {"connect", connect, ""}, {"live", live(2), "2"},
		}, [5]uint64{0, 0, 0, 1, 3}},
		"a connection that was lost, but not the engine": {true, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"lost", missed(1), "0"}, {"connect", connect, "01"}, {"live", live(2), "012"},
		}, [5]uint64{0, 0, 0, 0, 3}},
		"what a replay brought comes live too": {true, []step{
			{"published before we came", missed(0), ""}, {"connect", connect, "0"},
			{"live, late", func(e *engine, s *stream, ask replay) { s.live(0, e.kept[0].payload, ask) }, "0"},
		}, [5]uint64{0, 0, 0, 0, 1}},
		"a payload that is none": {true, []step{
			{"connect", connect, ""}, {"live", live(0), "0"}, {"garbage", func(e *engine, s *stream, ask replay) { s.live(1, []byte("x"), ask); e.seq++ }, ""}, {"live", live(2), "2"},
		}, [5]uint64{0, 0, 1, 0, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			e, x := newEngine(100, 100, true), newEngineIndex()
			s := &stream{sink: x.feed}
			ask := replay(noReplay)
			if c.replay {
				ask = e.replay
			}
			for _, step := range c.steps {
				step.do(e, s, ask)
				known := ""
				for n := range 6 {
					if x.hit(tokenPrompt(ids(n)), engineBlock) > 0 {
						known += fmt.Sprint(n)
					}
				}
				require.Equal(t, step.known, known, step.what)
			}
			n := &s.count
			require.Equal(t, c.want, [5]uint64{n.gaps.Load(), n.recovered.Load(), n.lost.Load(), n.restarts.Load(), n.batches.Load()})
		})
	}
}
