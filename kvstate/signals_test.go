package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// reported returns an endpoint's signals without what is computed from them.
func reported(e *Endpoint) Signals {
	signals := *e.Signals()
	signals.oldest = 0
	return signals
}

// Signals lose weight with age; a figure that one source lacks keeps the value of another, until that is too old. The
// capacity of KV does not age.
func TestSignalsAge(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "a", Role: RoleBoth}})
	e, at := s.Pool("p").Endpoints()[0], time.Now()
	require.Zero(t, e.Signals().Trust(at), "none at all")
	s.Observe(e, Signals{Running: 4, Waiting: 1, KVUsage: .5, KVTokens: 1000, At: at})
	for age, trust := range map[time.Duration]float64{0: 1, signalsFresh: 1, (signalsFresh + signalsDead) / 2: .5, signalsDead: 0, time.Hour: 0} {
		require.InDelta(t, trust, e.Signals().Trust(at.Add(age)), 1e-9, age)
	}
	s.Observe(e, Signals{Running: -1, Waiting: 7, KVUsage: -1, KVTokens: -1, At: at.Add(time.Second)})
	require.Equal(t, Signals{Running: 4, Waiting: 7, KVUsage: .5, KVTokens: 1000, At: at.Add(time.Second), ScrapedAt: at, unbooked: 5}, reported(e))
	s.Observe(e, Signals{Running: 9, Waiting: 9, KVUsage: .9, KVTokens: 9, At: at})
	require.Equal(t, int64(4), e.Signals().Running, "old news")
	room := func() int64 {
		var v View
		s.View(s.Pool("p"), nil, &v)
		return v.Endpoints[0].KVTokens
	}
	require.EqualValues(t, 1000, room())
	s.Observe(e, Signals{Running: -1, Waiting: 2, KVUsage: -1, KVTokens: -1, At: at.Add(time.Minute)})
	require.Equal(t, Signals{Running: -1, Waiting: 2, KVUsage: -1, KVTokens: -1, At: at.Add(time.Minute)}, reported(e))
	require.Zero(t, room(), "it does not say")
}

// Answers' headers have the number of waiting requests, but not the figures of the metrics: those are as old as the
// last scrape, however many answers come, are trusted accordingly, and expire.
func TestHeadersKeepNoLookFresh(t *testing.T) {
	start := time.Unix(1000, 0)
	now := start
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "d", Role: RoleDecode}})
	e := s.Pool("p").Endpoints()[0]
	header := Signals{Running: -1, Waiting: 2, KVUsage: .5, KVTokens: -1}
	requests := func() int64 {
		var v View
		s.View(s.Pool("p"), nil, &v)
		return v.Endpoints[0].Requests
	}
	for range 2 {
		now = now.Add(time.Second)
		s.Observe(e, Signals{Running: 8, Waiting: 0, KVUsage: .1, KVTokens: 1000, At: now})
	}
	looked := now
	require.EqualValues(t, 8, requests())
	for ; now.Sub(looked) < signalsDead; now = now.Add(time.Second / 4) {
		header.At = now
		s.Observe(e, header)
		require.Equal(t, now.Sub(looked), e.Signals().Age(now))
		require.InDelta(t, 8*min(1, 1-float64(now.Sub(looked)-signalsFresh)/float64(signalsDead-signalsFresh)), requests(), .51, now.Sub(looked))
	}
	header.At = now
	s.Observe(e, header)
	require.Equal(t, header, reported(e), "no look in all that time")
	require.Zero(t, e.Signals().Age(now))

	// A scrape takes a while to arrive. It is newer than the last one even though answers came meanwhile, whose
	// figures are newer still.
	s.Observe(e, Signals{Running: 5, Waiting: 9, KVUsage: .9, KVTokens: 1000, At: now.Add(-time.Second)})
	require.Equal(t, Signals{Running: 5, Waiting: 2, KVUsage: .5, KVTokens: 1000, At: now, ScrapedAt: now.Add(-time.Second), unbooked: 14}, reported(e))
	s.Observe(e, Signals{Running: 6, Waiting: 9, KVUsage: .9, KVTokens: 1000, At: now.Add(-2 * time.Second)})
	require.EqualValues(t, 5, e.Signals().Running, "old news")
}

