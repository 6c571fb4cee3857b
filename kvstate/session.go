package kvstate

import (
	"sync"
	"time"
)

// sessionSet remembers where sessions were served, in two generations: a new one begins when the running one is full or as
// old as the time to live, and the one before the last is dropped. Sessions that are in use move to the running one.
type sessionSet struct {
	mu       sync.RWMutex
	max      int // of a generation
	ttl      time.Duration
	began    time.Time
	now, old map[sessionKey]session
}

// sessionKey is the session's name, hashed, in a pool.
type sessionKey struct {
	pool string
	name uint64
}

// session is where one was served last.
type session struct{ prefill, decode *live }

func newSessionSet(limit int, ttl time.Duration) *sessionSet {
	return &sessionSet{max: max(limit/2, 1), ttl: ttl, began: time.Now(), now: map[sessionKey]session{}}
}

func (t *sessionSet) find(k sessionKey) session {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if found, ok := t.now[k]; ok {
		return found
	}
	return t.old[k]
}

// put notes where a session was served; what is nil stays as it was.
func (t *sessionSet) put(k sessionKey, next session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turn(time.Now())
	before, ok := t.now[k]
	if !ok {
		before = t.old[k]
	}
	if next.prefill == nil {
		next.prefill = before.prefill
	}
	if next.decode == nil {
		next.decode = before.decode
	}
	t.now[k] = next
}

func (t *sessionSet) turn(now time.Time) {
	if len(t.now) >= t.max || now.Sub(t.began) > t.ttl {
		t.old, t.now, t.began = t.now, map[sessionKey]session{}, now
	}
}

func (t *sessionSet) sweep(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.turn(now)
}

// Stick notes where a session of the pool is being served, for [State.MarkSession]; prefill or decode may be nil.
func (s *State) Stick(p *Pool, name uint64, prefill, decode *Endpoint) {
	s.ApplyStick(p, name, prefill, decode)
	if s.peers != nil {
		s.peers.Stuck(p, name, prefill, decode)
	}
}

// ApplyStick is [State.Stick] by another replica.
func (s *State) ApplyStick(p *Pool, name uint64, prefill, decode *Endpoint) {
	var next session
	if prefill != nil {
		next.prefill = prefill.live
	}
	if decode != nil {
		next.decode = decode.live
	}
	s.sessions.put(sessionKey{p.Spec.Name, name}, next)
}

// MarkSession marks the candidates that served a session last: a wish, which the picker weighs against load. Endpoints
// that left their pool since are nowhere among the candidates.
func (s *State) MarkSession(p *Pool, name uint64, v *View) {
	found := s.sessions.find(sessionKey{p.Spec.Name, name})
	if found.prefill == nil && found.decode == nil {
		return
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Endpoint.live == found.prefill {
			c.Session |= RolePrefill
		}
		if c.Endpoint.live == found.decode {
			c.Session |= RoleDecode
		}
	}
}

// EachSession calls f for every session of the pool whose endpoints are still in it. Decisions that note a session wait.
func (s *State) EachSession(p *Pool, f func(name uint64, prefill, decode *Endpoint)) {
	byLive := make(map[*live]*Endpoint, len(p.endpoints))
	for _, e := range p.endpoints {
		byLive[e.live] = e
	}
	s.sessions.mu.RLock()
	defer s.sessions.mu.RUnlock()
	for _, generation := range []map[sessionKey]session{s.sessions.old, s.sessions.now} {
		for k, at := range generation {
			if k.pool != p.Spec.Name {
				continue
			}
			if prefill, decode := byLive[at.prefill], byLive[at.decode]; prefill != nil || decode != nil {
				f(k.name, prefill, decode)
			}
		}
	}
}
