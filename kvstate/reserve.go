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
	held map[ReservationID]booking
}

type booking struct {
	on      *live // not the endpoint: what is said about that may change
	tokens  int64
	room    int64 // of the endpoint's buffer, in tokens
	expires time.Time
	from    *Source // nil: unknown
}

// Source is who asked for reservations: one connection of one Envoy. When it is gone, nobody is left to say how the hops
// ended that it asked for, so they count as ended.
type Source struct{ gone atomic.Bool }

// Gone releases, within a second, what was booked for the source.
func (s *Source) Gone() { s.gone.Store(true) }

// Reserve books a request on an endpoint: from now on views count it. The caller passes the id on to whoever learns how
// the hop ended. It returns 0, and books nothing, when MaxReservations are held: choosing blindly is better than
// refusing.
func (s *State) Reserve(e *Endpoint, promptTokens int64) ReservationID {
	return s.ReserveAs(0, e, promptTokens, nil)
}

// ReserveAs is Reserve under an id that the caller can work out again when all it has is the request. Where id is 0 or
// taken, a random one takes its place.
func (s *State) ReserveAs(id ReservationID, e *Endpoint, promptTokens int64, from *Source) ReservationID {
	return s.reserve(id, e, promptTokens, 0, from)
}

func (s *State) reserve(id ReservationID, e *Endpoint, promptTokens, room int64, from *Source) ReservationID {
	if s.booked.Add(1) > int64(s.o.MaxReservations) {
		s.booked.Add(-1)
		return 0
	}
	promptTokens = max(promptTokens, 0)
	if id == 0 {
		id = randomID()
	}
	e.requests.Add(1)
	e.tokens.Add(promptTokens)
	b := booking{e.live, promptTokens, room, time.Now().Add(s.o.ReservationTTL), from}
	for !s.hold(id, b) {
		id = randomID()
	}
	s.changed()
	return id
}

func randomID() ReservationID { return ReservationID(rand.Uint64() | 1) }

// hold keeps a booking under an id; false if the id is taken.
func (s *State) hold(id ReservationID, b booking) bool {
	shard := &s.bookings[(id>>8)%bookingShards]
	shard.mu.Lock()
	defer shard.mu.Unlock()
	if _, taken := shard.held[id]; taken {
		return false
	}
	shard.held[id] = b
	return true
}

// Release ends a reservation. It is true exactly once for each that was made; later calls, and ids of other replicas,
// change nothing.
func (s *State) Release(id ReservationID) bool {
	if id == 0 {
		return false
	}
	shard := &s.bookings[(id>>8)%bookingShards]
	shard.mu.Lock()
	b, ok := shard.held[id]
	delete(shard.held, id)
	shard.mu.Unlock()
	if ok {
		s.unbook(b)
	}
	return ok
}

func (s *State) unbook(b booking) {
	b.on.requests.Add(-1)
	b.on.tokens.Add(-b.tokens)
	s.booked.Add(-1)
	if b.room > 0 {
		b.on.room.give(b.room)
	}
	s.changed()
}

// Reservations is how many this replica holds.
func (s *State) Reservations() int { return int(s.booked.Load()) }

func (s *State) sweepReservations(now time.Time) {
	for i := range s.bookings {
		shard := &s.bookings[i]
		shard.mu.Lock()
		for id, b := range shard.held {
			if now.After(b.expires) || b.from != nil && b.from.gone.Load() {
				delete(shard.held, id)
				s.unbook(b)
			}
		}
		shard.mu.Unlock()
	}
}
