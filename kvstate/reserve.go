package kvstate

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"tandem/kvstate/residency"
)

// ReservationID identifies a reservation. It is random, so that a forged id, or one of another replica, releases
// nothing. Never 0.
type ReservationID uint64

const bookingShards = 16

type bookingShard struct {
	mu   sync.Mutex
	held map[ReservationID]reservation
}

type shards [bookingShards]bookingShard

// of returns the shard of a reservation.
func (s *shards) of(id ReservationID) *bookingShard { return &s[(id>>8)%bookingShards] }

// Bookings holds the reservations that this replica has made.
type Bookings struct {
	link            *link
	now             func() time.Time
	ttl             time.Duration
	maxReservations int

	bookings shards
	booked   atomic.Int64
	ended    replayGuard // reservations that must not be made any more
}

func (s *Bookings) init(l *link, o Options) {
	s.link, s.now, s.ttl, s.maxReservations = l, o.Now, o.ReservationTTL, o.MaxReservations
	s.ended = newReplayGuard(maxEnded, endedTTL)
	for i := range s.bookings {
		s.bookings[i].held = map[ReservationID]reservation{}
	}
}

// reservation is a booking that has not been released.
type reservation struct {
	on           *endpointState // not the *Endpoint, which is replaced when the spec changes
	leg          Role
	counted      int64 // requests: 0 or 1
	tokens       int64
	work         time.Duration // at the endpoint's speed
	bufferTokens int64         // tokens of the endpoint's receive buffer
	room         int32         // its slot in the endpoint's room, if it claimed any
	claimed      bool
	from         *Source // nil: unknown
	until        int64   // when work that a decode endpoint does itself will be done, Unix ns
	expires      time.Time
	of           *residency.Conversation // nil: of none, or not answered here
	began        time.Time               // zero: it is tentative, so its request is not answered yet
}

// Source is the connection of an Envoy that reservations were made for. When it closes, nothing reports the end of
// its hops any more, so their reservations are released.
type Source struct{ gone atomic.Bool }

// Gone marks the connection as closed; its reservations are released within a second.
func (s *Source) Gone() { s.gone.Store(true) }

// IsGone reports whether Gone was called.
func (s *Source) IsGone() bool { return s.gone.Load() }

// Reserve reserves a request on an endpoint. Views count it from now on, unless it is [Booking.Tentative]. The caller
// passes the id to the code that learns how the hop ended. If MaxReservations are held, Reserve reserves nothing and
// returns 0: choosing with incomplete numbers is better than refusing.
func (s *Bookings) Reserve(e *Endpoint, b Booking) ReservationID {
	return s.ReserveAs(0, e, b, nil)
}

// ReserveAs is Reserve with an id that the caller can derive again from the request. If id is 0 or taken, a random
// one replaces it.
func (s *Bookings) ReserveAs(id ReservationID, e *Endpoint, b Booking, from *Source) ReservationID {
	return s.unlessEnded(s.reserve(id, e, b, 0, from))
}

// ReserveBuffer is [Bookings.ReserveAs] for a request whose KV will be pushed into the endpoint's buffer of limit
// tokens. It waits, first come, first served, until the buffer has space for the prompt, and holds the space until
// the reservation is released. It reserves nothing and returns false if ctx ends first, or if the prompt is larger
// than the buffer. Replicas do not coordinate their use of a buffer.
func (s *Bookings) ReserveBuffer(ctx context.Context, id ReservationID, e *Endpoint, b Booking, limit int64,
	from *Source) (ReservationID, bool) {
	promptTokens := max(b.PromptTokens, 0)
	if !e.state.memory.buffer.Acquire(ctx, promptTokens, limit) {
		return 0, false
	}
	id = s.reserve(id, e, b, promptTokens, from)
	if id == 0 {
		e.state.memory.buffer.Release(promptTokens)
	}
	return s.unlessEnded(id), true
}

// How many reservations that must not be made any more are remembered, and for how long. Their requests arrive a few
// seconds late at most.
const (
	maxEnded = 1 << 16
	endedTTL = time.Minute
)

// End is Release for a request that is over. A reservation that is made under this id after that is released at once:
// on a busy replica the report of a request's end can arrive before the request is read.
func (s *Bookings) End(id ReservationID) bool {
	s.ended.consume(id.key())
	return s.Release(id)
}

// unlessEnded releases a new reservation whose request is over. [Bookings.End] remembers the id first and releases
// second; a reservation is made first and looked up second. So one of them releases it.
func (s *Bookings) unlessEnded(id ReservationID) ReservationID {
	if id != 0 && s.ended.has(id.key()) {
		s.Release(id)
		return 0
	}
	return id
}

func (id ReservationID) key() (key [16]byte) {
	binary.BigEndian.PutUint64(key[:], uint64(id))
	return key
}