// Requests at an engine that no replica has booked count, if two scrapes report them, weighted by trust.
func TestExternalLoad(t *testing.T) {
	now := time.Unix(1000, 0)
	s := New(Options{Now: func() time.Time { return now }})
	s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "p", Role: RolePrefill}, {Addr: "d", Role: RoleDecode}})
	pool := s.Pool("p")
	p, d := pool.Endpoints()[0], pool.Endpoints()[1]
	look := func(running, waiting int64) {
		now = now.Add(time.Second)
		for _, e := range pool.Endpoints() {
			s.Observe(e, Signals{Running: running, Waiting: waiting, KVUsage: -1, KVTokens: -1, At: now})
		}
	}
	view := func() [2]Candidate {
		var v View
		s.View(pool, nil, &v)
		return [2]Candidate(v.Endpoints)
	}
	booked := s.Bookings.Reserve(d, Booking{For: RoleDecode, PromptTokens: 300})
	look(5, 2)
	require.Equal(t, int64(1), view()[1].Requests, "one look may have met requests on their way")
	look(4, 2)
	c := view()
	require.Equal(t, []int64{6, 6 * 300}, []int64{c[1].Requests, c[1].PromptTokens}, "five more, as long as the one that is booked")
	require.Zero(t, c[1].Jobs)
	require.Equal(t, []int64{6, 6, 6 * externalTokens}, []int64{c[0].Requests, c[0].Jobs, c[0].PromptTokens})
	require.Zero(t, c[0].Queue, "nobody knows how long they take, so nobody waits for them")

	s.Observe(d, Signals{Running: -1, Waiting: 2, KVUsage: .5, KVTokens: -1, At: now.Add(time.Millisecond)})
	require.Equal(t, int64(6), view()[1].Requests, "an answer's header does not say")
	d.SetRemoteLoad(RemoteLoad{Requests: 3})
	look(4, 2)
	require.Equal(t, int64(1+3+2), view()[1].Requests, "three of them are another replica's")
	look(1, 0)
	require.Equal(t, int64(1+3), view()[1].Requests)
	s.Bookings.Release(booked)

	look(9, 0)
	look(9, 0)
	require.Equal(t, int64(9), view()[0].Requests)
	now = now.Add((signalsFresh + signalsDead) / 2)
	require.InDelta(t, 4.5, view()[0].Requests, .6)
	now = now.Add(time.Hour)
	require.Zero(t, view()[0].Requests)
	look(9, 0)
	require.Zero(t, view()[0].Requests, "what was known is too old to agree")
	s.ApplyObserved(p, Signals{Running: 9, KVUsage: -1, KVTokens: -1, External: 7, At: now.Add(time.Second)})
	require.Equal(t, int64(7), view()[0].Requests, "as another replica has it")
}

// A prompt counts against the endpoint that holds its KV until the report of the other one shows that it was fetched,
// or the reservation ends.
func TestHeldUntilFetched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		s.SetPool(PoolSpec{Name: "p"}, []EndpointSpec{{Addr: "p", Role: RolePrefill}, {Addr: "d", Role: RoleDecode}, {Addr: "b", Role: RoleBoth}})
		p, d, b := s.Pool("p").Endpoint("p"), s.Pool("p").Endpoint("d"), s.Pool("p").Endpoint("b")
		rooms := func() [3]Room {
			var v View
			s.View(s.Pool("p"), nil, &v)
			return [3]Room{v.Endpoints[0].Room, v.Endpoints[1].Room, v.Endpoints[2].Room}
		}
		scrape := func(waiting int64) {
			time.Sleep(2 * time.Second)
			s.Observe(d, Signals{Running: 3, Waiting: waiting, KVUsage: .5, KVTokens: 1000, At: time.Now()})
		}
		scrape(0)
		id := s.Bookings.Reserve(d, Booking{For: RoleDecode, PromptTokens: 64, From: p})
		other := s.Bookings.Reserve(b, Booking{For: RoleDecode, PromptTokens: 64, Need: 128, From: p, Tentative: true})
		alone := s.Bookings.Reserve(b, Booking{For: RoleBoth, PromptTokens: 300, Need: 320})
		require.Equal(t, [3]Room{{Held: 128}, {Need: 64}, {Need: 320}}, rooms())
		require.Equal(t, Room{Held: 128}, p.Booked(time.Now()).Room)
		scrape(0)
		require.EqualValues(t, 128, rooms()[0].Held, "it may have come after the engine made its report")
		scrape(1)
		require.EqualValues(t, 128, rooms()[0].Held, "it waits")
		scrape(0)
		require.Equal(t, Room{Held: 64}, rooms()[0])
		p.SetRemoteLoad(RemoteLoad{Room: Room{Held: 1000, Need: 1}})
		require.Equal(t, Room{Held: 1064, Need: 1}, rooms()[0], "of all replicas")
		p.SetRemoteLoad(RemoteLoad{})
		for _, id := range []ReservationID{id, other, alone} {
			require.True(t, s.Bookings.Release(id))
		}
		require.Equal(t, [3]Room{}, rooms())
	})
}
