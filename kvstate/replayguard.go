package kvstate

import (
	"sync"
	"time"

	"tandem/kvstate/paramstore"
)

// HandOvers holds what passes between the hops of a request: consumed tickets, and KV parameters too large for a
// header.
type HandOvers struct {
	link      *link
	consumed  replayGuard
	handOvers *paramstore.Store
}

// replayGuard remembers consumed tickets, and reservations that have ended ([Bookings.End]), for at least the time to
// live. It never drops one earlier to save memory: KV parameters that are sent twice can return another request's text.
type replayGuard struct {
	mu   *sync.Mutex
	max  int // of a generation
	seen generations[[16]byte, struct{}]
}

func newReplayGuard(limit int, ttl time.Duration) replayGuard {
	return replayGuard{mu: &sync.Mutex{}, max: max(limit/2, 1), seen: newGenerations[[16]byte, struct{}](ttl)}
}

// Consume marks a ticket as consumed. It returns true the first time only: one ticket, one decode. If the memory is
// full it returns false, and the request is planned again. It also asks the other replicas, for a few milliseconds.
// If they do not answer, this replica's memory and the ticket's short life decide.
func (s *HandOvers) Consume(ticket [16]byte) bool {
	if !s.consumed.consume(ticket) {
		return false
	}
	if s.link.replicas != nil {
		if first, known := s.link.replicas.Consume(ticket, false); known {
			return first
		}
	}
	return true
}

// ConsumeConfirmed is Consume for callers that no request waits for. The other replicas get more time to answer;
// known reports whether they did. It is always true without other replicas.
func (s *HandOvers) ConsumeConfirmed(ticket [16]byte) (first, known bool) {
	if !s.consumed.consume(ticket) {
		return false, true
	}
	if s.link.replicas != nil {
		return s.link.replicas.Consume(ticket, true)
	}
	return true, true
}

func (p *replayGuard) consume(ticket [16]byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen.age(time.Now())
	if _, seen := p.seen.find(ticket); seen || len(p.seen.now) >= p.max {
		return false
	}
	p.seen.now[ticket] = struct{}{}
	return true
}

// has reports whether a ticket is consumed.
func (p *replayGuard) has(ticket [16]byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, seen := p.seen.find(ticket)
	return seen
}

func (p *replayGuard) sweep(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seen.age(now)
}

// PutHandOver stores a copy of params for all replicas and returns a reference to it, or [paramstore.ErrFull].
func (s *HandOvers) PutHandOver(params []byte) (ref [16]byte, err error) {
	if ref, err = s.handOvers.Put(params); err == nil && s.link.replicas != nil {
		s.link.replicas.PutHandOver(ref, params)
	}
	return ref, err
}

// PutHandOverAs is PutHandOver with a reference that the reader already knows.
func (s *HandOvers) PutHandOverAs(ref [16]byte, params []byte) error {
	err := s.handOvers.PutAs(ref, params)
	if err == nil && s.link.replicas != nil {
		s.link.replicas.PutHandOver(ref, params)
	}
	return err
}

// TakeHandOver returns and removes the entry with a reference, here or at another replica.
func (s *HandOvers) TakeHandOver(ref [16]byte) ([]byte, bool) {
	params, ok := s.handOvers.Take(ref)
	if !ok && s.link.replicas != nil {
		return s.link.replicas.TakeHandOver(ref)
	}
	return params, ok
}
