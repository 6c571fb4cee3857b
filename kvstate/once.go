package kvstate

import (
	"crypto/rand"
	"errors"
	"sync"
	"time"
)

// spentSet remembers which tickets were spent, in two generations: a new one begins when the running one is as old as the
// time to live, and the one before the last is dropped. So an entry is remembered for one time to live at least. It is not
// forgotten earlier to make room: KV parameters that are sent twice can return another request's text.
type spentSet struct {
	mu       *sync.Mutex
	max      int // of a generation
	ttl      time.Duration
	began    time.Time
	now, old map[[16]byte]struct{}
}

func newSpentSet(limit int, ttl time.Duration) spentSet {
	return spentSet{mu: &sync.Mutex{}, max: max(limit/2, 1), ttl: ttl, began: time.Now(), now: map[[16]byte]struct{}{}}
}

// Spend notes that a ticket is used. It is true the first time: one ticket buys one decode. Where more are spent than can
// be remembered it is false, and the request takes the longer way. Other replicas are asked, for milliseconds; where they
// do not answer, this replica's memory and the ticket's short life decide.
func (s *State) Spend(ticket [16]byte) bool {
	if !s.spent.spend(ticket) {
		return false
	}
	if s.peers != nil {
		if first, known := s.peers.Spend(ticket, false); known {
			return first
		}
	}
	return true
}

// SpendSurely is Spend for those that nobody waits for: other replicas are given more time to answer, and known is whether they have.
// Without others it always is.
func (s *State) SpendSurely(ticket [16]byte) (first, known bool) {
	if !s.spent.spend(ticket) {
		return false, true
	}
	if s.peers != nil {
		return s.peers.Spend(ticket, true)
	}
	return true, true
}

func (p *spentSet) spend(ticket [16]byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turn(time.Now())
	if _, ok := p.now[ticket]; ok {
		return false
	}
	if _, ok := p.old[ticket]; ok || len(p.now) >= p.max {
		return false
	}
	p.now[ticket] = struct{}{}
	return true
}

func (p *spentSet) turn(now time.Time) {
	if now.Sub(p.began) > p.ttl {
		p.old, p.now, p.began = p.now, map[[16]byte]struct{}{}, now
	}
}

func (p *spentSet) sweep(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.turn(now)
}

// ErrNoRoom says that the hand-overs kept already take all the memory they may.
var ErrNoRoom = errors.New("kvstate: no room for another hand-over")

// maxHandOvers bounds their number, for small ones that would cost more than their bytes say.
const maxHandOvers = 1 << 16

// handOverStore keeps KV transfer parameters: those that are too large for a header, for the moment between two hops, or those
// of a conversation's last turn (turns.go).
type handOverStore struct {
	mu    *sync.Mutex
	max   int
	ttl   time.Duration
	bytes int
	held  map[[16]byte]handOver
}

type handOver struct {
	params  []byte
	expires time.Time
}

func newHandOverStore(limit int, ttl time.Duration) handOverStore {
	return handOverStore{mu: &sync.Mutex{}, max: limit, ttl: ttl, held: map[[16]byte]handOver{}}
}

// PutHandOver keeps a copy of params, here and where other replicas find it, and returns the reference to it, or
// [ErrNoRoom].
func (s *State) PutHandOver(params []byte) (ref [16]byte, err error) {
	if ref, err = s.handOvers.put(params); err == nil && s.peers != nil {
		s.peers.PutHandOver(ref, params)
	}
	return ref, err
}

// PutHandOverAs is PutHandOver under a reference that whoever takes it knows already.
func (s *State) PutHandOverAs(ref [16]byte, params []byte) error {
	err := s.handOvers.putAs(ref, params)
	if err == nil && s.peers != nil {
		s.peers.PutHandOver(ref, params)
	}
	return err
}

func (h *handOverStore) put(params []byte) (ref [16]byte, err error) {
	_, _ = rand.Read(ref[:]) // never fails (crypto/rand)
	return ref, h.putAs(ref, params)
}

func (h *handOverStore) putAs(ref [16]byte, params []byte) error { return h.putFor(ref, params, h.ttl) }

func (h *handOverStore) putFor(ref [16]byte, params []byte, ttl time.Duration) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(params) > h.max-h.bytes || len(h.held) >= maxHandOvers {
		return ErrNoRoom
	}
	if before, ok := h.held[ref]; ok {
		h.bytes -= len(before.params)
	}
	h.held[ref] = handOver{append([]byte(nil), params...), time.Now().Add(ttl)}
	h.bytes += len(params)
	return nil
}

// TakeHandOver returns what is kept under ref, once. What is not here may have been kept by another replica.
func (s *State) TakeHandOver(ref [16]byte) ([]byte, bool) {
	params, ok := s.handOvers.take(ref)
	if !ok && s.peers != nil {
		return s.peers.TakeHandOver(ref)
	}
	return params, ok
}

func (h *handOverStore) take(ref [16]byte) ([]byte, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	kept, ok := h.held[ref]
	if !ok {
		return nil, false
	}
	delete(h.held, ref)
	h.bytes -= len(kept.params)
	return kept.params, time.Now().Before(kept.expires)
}

func (h *handOverStore) sweep(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ref, kept := range h.held {
		if now.After(kept.expires) {
			delete(h.held, ref)
			h.bytes -= len(kept.params)
		}
	}
}