func (s *Bookings) reserve(id ReservationID, e *Endpoint, b Booking, space int64, from *Source) ReservationID {
	if s.booked.Add(1) > int64(s.maxReservations) {
		s.booked.Add(-1)
		return 0
	}
	b.PromptTokens, b.Uncached, b.Work = max(b.PromptTokens, 0), max(b.Uncached, 0), max(b.Work, 0)
	if id == 0 {
		id = randomID()
	}
	now := s.now()
	work := time.Duration(float64(b.Work) * e.state.speedAt(now.UnixNano()))
	r := reservation{
		on: e.state, leg: b.For, work: work, bufferTokens: space, from: from, expires: now.Add(s.ttl),
	}
	r.counted, r.tokens = b.counts()
	if b.For&RoleDecode != 0 {
		if r.of = b.Of; !b.Tentative {
			r.began = now
		}
	}
	e.state.requests.Add(r.counted)
	e.state.tokens.Add(r.tokens)
	e.state.answers(&r)
	switch {
	case b.For == RoleBoth:
		r.until = e.state.local.add(work, now)
	case b.For == RolePrefill && e.Role == RoleBoth:
		e.state.local.count(work, now)
	}
	if b.For&RolePrefill != 0 && e.state.load != nil {
		e.state.load.booked(b, work, now)
	}
	job := prefillJob{uncached: b.Uncached, work: work, model: b.Work}
	if b.Media {
		job.model = 0
	}
	r.room, r.claimed = b.claim(e, now)
	for !s.insert(id, r, job, now) {
		id = randomID()
	}
	s.link.changed()
	return id
}

func randomID() ReservationID { return ReservationID(rand.Uint64() | 1) }

// insert stores a reservation and its job in the endpoint's queue, both under the shard's lock, because a caller that
// can derive the id may release it at once. It returns false if the id is taken.
func (s *Bookings) insert(id ReservationID, r reservation, j prefillJob, now time.Time) bool {
	shard := s.bookings.of(id)
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

// Release ends a reservation. It returns true exactly once for each; later calls, and ids of other replicas, change
// nothing.
func (s *Bookings) Release(id ReservationID) bool { return s.end(id, false) }

// Complete is Release for a prefill that the endpoint has just finished. The endpoint's speed is learned from its
// duration.
func (s *Bookings) Complete(id ReservationID) bool { return s.end(id, true) }

func (s *Bookings) end(id ReservationID, done bool) bool {
	if id == 0 {
		return false
	}
	shard := s.bookings.of(id)
	shard.mu.Lock()
	r, ok := shard.held[id]
	delete(shard.held, id)
	shard.mu.Unlock()
	if ok {
		s.unbook(id, r, done)
	}
	return ok
}

func (s *Bookings) unbook(id ReservationID, r reservation, done bool) {
	now := s.now()
	r.on.requests.Add(-r.counted)
	r.on.tokens.Add(-r.tokens)
	r.on.answered(&r, now)
	s.booked.Add(-1)
	if r.bufferTokens > 0 {
		r.on.memory.buffer.Release(r.bufferTokens)
	}
	if r.claimed {
		r.on.memory.room.Release(r.room)
	}
	s.link.changed()
	defer r.on.load.signalFreed() // after the numbers have changed
	switch r.leg {
	case RolePrefill:
		job, busy := r.on.queue.remove(id, r.on.stepTokens, now)
		if done && r.on.requests.Load() <= r.on.queue.n.Load() { // a prompt takes longer while answers run
			r.on.learnPrefill(busy, job.model, now.UnixNano())
		}
	case RoleBoth:
		r.on.local.cancel(r.work, r.until, now)
	}
}

// Strand counts KV in an endpoint's memory that no other endpoint will fetch, until its lease ends.
func Strand(s *State, e *Endpoint, tokens int64, lease time.Duration) {
	e.state.memory.room.Strand(tokens, lease, s.link.changed)
	s.link.changed()
}

// Unfetched reports whether this replica holds a reservation of an answer whose KV is still at another endpoint, as far
// as is known.
func Unfetched(s *State, id ReservationID) bool {
	shard := s.Bookings.bookings.of(id)
	shard.mu.Lock()
	defer shard.mu.Unlock()
	r, ok := shard.held[id]
	return ok && r.claimed && r.on.memory.room.Unfetched(r.room)
}

// ReleaseAnywhere releases a reservation of any replica. The replica that made it is notified; it would also learn
// it from Envoy's access log, but up to a second later.
func (s *Bookings) ReleaseAnywhere(p *Pool, id ReservationID) {
	if id != 0 && !s.Release(id) && s.link.replicas != nil {
		s.link.replicas.Released(p, id)
	}
}

// Reservations returns the number of reservations that this replica holds.
func (s *Bookings) Reservations() int { return int(s.booked.Load()) }

func (s *Bookings) sweepReservations(now time.Time) {
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
