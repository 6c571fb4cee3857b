package residency

import (
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
)

// fleet is a table with engines of some memory.
type fleet struct {
	*Table
	engines []*Engine
	seen    map[uint64]bool // blocks of prompts
}

func newFleet(tokens ...float64) *fleet {
	f := &fleet{Table: New(), seen: map[uint64]bool{}}
	for _, n := range tokens {
		e := &Engine{}
		f.Resize(e, n, 0)
		f.engines = append(f.engines, e)
	}
	return f
}

// prompt returns the blocks of a prompt of a conversation, of 100 tokens each.
func prompt(name, blocks int) []uint64 {
	out := make([]uint64, blocks)
	for i := range out {
		out[i] = uint64(name*1000 + i + 1)
	}
	return out
}

// arrive lets a prompt of so many blocks arrive.
func (f *fleet) arrive(name, blocks int, now float64) *Conversation {
	return f.ask(prompt(name, blocks), 0, now)
}

// ask lets a prompt arrive whose client names its conversation.
func (f *fleet) ask(blocks []uint64, name uint64, now float64) *Conversation {
	held := 0
	for held < len(blocks) && f.seen[blocks[held]] {
		held++
	}
	for _, b := range blocks {
		f.seen[b] = true
	}
	return f.Arrive(&Prompt{Blocks: blocks, Held: held, Tokens: float64(len(blocks) * 100), Name: name}, now)
}

// turn plays a turn of a conversation whose prompt has so many blocks, and returns its conversation.
func (f *fleet) turn(at, name, blocks int, now float64) *Conversation {
	c := f.arrive(name, blocks, now)
	f.Sent(c, f.engines[at], now)
	f.End(c, 0, 1, now)
	return c
}

// memory returns what an engine holds, as of now.
func (f *fleet) memory(at int, now float64) *Memory {
	f.engines[at].at = math.Inf(-1) // else it may be said later
	f.Sweep(now, slices.Values(f.engines))
	return f.engines[at].Memory()
}

func TestPromptThatExtendsAnotherContinuesItsConversation(t *testing.T) {
	f := newFleet(10_000, 10_000)
	c := f.turn(0, 1, 10, 0)
	require.Same(t, c, f.turn(0, 1, 12, 5))
	require.NotSame(t, c, f.turn(0, 2, 12, 6))
	require.NotSame(t, c, f.turn(0, 1, 10, 7), "an older prompt again: a fork")
	require.Nil(t, f.Arrive(&Prompt{Tokens: 10}, 8), "too short for a block")
}

func TestEngineDiscardsTheLeastRecentlyUsed(t *testing.T) {
	f := newFleet(3000)
	for name := range 3 {
		f.turn(0, name, 10, float64(name))
	}
	require.Zero(t, f.memory(0, 3).Free)
	f.turn(0, 0, 11, 4) // the oldest becomes the newest, and grows: the end of 1 is discarded
	m := f.memory(0, 4)
	require.Equal(t, []float64{900, 1000, 1100, 0}, []float64{m.Old[0].Tokens, m.Old[1].Tokens, m.Old[2].Tokens, m.Old[3].Tokens})
	require.Equal(t, []float64{1000, 550}, []float64{m.Old[0].End, m.Old[0].Middle})
}

// Many small conversations are said together, by their means.
func TestSmallConversationsAreSaidTogether(t *testing.T) {
	f := newFleet(24_000)
	for name := range 100 {
		f.turn(0, name, 2, float64(name)/10)
	}
	m, sum := f.memory(0, 100), 0.0
	for _, p := range m.Old {
		sum += p.Tokens
	}
	require.InDelta(t, 20_000, sum, 1e-6)
	require.Equal(t, []float64{1000, 200, 100}, []float64{m.Old[0].Tokens, m.Old[0].End, m.Old[0].Middle})
}

func TestCopyOfWhatLivesElsewhereIsWorthNothing(t *testing.T) {
	f := newFleet(5000, 5000)
	c := f.arrive(1, 2, 0)
	f.Holds(2, f.engines[0], 0) // computed there: no block 2 of this prompt
	f.Holds(1002, f.engines[0], 0)
	f.Sent(c, f.engines[1], 0) // answered here
	f.End(c, 100, 1, 1)
	require.Zero(t, f.memory(0, 1).Old[0].Back)
	require.Zero(t, f.memory(0, 1).Returns)
	require.Positive(t, f.memory(1, 1).Old[0].Back)
	require.Equal(t, []float64{200, 300}, []float64{f.memory(0, 1).Old[0].Tokens, f.memory(1, 1).Old[0].Tokens})
	require.Zero(t, f.memory(0, 1).Live)
	require.Positive(t, f.memory(1, 1).Live)
}

