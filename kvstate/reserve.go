package kvstate

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// ReservationID names a reservation. It is random, so that one made elsewhere, or made up, releases nothing. Never 0.
type ReservationID uint64

const bookingShards = 16

type bookingShard struct {
	mu   sync.Mutex
	held map[ReservationID]reservation
}

// reservation is a booking that is held.
type reservation struct {
	on      *live // not the endpoint: what is said about that may change
	leg     Role
	counted int64 // requests: 0 or 1
	tokens  int64
	work    time.Duration // at the endpoint's speed
	room    int64         // of the endpoint's buffer, in tokens
	from    *Source       // nil: unknown
	until   int64         // when work that the endpoint does by itself will be done, Unix ns
	expires time.Time
}

// Source is who asked for reservations: one connection of one Envoy. When it is gone, nobody is left to say how the hops
// ended that it asked for, so they count as ended.
type Source struct{ gone atomic.Bool }

// Gone releases, within a second, what was booked for the source.
func (s *Source) Gone() { s.gone.Store(true) }

// IsGone reports whether Gone was called.
func (s *Source) IsGone() bool { return s.gone.Load() }

// Reserve books a request on an endpoint: from now on views count it, unless it is [Booking.Coming]. The caller passes the id on to whoever learns how
// the hop ended. It returns 0, and books nothing, when MaxReservations are held: choosing blindly is better than
// refusing.
func (s *State) Reserve(e *Endpoint, b Booking) ReservationID {
	return s.ReserveAs(0, e, b, nil)
}

// ReserveAs is Reserve under an id that the caller can work out again when all it has is the request. Where id is 0 or
// taken, a random one takes its place.
func (s *State) ReserveAs(id ReservationID, e *Endpoint, b Booking, from *Source) ReservationID {
	return s.reserve(id, e, b, 0, from)
}

func (s *State) reserve(id ReservationID, e *Endpoint, b Booking, room int64, from *Source) ReservationID {
	if s.booked.Add(1) > int64(s.o.MaxReservations) {
		s.booked.Add(-1)
		return 0
	}
	b.PromptTokens, b.Uncached, b.Work = max(b.PromptTokens, 0), max(b.Uncached, 0), max(b.Work, 0)
	if id == 0 {
		id = randomID()
	}
	now := s.o.Now()
	work := time.Duration(float64(b.Work) * e.speedAt(now.UnixNano()))
	r := reservation{on: e.live, leg: b.For, work: work, room: room, from: from, expires: now.Add(s.o.ReservationTTL)}
	r.counted, r.tokens = b.counts()
	e.requests.Add(r.counted)
	e.tokens.Add(r.tokens)
	if b.For == RoleBoth {
		r.until = e.local.add(work, now)
	}
	if b.For&RolePrefill != 0 && e.load != nil {
		e.load.booked(b, work, now)
	}
	job := prefillJob{uncached: b.Uncached, work: work, model: b.Work}
	for !s.hold(id, r, job, now) {
		id = randomID()
	}
	s.changed()
	return id
}

func randomID() ReservationID { return ReservationID(rand.Uint64() | 1) }

// hold keeps a reservation under an id, and its job in the endpoint's queue: both under the shard's lock, because who can
// work the id out may release it at once. It is false if the id is taken.
func (s *State) hold(id ReservationID, r reservation, j prefillJob, now time.Time) bool {
	shard := &s.bookings[(id>>8)%bookingShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if _, taken := shard.held[id]; taken {
		return false
	}
	shard.held[id] = r
	if r.leg == RolePrefill {
		j.id = id
		r.on.queue.push(j, r.on.stepTokens, now)
	}
	return true
}

// Release ends a reservation. It is true exactly once for each that was made; later calls, and ids of other replicas,
// change nothing.
func (s *State) Release(id ReservationID) bool { return s.end(id, false) }

// Complete is Release for a prefill that the endpoint has just done: from how long it took the endpoint's speed is learned.
func (s *State) Complete(id ReservationID) bool { return s.end(id, true) }

func (s *State) end(id ReservationID, done bool) bool {
	if id == 0 {
		return false
	}
	shard := &s.bookings[(id>>8)%bookingShards]
	shard.mu.Lock()
	r, ok := shard.held[id]
	delete(shard.held, id)
	shard.mu.Unlock()
	if ok {
		s.unbook(id, r, done)
	}
	return ok
}

func (s *State) unbook(id ReservationID, r reservation, done bool) {
	now := s.o.Now()
	r.on.requests.Add(-r.counted)
	r.on.tokens.Add(-r.tokens)
	s.booked.Add(-1)
	if r.room > 0 {
		r.on.room.give(r.room)
	}
	s.changed()
	defer r.on.load.freedSome() // when the numbers say so
	switch r.leg {
	case RolePrefill:
		job, busy := r.on.queue.remove(id, r.on.stepTokens, now)
		if done {
			r.on.learn(busy, job.model, now.UnixNano())
		}
	case RoleBoth:
		r.on.local.cancel(r.work, r.until, now)
	}
}

// Reservations is how many this replica holds.
func (s *State) Reservations() int { return int(s.booked.Load()) }

func (s *State) sweepReservations(now time.Time) {
	for i := range s.bookings {
		shard := &s.bookings[i]
		shard.mu.Lock()
		for id, r := range shard.held {
			if now.After(r.expires) || r.from != nil && r.from.gone.Load() {
				delete(shard.held, id)
				s.unbook(id, r, false)
			}
		}
		shard.mu.Unlock()
	}
}
