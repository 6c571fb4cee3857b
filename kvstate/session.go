package kvstate

import (
	"sync"
	"time"
)

// Sessions holds the endpoints that served each session last.
type Sessions struct {
	link     *link
	sessions *sessionSet
}

// sessionSet remembers where sessions were served, fewer and for less long where there are many. Sessions in use move
// to the current generation.
type sessionSet struct {
	mu     sync.RWMutex
	max    int // of a generation: it ends when it is full, too
	served generations[sessionKey, session]
}

// sessionKey is the hash of a session's name, in a pool.
type sessionKey struct {
	pool string
	name uint64
}

// session holds the endpoints that served a session last.
type session struct{ prefill, decode *endpointState }

func newSessionSet(limit int, ttl time.Duration) *sessionSet {
	return &sessionSet{max: max(limit/2, 1), served: newGenerations[sessionKey, session](ttl)}
}

func (t *sessionSet) find(k sessionKey) session {
	t.mu.RLock()
	defer t.mu.RUnlock()
	found, _ := t.served.find(k)
	return found
}

// put records where a session was served; nil keeps the previous endpoint.
func (t *sessionSet) put(k sessionKey, next session) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.age(time.Now())
	before, _ := t.served.find(k)
	if next.prefill == nil {
		next.prefill = before.prefill
	}
	if next.decode == nil {
		next.decode = before.decode
	}
	t.served.now[k] = next
}

func (t *sessionSet) age(now time.Time) {
	if t.served.age(now); len(t.served.now) >= t.max {
		t.served.renew(now)
	}
}

func (t *sessionSet) sweep(now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.age(now)
}

// SetAffinity records the endpoints that serve a session of the pool, for [Sessions.MarkSession]; prefill or decode
// may be nil.
func (s *Sessions) SetAffinity(p *Pool, name uint64, prefill, decode *Endpoint) {
	s.ApplyAffinity(p, name, prefill, decode)
	if s.link.replicas != nil {
		s.link.replicas.SessionServed(p, name, prefill, decode)
	}
}

// ApplyAffinity applies [Sessions.SetAffinity] of another replica.
func (s *Sessions) ApplyAffinity(p *Pool, name uint64, prefill, decode *Endpoint) {
	var next session
	if prefill != nil {
		next.prefill = prefill.state
	}
	if decode != nil {
		next.decode = decode.state
	}
	s.sessions.put(sessionKey{p.Spec.Name, name}, next)
}

// MarkSession marks the candidates that served a session last. It is a preference, which the picker weighs against
// load. Endpoints that have left their pool are not among the candidates.
func (s *Sessions) MarkSession(p *Pool, name uint64, v *View) {
	found := s.sessions.find(sessionKey{p.Spec.Name, name})
	if found.prefill == nil && found.decode == nil {
		return
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Endpoint.state == found.prefill {
			c.Session |= RolePrefill
		}
		if c.Endpoint.state == found.decode {
			c.Session |= RoleDecode
		}
	}
}

// EachSession calls f for every session of the pool whose endpoints are still in it. It blocks decisions that
// record a session.
func (s *Sessions) EachSession(p *Pool, f func(name uint64, prefill, decode *Endpoint)) {
	byLive := make(map[*endpointState]*Endpoint, len(p.endpoints))
	for _, e := range p.endpoints {
		byLive[e.state] = e
	}
	s.sessions.mu.RLock()
	defer s.sessions.mu.RUnlock()
	for _, generation := range []map[sessionKey]session{s.sessions.served.old, s.sessions.served.now} {
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