func TestRunningConversationsAreNotDiscarded(t *testing.T) {
	f := newFleet(1500)
	c := f.arrive(1, 10, 0)
	f.Sent(c, f.engines[0], 0)
	require.Zero(t, f.memory(0, 0).Old[0])
	f.turn(0, 2, 10, 1)
	require.InDelta(t, 500, f.memory(0, 1).Old[0].Tokens, 0, "half of 2 fits beside 1")
	f.End(c, 0, 2, 2)
	require.Positive(t, f.memory(0, 2).Old[1].Tokens)
}

// What waits for an engine is not discarded either, but not for ever: its client may have left.
func TestARequestThatNeverGoesIsForgotten(t *testing.T) {
	f := newFleet(5000)
	f.turn(0, 1, 10, 0)
	f.arrive(1, 12, 10)
	require.Zero(t, f.memory(0, 11).Old[0])
	require.Positive(t, f.memory(0, 11+waits).Old[0].Tokens)
}

// A request that was withdrawn keeps its conversation busy no longer: what its engine holds of it may be discarded.
func TestWithdrawnRequests(t *testing.T) {
	f := newFleet(5000)
	f.turn(0, 1, 10, 0)
	c := f.arrive(1, 12, 10)
	require.Zero(t, f.memory(0, 11).Old[0])
	f.Withdrawn(c, 12)
	require.Positive(t, f.memory(0, 13).Old[0].Tokens)

	require.Same(t, c, f.arrive(1, 14, 20), "its client asks again, with more")
	f.Sent(c, f.engines[0], 21)
	f.Withdrawn(c, 22)
	require.Zero(t, f.memory(0, 23).Old[0], "an engine has it")
	f.End(c, 0, 1, 24)
	f.Withdrawn(c, 25)
	require.Positive(t, f.memory(0, 26).Old[0].Tokens)
}

// What is computed again is known of each turn.
func TestWhatATurnComputesAgain(t *testing.T) {
	f := newFleet(1e6)
	f.turn(0, 1, 10, 0)
	c := f.arrive(1, 12, 5)
	require.Equal(t, Again{Had: 1000, Evicted: 500, Elsewhere: 300}, f.Computes(c, 2, 5))
	require.Zero(t, f.Computes(c, 2, 5), "of each arrival the first call counts")
}

// What is assumed of conversations before any has returned changes no engine's role.
func TestNothingIsExpectedBackWithoutEvidence(t *testing.T) {
	f, now := newFleet(1e6), 0.0
	for i := range 1000 {
		f.turn(0, i, 10, now)
		now += .1
		f.memory(0, now)
		require.Zero(t, f.Live(), "single questions")
	}
	for i := range int(evidence) {
		require.Zero(t, f.Live())
		f.turn(0, 900+i, 12, now)
	}
	f.memory(0, now+10)
	require.Positive(t, f.Live())
}

// A conversation is idle when all of its requests have ended.
func TestOverlappingRequests(t *testing.T) {
	f := newFleet(5000)
	c := f.arrive(1, 10, 0)
	f.Sent(c, f.engines[0], 0)
	require.Same(t, c, f.arrive(1, 12, 1))
	f.Sent(c, f.engines[0], 1)
	f.End(c, 0, 1, 2)
	require.Zero(t, f.memory(0, 2).Old[0])
	f.End(c, 0, 1, 3)
	require.Positive(t, f.memory(0, 3).Old[0].Tokens)
}

// A name that a client gives says that a conversation was written anew, so that nobody will ask for what it was.
func TestNames(t *testing.T) {
	f := newFleet(10_000)
	ask := func(prompt []uint64, name uint64, now float64) {
		c := f.ask(prompt, name, now)
		f.Sent(c, f.engines[0], now)
		f.End(c, 0, 1, now)
	}
	ask(prompt(1, 10), 7, 0)
	ask(prompt(2, 10), 8, 1)
	ask(prompt(3, 5), 7, 2)
	m := f.memory(0, 3)
	require.Zero(t, m.Old[0].Back, "the first of name 7")
	require.Positive(t, m.Old[1].Back)
	require.Positive(t, m.Old[2].Back)

	ask(prompt(1, 12), 7, 4) // it goes on: the name is of both
	ask(prompt(4, 5), 7, 5)
	m = f.memory(0, 6)
	for i := range 4 {
		require.Positive(t, m.Old[i].Back, i)
	}
}

