package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
	"tandem/kvstate/residency"
)

// oneEngine returns a pool of one engine of both roles that reports its KV memory.
func oneEngine(t *testing.T, tokens int64) (*State, *Pool, *Endpoint) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p", Models: []string{"*"}}, []EndpointSpec{{Name: "e", Addr: "e:1", Role: RoleBoth}})
	p := s.Pool("p")
	g := UnknownSignals()
	g.At, g.ScrapedAt, g.KVTokens = time.Now(), time.Now(), tokens
	s.Observe(p.Endpoints()[0], g)
	require.InDelta(t, tokens, memoryOf(s, p).Tokens, 0)
	return s, p, p.Endpoints()[0]
}

// memoryOf returns what a view says of the first engine's memory.
func memoryOf(s *State, p *Pool) *residency.Memory {
	var v View
	s.View(p, nil, &v)
	return v.Endpoints[0].Memory
}

// ask lets a prompt arrive, and reserves the endpoint for it.
func ask(s *State, p *Pool, e *Endpoint, prompt []uint64, tokens int64) ReservationID {
	var v View
	s.View(p, prompt, &v)
	of := s.Arrived(p, prompt, tokens, 0, &v)
	id := s.Bookings.Reserve(e, Booking{For: RoleBoth, PromptTokens: tokens, Uncached: tokens, Of: of})
	s.Routed(p, e, prompt)
	return id
}

// What requests do feeds what is known of an engine's memory: a conversation is there while its request runs, may be
// discarded after that, and is continued by the prompt that extends it.
func TestMemoryFollowsReservations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, e := oneEngine(t, 10_000)
		id := ask(s, p, e, []uint64{1, 2, 3}, 3000)
		time.Sleep(time.Second)
		s.sweep(time.Now())
		require.Equal(t, []float64{7000, 0}, []float64{memoryOf(s, p).Free, memoryOf(s, p).Old[0].Tokens})
		require.True(t, s.Bookings.Release(id))
		time.Sleep(time.Second)
		s.sweep(time.Now())
		require.Equal(t, []float64{7000 - usualAnswer, 3000 + usualAnswer}, []float64{memoryOf(s, p).Free, memoryOf(s, p).Old[0].Tokens})
		require.Positive(t, memoryOf(s, p).Live)

		var v View
		s.View(p, []uint64{1, 2, 3, 4}, &v)
		require.NotNil(t, s.Arrived(p, []uint64{1, 2, 3, 4}, 4000, 0, &v))
		time.Sleep(time.Second)
		s.sweep(time.Now())
		require.Zero(t, memoryOf(s, p).Old[0].Tokens, "it is about to be used")
	})
}

// Conversations that came later displace what was routed to an engine, unless it gets KV from a store: then it finds more
// than its own memory keeps.
func TestHitsAreWhatMemoryKeeps(t *testing.T) {
	for _, store := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			s, p, e := oneEngine(t, 10_000)
			spec := p.Spec
			spec.Store = store
			s.SetPool(spec, []EndpointSpec{e.EndpointSpec})
			p = s.Pool("p")
			turn := func(prompt []uint64) {
				time.Sleep(30 * time.Second) // so that it was not routed moments ago
				s.Bookings.Release(ask(s, p, e, prompt, int64(len(prompt)*500)))
			}
			hit := func(prompt []uint64) int {
				var v View
				s.View(p, prompt, &v)
				return v.Endpoints[0].Hit
			}
			first, second := long(10, 0, 1), long(16, 0, 2)
			turn(first)
			require.Equal(t, 10, hit(append(first, 77)))
			turn(second)
			require.InDelta(t, 3, hit(append(first, 77)), 1, "8,000 of the memory's 10,000 tokens are the other's")
			require.Equal(t, 16, hit(append(second, 77)))

			g := UnknownSignals()
			g.At, g.ScrapedAt, g.Transfers.Tokens = time.Now(), time.Now(), 5
			s.Observe(e, g)
			require.Equal(t, store, hit(append(first, 77)) == 10)
		})
	}
}

