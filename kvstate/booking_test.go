package kvstate

import (
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// prefillOf books so much work on P, for so many tokens.
func prefillOf(seconds float64, uncached int64) Booking {
	return Booking{For: RolePrefill, PromptTokens: uncached, Uncached: uncached, Work: Seconds(seconds)}
}

// clocked returns a state with one P and one D in a time of its own.
func clocked() (s *State, pool *Pool, now *time.Time) {
	at := time.Unix(1000, 0)
	s = New(Options{Now: func() time.Time { return at }})
	s.SetPool(PoolSpec{Name: "p", StepTokens: 1000}, pd(1, 1))
	return s, s.Pool("p"), &at
}

func see(s *State, p *Pool) (prefill, decode Candidate, load Utilisation) {
	var v View
	s.View(p, nil, &v)
	return v.Endpoints[0], v.Endpoints[1], v.Load
}

// Bookings on P form a queue: the finished part of its front no longer delays others.
func TestQueueOfPrefills(t *testing.T) {
	s, pool, now := clocked()
	e := pool.Endpoints()[0]
	first, second, third := s.Bookings.Reserve(e, prefillOf(1, 600)), s.Bookings.Reserve(e, prefillOf(2, 400)), s.Bookings.Reserve(e, prefillOf(4, 5000))
	p, _, _ := see(s, pool)
	require.EqualValues(t, 3, p.Jobs)
	require.Equal(t, 7*time.Second, p.Queue)

	*now = now.Add(500 * time.Millisecond)
	p, _, _ = see(s, pool)
	require.Equal(t, 6500*time.Millisecond, p.Queue, "half a second of it is done")
	*now = now.Add(10 * time.Second)
	p, _, _ = see(s, pool)
	require.Equal(t, 4*time.Second, p.Queue, "the first two share a step and may both be done; the third has not begun")

	require.True(t, s.Bookings.Release(second))
	p, _, _ = see(s, pool)
	require.Equal(t, 4*time.Second, p.Queue)
	require.True(t, s.Bookings.Complete(first))
	p, _, _ = see(s, pool)
	require.Equal(t, 4*time.Second, p.Queue, "the third is the first now, and has just begun")
	*now = now.Add(time.Second)
	p, _, _ = see(s, pool)
	require.Equal(t, 3*time.Second, p.Queue, "one longer than a step is under way all the same")
	require.True(t, s.Bookings.Release(third))
	p, _, _ = see(s, pool)
	require.Zero(t, p.Queue)
	require.Zero(t, p.Jobs)
}

// The queue is compared with one that adds everything up again.
func TestQueueAgainstTwin(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	s, pool, now := clocked()
	e := pool.Endpoints()[0]
	type held struct {
		id     ReservationID
		work   time.Duration
		tokens int64
	}
	var all []held
	since := *now
	for range 3000 {
		*now = now.Add(time.Duration(random.IntN(100)) * time.Millisecond)
		if len(all) > 0 && random.IntN(2) == 0 {
			i := random.IntN(min(len(all), 3))
			require.True(t, s.Bookings.Release(all[i].id))
			all = append(all[:i], all[i+1:]...)
			if i == 0 {
				since = *now
			}
		} else {
			h := held{work: time.Duration(random.IntN(300)) * time.Millisecond, tokens: random.Int64N(800)}
			if len(all) == 0 {
				since = *now
			}
			h.id = s.Bookings.Reserve(e, Booking{For: RolePrefill, Uncached: h.tokens, Work: h.work})
			all = append(all, h)
		}
		var total, lead time.Duration
		tokens, leading := int64(0), true
		for i, h := range all {
			total += h.work
			tokens += h.tokens
			if leading = leading && (i == 0 || tokens <= 1000); leading {
				lead += h.work
			}
		}
		p, _, _ := see(s, pool)
		require.Equal(t, total-min(lead, now.Sub(since)), p.Queue)
		require.EqualValues(t, len(all), p.Jobs)
	}
}

func TestWorkOnDecodeEndpointsDrainsByItself(t *testing.T) {
	s, pool, now := clocked()
	d := pool.Endpoints()[1]
	one := s.Bookings.Reserve(d, Booking{For: RoleBoth, PromptTokens: 100, Uncached: 100, Work: 2 * time.Second})
	two := s.Bookings.Reserve(d, Booking{For: RoleBoth, PromptTokens: 100, Uncached: 100, Work: 3 * time.Second})
	_, c, load := see(s, pool)
	require.Equal(t, 5*time.Second, c.Local)
	require.InDelta(t, .5, c.Share, .001, "5 s of the last 10")
	require.EqualValues(t, 2, c.Requests)
	require.Zero(t, c.Jobs, "nobody waits for its end")
	require.Greater(t, load.Local, 0.0)
	require.Zero(t, load.Prefill)
	*now = now.Add(4 * time.Second)
	require.True(t, s.Bookings.Release(two), "its client left: a second of it was still to do")
	_, c, _ = see(s, pool)
	require.Zero(t, c.Local)
	require.True(t, s.Bookings.Release(one))
	*now = now.Add(time.Minute)
	_, c, _ = see(s, pool)
	require.Less(t, c.Share, .01)
}

// A tentative booking is held like any other, and counts nowhere: neither for views nor for other replicas.
func TestTentativeBookingsDoNotCount(t *testing.T) {
	s, pool, now := clocked()
	d := pool.Endpoints()[1]
	coming := s.Bookings.Reserve(d, Booking{For: RoleDecode, PromptTokens: 1000, Tentative: true})
	there := s.Bookings.Reserve(d, Booking{For: RoleDecode, PromptTokens: 100})
	_, c, _ := see(s, pool)
	require.Equal(t, []int64{1, 100}, []int64{c.Requests, c.PromptTokens})
	require.Equal(t, Booked{Requests: 1, PromptTokens: 100}, d.Booked(*now))
	require.Equal(t, 2, s.Bookings.Reservations())
	require.True(t, s.Bookings.Release(coming))
	require.False(t, s.Bookings.Release(coming))
	require.True(t, s.Bookings.Release(there))
	_, c, _ = see(s, pool)
	require.Zero(t, c.Requests)
	require.Zero(t, c.PromptTokens)
	require.Zero(t, s.Bookings.Reservations())
}

// Utilisation is the work of the last minute over the endpoints' time, also in the first minute. Work of the first ten
// seconds counts as if it were all of ten seconds: one prompt keeps nobody busy.
func TestUtilisation(t *testing.T) {
	s, pool, now := clocked()
	e := pool.Endpoints()[0]
	for second := range 300 {
		s.Bookings.Release(s.Bookings.Reserve(e, prefillOf(.4, 100)))
		*now = now.Add(time.Second)
		_, _, load := see(s, pool)
		require.InDelta(t, .04*float64(min(second+1, 10)), load.Prefill, .05, "after %d s", second+1)
		if second > 10 {
			require.InDelta(t, .4, load.Prefill, .05, "after %d s", second)
		}
	}
	_, _, load := see(s, pool)
	require.Equal(t, 400*time.Millisecond, load.Work.Round(time.Millisecond))
	*now = now.Add(5 * time.Minute)
	_, _, load = see(s, pool)
	require.Less(t, load.Prefill, .01)
}

// An endpoint's speed is learned from its busy time, however it batched: small jobs with a whole step's overhead do
// not make it look slow for large ones.
func TestSpeedIsARatioOfSums(t *testing.T) {
	s, pool, now := clocked()
	e := pool.Endpoints()[0]
	random := rand.New(rand.NewPCG(1, 1))
	for range 300 {
		var ids []ReservationID
		var work float64
		for range 1 + random.IntN(6) {
			w := math.Exp(random.NormFloat64()) / 10
			work += w
			ids = append(ids, s.Bookings.Reserve(e, prefillOf(w, 100)))
		}
		*now = now.Add(Seconds(work * 2)) // twice the model's time, and all end at once
		for _, id := range ids {
			require.True(t, s.Bookings.Complete(id))
		}
	}
	p, d, load := see(s, pool)
	require.InDelta(t, 2, p.Speed, .35)
	require.InDelta(t, 2, load.Speed, .35)
	require.InDelta(t, load.Speed, d.Speed, 0, "nothing is known of this one but its fleet")
}

func TestSpeedNeedsEvidence(t *testing.T) {
	s, pool, now := clocked()
	e := pool.Endpoints()[0]
	id := s.Bookings.Reserve(e, prefillOf(.005, 10))
	*now = now.Add(50 * time.Millisecond)
	s.Bookings.Complete(id)
	p, _, _ := see(s, pool)
	require.InDelta(t, 1, p.Speed, .03, "ten times the model for one small job is noise")
	for range 100 {
		id := s.Bookings.Reserve(e, prefillOf(1, 1000))
		*now = now.Add(20 * time.Second)
		s.Bookings.Complete(id)
	}
	p, _, _ = see(s, pool)
	require.InDelta(t, 10, p.Speed, 0, "within bounds")
	id = s.Bookings.Reserve(e, prefillOf(1, 1000))
	*now = now.Add(20 * time.Second)
	s.Bookings.Release(id)
	require.InDelta(t, 10, p.Speed, 0, "a prefill that failed says nothing")
}

// Prompts of 200 tokens show an endpoint's speed as large ones do: the prior fades with the observations, otherwise it
// would outweigh them for ever.
func TestSpeedIsLearnedFromShortPrompts(t *testing.T) {
	for _, truth := range []float64{.25, .5, 1, 2, 4} {
		s, pool, now := clocked()
		e, random := pool.Endpoints()[0], rand.New(rand.NewPCG(1, 1))
		for range 100 {
			work := .005 + .0125
			id := s.Bookings.Reserve(e, prefillOf(work, 200))
			*now = now.Add(Seconds(work * truth * (.9 + .2*random.Float64())))
			s.Bookings.Complete(id)
		}
		p, _, load := see(s, pool)
		require.InEpsilon(t, truth, p.Speed, .15)
		require.InEpsilon(t, truth, load.Speed, .15)
	}
}

// One prefill that stalled for a minute is forgotten after some more, and an observation expires after ten minutes: an
// endpoint that was slow once is tried again.
func TestSpeedForgets(t *testing.T) {
	s, pool, now := clocked()
	e := pool.Endpoints()[0]
	prefill := func(took float64) float64 {
		id := s.Bookings.Reserve(e, prefillOf(.1, 1600))
		*now = now.Add(Seconds(took))
		s.Bookings.Complete(id)
		p, _, _ := see(s, pool)
		return p.Speed
	}
	for range 100 {
		prefill(.1)
	}
	require.Less(t, prefill(60), 2.)
	for range 50 {
		prefill(.1)
	}
	require.InDelta(t, 1, prefill(.1), .25)
	for range 100 {
		prefill(.4)
	}
	require.InEpsilon(t, 4, prefill(.4), .15)
	*now = now.Add(11 * time.Minute)
	p, _, _ := see(s, pool)
	require.InDelta(t, 1, p.Speed, 0)
}

// The clock is the process's own unless another is given.
func TestQueueInRealTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
		s.Bookings.Reserve(s.Pool("p").Endpoints()[0], prefillOf(3, 100))
		<-time.After(2 * time.Second)
		p, _, _ := see(s, s.Pool("p"))
		require.Equal(t, time.Second, p.Queue)
	})
}