// Another replica tells that it has sent a prompt, and never when the answer ends.
func TestAnotherReplica(t *testing.T) {
	f := newFleet(5000, 5000)
	none := func() int { return 0 }
	f.Elsewhere(&Prompt{Blocks: prompt(1, 10), Tokens: 1000}, f.engines[0], false, none, 0)
	f.Elsewhere(&Prompt{Blocks: prompt(1, 10), Tokens: 1000}, f.engines[1], true, none, 0)
	require.Zero(t, f.memory(1, 1).Old[0], "its answer is being written")
	require.Positive(t, f.memory(0, 1).Old[0].Tokens, "a copy")
	m := f.memory(1, 1+priorTurn)
	require.InDelta(t, 1000, m.Old[0].Tokens, 0)
	require.Positive(t, m.Old[0].Back)
	c := f.turn(0, 1, 12, 20)
	require.InDelta(t, 1200, c.tokens, 0)
	require.Same(t, f.engines[0], c.home)
	f.Elsewhere(&Prompt{Blocks: prompt(1, 14), Tokens: 1400}, f.engines[0], true, func() int { panic("it is known") }, 30)
	require.InDelta(t, 1400, c.tokens, 0)
}

// What is learned comes near to the chance with which conversations really return.
func TestReturnsAreLearned(t *testing.T) {
	for name, chance := range map[string]float64{"agents": 0.9, "single questions": 0} {
		f, random, now := newFleet(1e9), rand.New(rand.NewPCG(1, 2)), 0.0
		type due struct {
			at           float64
			name, blocks int
		}
		var waiting []due
		for i := range 3000 {
			now += 0.5
			if i%4 == 0 {
				waiting = append(waiting, due{now, i, 5})
			}
			for k := 0; k < len(waiting); k++ {
				d := waiting[k]
				if d.at > now {
					continue
				}
				f.turn(0, d.name, d.blocks, now)
				waiting = append(waiting[:k], waiting[k+1:]...)
				if random.Float64() < chance && d.blocks < 40 {
					waiting = append(waiting, due{now + 5 + 10*random.Float64(), d.name, d.blocks + 1})
				}
				k--
			}
			f.Sweep(now, slices.Values(f.engines))
		}
		require.InDelta(t, chance, f.back(0), 0.1, name)
		require.Less(t, f.back(200), 0.1, name)
	}
}

// What is free and what is held add up to the memory, whatever happens, and every list is whole.
func TestMemoryAddsUp(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	f, now := newFleet(20_000, 20_000, 20_000), 0.0
	sizes := map[int]int{}
	var running []*Conversation
	for range 2000 {
		now += random.Float64() * 3
		name, at := random.IntN(30), random.IntN(3)
		sizes[name] = min(sizes[name]+1+random.IntN(5), 50)
		c := f.arrive(name, sizes[name], now)
		switch random.IntN(6) {
		case 0:
			f.Holds(uint64(name*1000+sizes[name]), f.engines[at], now)
		case 1:
			f.Empty(f.engines[at], false)
			f.Resize(f.engines[at], 20_000, now)
		case 2:
			f.forget(f.oldest)
		case 3:
		default:
			f.Sent(c, f.engines[at], now)
			running = append(running, c)
		}
		if n := len(running); n > 10 {
			i := random.IntN(n)
			f.End(running[i], 10, 1, now)
			running = slices.Delete(running, i, i+1)
		}
		f.check(t, now)
	}
}

// check checks that the lists agree.
func (f *fleet) check(t *testing.T, now float64) {
	places, known := 0, 0
	for i, e := range f.engines {
		used := 0.0
		var before *place
		for p := e.oldest; p != nil; p = p.newer {
			require.Same(t, e, p.at)
			require.Same(t, before, p.older)
			require.False(t, p.of.gone)
			used, before, places = used+p.tokens, p, places+1
		}
		require.Same(t, before, e.newest)
		for _, shared := range e.commons {
			require.Positive(t, shared.places)
			used += shared.tokens
		}
		require.InDelta(t, used, e.used, 1e-6)
		m := f.memory(i, now)
		require.InDelta(t, max(20_000-used, 0), m.Free, 1e-6)
		for _, p := range m.Old {
			require.True(t, p.Back >= 0 && p.Back <= 1 && p.Middle <= p.End && p.Tokens <= 20_000, p)
		}
	}
	for c := f.oldest; c != nil; c = c.newer {
		known++
		for p := c.places; p != nil; p = p.also {
			places--
		}
	}
	require.Zero(t, places)
	require.Equal(t, f.known, known)
	require.LessOrEqual(t, len(f.tips), known)
}