// A request that no engine gets, or whose P has it and whose D will not, leaves its conversation idle at once.
func TestRequestsThatNobodyAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, e := oneEngine(t, 10_000)
		s.Bookings.Release(ask(s, p, e, []uint64{1, 2, 3}, 3000))
		discards := func() float64 {
			time.Sleep(time.Second)
			s.sweep(time.Now())
			return memoryOf(s, p).Old[0].Tokens
		}
		var v View
		s.View(p, []uint64{1, 2, 3, 4}, &v)
		of := s.Arrived(p, []uint64{1, 2, 3, 4}, 4000, 0, &v)
		require.Zero(t, discards())
		s.Withdrawn(p, of)
		require.Positive(t, discards())

		s.Arrived(p, []uint64{1, 2, 3, 4, 5}, 5000, 0, &v)
		first := s.Bookings.Reserve(e, Booking{For: RoleDecode, PromptTokens: 5000, Of: of, Tentative: true})
		require.Zero(t, discards())
		second := s.Bookings.Reserve(e, Booking{For: RoleDecode, PromptTokens: 5000, Of: of})
		s.Bookings.Release(first)
		require.Zero(t, discards(), "D was chosen again, and answers")
		s.Bookings.Release(second)

		s.Arrived(p, []uint64{1, 2, 3, 4, 5, 6}, 6000, 0, &v)
		first = s.Bookings.Reserve(e, Booking{For: RoleDecode, PromptTokens: 6000, Of: of, Tentative: true})
		require.Zero(t, discards())
		s.Bookings.Release(first)
		require.Positive(t, discards())
	})
}

// A reservation that nobody releases expires, and its conversation is idle.
func TestMemoryOfALostReservation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, e := oneEngine(t, 10_000)
		ask(s, p, e, []uint64{1}, 3000)
		time.Sleep(16 * time.Minute)
		for range 2 {
			s.sweep(time.Now())
			time.Sleep(time.Second)
		}
		require.Positive(t, memoryOf(s, p).Old[0].Tokens)
	})
}

// An engine that has restarted holds nothing, and one that leaves is forgotten, also while its requests run.
func TestMemoryOfEnginesThatRestartAndLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, e := oneEngine(t, 10_000)
		id := ask(s, p, e, []uint64{1}, 3000)
		for _, written := range []int64{500, 3} {
			time.Sleep(2 * time.Second)
			g := UnknownSignals()
			g.At, g.ScrapedAt, g.KVTokens = time.Now(), time.Now(), 10_000
			g.Answers.Answers, g.Answers.Tokens = written, written
			s.Observe(e, g)
		}
		time.Sleep(time.Second)
		s.sweep(time.Now())
		require.InDelta(t, 10_000, memoryOf(s, p).Free, 0)
		s.SetPool(p.Spec, []EndpointSpec{{Name: "f", Addr: "f:1", Role: RoleBoth}})
		s.Bookings.Release(id)
		require.Nil(t, memoryOf(s, s.Pool("p")), "of unknown size")
	})
}

// Another replica's prompts are known by what it publishes of them: their blocks.
func TestMemoryOfOtherReplicas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, e := oneEngine(t, 10_000)
		s.ApplyRouted(p, e, []uint64{1, 2, 3, 4, 5, 6, 7, 8})
		time.Sleep(time.Second)
		s.sweep(time.Now())
		tokens := 8 * textBlockBytes / p.ratio.bytesPerToken()
		require.InDelta(t, 10_000-tokens, memoryOf(s, p).Free, 1)
		require.Zero(t, memoryOf(s, p).Old[0].Tokens, "its answer may be running")
		time.Sleep(time.Minute)
		s.sweep(time.Now())
		require.InDelta(t, tokens, memoryOf(s, p).Old[0].Tokens, 1)
		require.NotNil(t, p.Conversation([]uint64{8}), "pass 2 may come here")
		var v View
		s.View(p, nil, &v)
		of := s.Arrived(p, []uint64{1, 2, 3, 4, 5, 6, 7, 8, 9}, 1200, 0, &v)
		require.Same(t, of, p.Conversation([]uint64{9}))
		require.Nil(t, p.Conversation([]uint64{8}))
	})
}

// What a request costs here: nothing, if its conversation is known.
func TestMemoryAllocates(t *testing.T) {
	s, p, e := oneEngine(t, 1_000_000)
	prompt := make([]uint64, 1000)
	for i := range prompt {
		prompt[i] = uint64(i + 1)
	}
	var v View
	n := 10
	ask(s, p, e, prompt[:n], 100)
	budget.Allocs(t, 100, 0, func() {
		s.View(p, nil, &v)
		of := s.Arrived(p, prompt[:n], 1000, 0, &v)
		s.Bookings.Release(s.Bookings.Reserve(e, Booking{For: RoleDecode, PromptTokens: 1000, Of: of}))
	})
}