func TestOldConversationsAreForgotten(t *testing.T) {
	f := newFleet(1e9)
	for i := range 100 {
		f.turn(0, i, 3, float64(i))
	}
	f.memory(0, forgotten+200)
	require.Zero(t, f.known)
	require.Nil(t, f.oldest)
	require.Empty(t, f.tips)
	require.Zero(t, f.Live())
	require.Zero(t, f.placed)
}

// Conversations and what engines hold of them are bounded; so are names.
func TestBounds(t *testing.T) {
	f := newFleet(1e9, 1e9, 1e9)
	for i := range maxConversations + 1000 {
		c := f.Arrive(&Prompt{Blocks: []uint64{uint64(i + 1)}, Tokens: 10, Name: uint64(i + 1)}, 1)
		for _, e := range f.engines {
			f.Holds(uint64(i+1), e, 1)
		}
		f.Sent(c, f.engines[0], 1)
		f.End(c, 1, 1, 1)
	}
	require.Equal(t, maxConversations, f.known)
	require.LessOrEqual(t, f.placed, maxPlaces)
	require.LessOrEqual(t, len(f.tips), maxConversations)
	require.LessOrEqual(t, len(f.names), maxConversations)
}

// A turn of a known conversation costs no memory but what is said anew of its engine, and that not more than fifty
// times a second; a prompt that nobody knows is found out by few look-ups.
func TestTurnAllocates(t *testing.T) {
	f, now, blocks := newFleet(1e6), 0.0, prompt(1, 2000)
	for i := range 200 {
		f.turn(0, i+2, 20, 0)
	}
	n := 100
	budget.Allocs(t, 1000, 0, func() {
		n, now = n%1900+100, now+1e-6
		c := f.Arrive(&Prompt{Blocks: blocks[:n], Held: n, Tokens: float64(n * 100)}, now)
		f.Sent(c, f.engines[0], now)
		f.Holds(blocks[n-1], f.engines[0], now)
		f.End(c, 0, 1, now)
	})
}

func BenchmarkTurn(b *testing.B) {
	for name, known := range map[string]int{"agents": 100, "chat": 20_000} {
		b.Run(name, func(b *testing.B) {
			f := newFleet(1e6, 1e6, 1e6, 1e6)
			for i := range known {
				f.turn(i%4, i+1, 10, 0)
			}
			prompts := make([][]uint64, known)
			for i := range prompts {
				prompts[i] = prompt(i+1, 10)
			}
			b.ReportAllocs()
			now, i := 10.0, 0
			for b.Loop() {
				i, now = i+1, now+.001
				name := i % known
				if i/known%2 == 1 {
					prompts[name] = append(prompts[name], uint64((name+1)*1000+len(prompts[name])+1))
				}
				n := len(prompts[name])
				c := f.Arrive(&Prompt{Blocks: prompts[name], Held: n - 1, Tokens: float64(n * 100)}, now)
				f.Sent(c, f.engines[i%4], now)
				f.Holds(c.tip, f.engines[i%4], now)
				f.End(c, 100, 1, now)
			}
		})
	}
}

// A prompt that nobody knows.
func BenchmarkNew(b *testing.B) {
	f, now := newFleet(1e6), 0.0
	blocks := prompt(1, 2000)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		now += .001
		blocks[1999] = uint64(i)<<20 | 7
		f.Arrive(&Prompt{Blocks: blocks, Held: 1900, Tokens: 1e5}, now)
	}
}

// A prompt of which all engines hold what it shares with others, and one all of it.
func BenchmarkLimit(b *testing.B) {
	f := newFleet(slices.Repeat([]float64{1e6}, 1024)...)
	begun := func(name int) []uint64 { return append(prompt(9, 10), prompt(name, 10)...) }
	for i := range 2048 {
		c := f.ask(begun(i+10), 0, float64(i))
		f.Sent(c, f.engines[i%1024], float64(i))
		f.End(c, 0, 1, float64(i))
	}
	next := append(begun(50), 7)
	hits := make([]int, 1024)
	b.ReportAllocs()
	for b.Loop() {
		for i := range hits {
			hits[i] = 10
		}
		hits[40] = 20
		f.Limit([2]uint64{7, next[19]}, len(hits), func(i int) (*Engine, *int) { return f.engines[i], &hits[i] })
	}
	require.Equal(b, 10, hits[3])
}

func BenchmarkSweep(b *testing.B) {
	f := newFleet(1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6, 1e6)
	for i := range 8000 {
		f.turn(i%8, i+1, 10, 0)
	}
	now := 10.0
	b.ReportAllocs()
	for b.Loop() {
		now++
		f.Sweep(now, slices.Values(f.engines))
	}
}

// limit returns how many blocks of a prompt engines can still have, each of which is thought to hold so many.
func (f *fleet) limit(blocks []uint64, hits ...int) []int {
	last := [2]uint64{blocks[len(blocks)-1], blocks[slices.Max(hits)-1]}
	f.Limit(last, len(hits), func(i int) (*Engine, *int) { return f.engines[i], &hits[i] })
	return hits
}

// What an engine's memory has displaced is not thought to be there.
func TestLimit(t *testing.T) {
	f := newFleet(3000, 3000, 0)
	f.turn(0, 1, 20, 0)
	require.Equal(t, []int{20, 20, 20}, f.limit(prompt(1, 20), 20, 20, 20), "its first prompt: others may have it, too")
	require.Equal(t, []int{20, 0, 20}, f.limit(prompt(1, 24), 20, 20, 20), "the third engine's memory is of unknown size")

	f.turn(0, 2, 16, 1)
	require.Equal(t, []int{14}, f.limit(prompt(1, 24), 20), "600 tokens of it are displaced, its end")
	c := f.arrive(1, 24, 2) // it waits
	require.Equal(t, []int{14, 0}, f.limit(prompt(1, 24), 20, 20))
	f.Sent(c, f.engines[0], 3)
	f.End(c, 0, 1, 4)
	require.Equal(t, []int{24}, f.limit(prompt(1, 30), 24))
	require.Equal(t, []int{6}, f.limit(prompt(2, 18), 16))
	require.Equal(t, []int{9}, f.limit(prompt(3, 18), 9), "nobody knows it")

	f.turn(2, 4, 10, 5)
	f.turn(2, 5, 20, 6)
	f.Resize(f.engines[2], 3000, 7) // a replica that has just started learns of requests before it has asked the engines
	require.Equal(t, []int{0, 0, 10}, f.limit(prompt(4, 12), 10, 10, 10))
	f.Resize(f.engines[2], 2500, 8)
	require.Equal(t, []int{0, 0, 5}, f.limit(prompt(4, 12), 10, 10, 10))
}

// What the table has no place for is not thought to be gone: neither what an engine holds that has just come, nor what
// another one got first.
func TestWhatTheTableLacksRoomForIsNotGone(t *testing.T) {
	f := newFleet(1e9, 1e9, 1e9, 1e9)
	for i := range maxPlaces/3 + 100 {
		last := uint64(i + 1)
		c := f.Arrive(&Prompt{Blocks: []uint64{last}, Tokens: 100}, 1)
		f.Holds(last, f.engines[1], 1)
		f.Holds(last, f.engines[2], 1)
		f.Sent(c, f.engines[0], 1)
		f.End(c, 0, 1, 1)
	}
	f.turn(3, 500, 10, 2)
	require.Equal(t, 10, f.limit(prompt(500, 12), 0, 0, 0, 10)[3])
	next := func(block uint64) []int { return f.limit([]uint64{block, 1 << 32}, 1, 1, 1) }
	require.Equal(t, []int{1, 1, 1}, next(1), "the first")
	require.Equal(t, []int{1, 1, 1}, next(maxPlaces/3+100), "the last")
}

// What conversations share is in an engine's memory once, and is gone with the last of them.
func TestSharedOnce(t *testing.T) {
	f := newFleet(5000)
	begun := func(name int) []uint64 { return append(prompt(9, 10), prompt(name, 10)...) }
	at := func(blocks []uint64, now float64) {
		c := f.ask(blocks, 0, now)
		f.Sent(c, f.engines[0], now)
		f.End(c, 0, 1, now)
	}
	for i := range 3 { // of 2,000 tokens each, the first thousand shared
		at(begun(i+1), float64(i))
	}
	require.InDelta(t, 5000, f.engines[0].used, 1e-9)
	require.Equal(t, []int{20}, f.limit(append(begun(1), 1), 20))
	at(prompt(5, 20), 4)
	require.Equal(t, []int{0}, f.limit(append(begun(1), 1), 20), "the first of them had it for itself")
	require.Equal(t, []int{20}, f.limit(append(begun(2), 1), 20))
	at(prompt(6, 20), 5)
	require.Equal(t, []int{0}, f.limit(append(begun(2), 1), 20))
	require.Equal(t, []int{0}, f.limit(append(begun(3), 1), 20))
	require.Empty(t, f.engines[0].commons)
	f.Empty(f.engines[0], false)
	require.Zero(t, f.engines[0].used)
}

// A replica that starts among others finds that engines hold what it has never seen. That is no beginning that
// conversations share: each of them takes memory, and is worth as much as one that it knows from the start.
func TestConversationsOlderThanTheReplica(t *testing.T) {
	play := func(known bool) (live float64, m *Memory) {
		f, now := newFleet(1e6), 0.0
		for turn := range 6 {
			for name := range 8 {
				now++
				blocks, held := prompt(name, 100+turn), 0
				if turn > 0 || !known {
					held = 100 + turn - 1
				}
				c := f.Arrive(&Prompt{Blocks: blocks, Held: held, Tokens: float64(100 * len(blocks))}, now)
				f.Sent(c, f.engines[0], now)
				f.End(c, 0, .5, now+.5)
			}
		}
		m = f.memory(0, now+1)
		return f.Live(), m
	}
	live, m := play(true)
	require.Greater(t, live, 20_000.)
	started, mine := play(false)
	require.InDelta(t, live, started, 1)
	require.Equal(t, m, mine)
}

// What is computed again of a conversation is counted by why: nobody holds it, or another engine does.
func TestComputedAgain(t *testing.T) {
	f := newFleet(10_000, 10_000)
	f.Computes(f.turn(0, 1, 10, 0), 0, 0)
	require.Zero(t, f.Report().All, "its first turn")

	c := f.arrive(1, 12, 5)
	f.Computes(c, 4, 8)
	f.Computes(c, 0, 0) // planned again
	require.Equal(t, Again{Had: 1000, Evicted: 200, Elsewhere: 400}, f.Report().All, "10 blocks: 4 are here, 8 elsewhere")

	f.Computes(f.arrive(1, 14, 6), 14, 14)
	require.Equal(t, Again{Had: 2200, Evicted: 200, Elsewhere: 400}, f.Report().All)
	for now := 7.; now < 5000; now++ {
		f.memory(0, now)
	}
	require.Less(t, f.Report().Lately.Had, 10.)
	require.Equal(t, Again{Had: 2200, Evicted: 200, Elsewhere: 400}, f.Report().All)
}

// Memory should keep what comes back, however rare that is within two minutes.
func TestWhatConversationsNeed(t *testing.T) {
	f := newFleet(1_000, 1_000)
	now := 0.
	for range 20 { // conversations of 30 blocks that come back after ten minutes, each time
		for name := range 10 {
			f.turn(name%2, name, 30, now)
		}
		for range 600 {
			now++
			f.memory(0, now)
		}
	}
	r := f.Report()
	require.Equal(t, 10, r.Known)
	require.InDelta(t, 30_000, r.Needs, 3_000)
	require.InDelta(t, 600, f.keep, 450)
}

// A prompt that every engine has had, as of a benchmark, costs as much for each engine as any other.
func BenchmarkLimitEverywhere(b *testing.B) {
	for _, n := range []int{100, 1000} {
		b.Run(strconv.Itoa(n), func(b *testing.B) {
			f := newFleet(slices.Repeat([]float64{1e6}, n)...)
			for at := range n {
				f.turn(at, 1, 20, float64(at))
			}
			hits := make([]int, n)
			last := [2]uint64{prompt(1, 20)[19], prompt(1, 20)[19]}
			for b.Loop() {
				f.Limit(last, n, func(i int) (*Engine, *int) { hits[i] = 20; return f.engines[i], &hits[i] })
			}
		})
	}
}
