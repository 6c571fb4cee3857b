package kvstate

import (
	"errors"
	"fmt"
	"slices"
)

// Override is an operator's setting for an endpoint.
type Override struct {
	Paused bool // no new requests; running ones end as usual
	Weight int  // replaces the spec's weight; 0: does not
}

// maxOverrides bounds the stored overrides. Each names an endpoint that existed when it was set.
const maxOverrides = 4096

// overrideKey is the target of an override: an endpoint's address, or its configured name, which may resolve to
// several addresses and to others later.
type overrideKey struct{ pool, endpoint string }

// ErrUnknown is returned if there is no such pool or endpoint.
var ErrUnknown = errors.New("not known here")

// PausePool stops or resumes new requests to a pool. The setting outlives changes of the pool's endpoints, but not
// the pool.
func (s *State) PausePool(name string, paused bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pool(name)
	if p == nil {
		return fmt.Errorf("pool %q: %w", name, ErrUnknown)
	}
	p.paused.Store(paused)
	return nil
}

// Paused reports whether the pool gets no new requests.
func (p *Pool) Paused() bool { return p.paused.Load() }

// Find returns the pool's endpoints with an address or a configured name.
func (p *Pool) Find(nameOrAddr string) (out []*Endpoint) {
	for _, e := range p.endpoints {
		if e.Addr == nameOrAddr || e.HostPort() == nameOrAddr || e.Name == nameOrAddr {
			out = append(out, e)
		}
	}
	return out
}

// SetOverride changes the override of an endpoint, given by address or configured name. It lasts as long as the
// pool, even if the endpoint leaves and returns. An override by name also applies to addresses that the name
// resolves to later. It returns the endpoints that it applies to now.
func (s *State) SetOverride(pool, endpoint string, change func(*Override)) ([]*Endpoint, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pool(pool)
	if p == nil {
		return nil, fmt.Errorf("pool %q: %w", pool, ErrUnknown)
	}
	found := p.Find(endpoint)
	if len(found) == 0 {
		return nil, fmt.Errorf("endpoint %q of pool %q: %w", endpoint, pool, ErrUnknown)
	}
	key := overrideKey{pool, endpoint}
	if _, known := s.overrides[key]; !known && len(s.overrides) >= maxOverrides {
		return nil, fmt.Errorf("endpoint %q of pool %q: there are %d orders already", endpoint, pool, maxOverrides)
	}
	o := s.overrideOf(pool, found[0])
	change(&o)
	for _, e := range found { // an override by name replaces those of its addresses
		delete(s.overrides, overrideKey{pool, e.Addr})
	}
	s.overrides[key] = o
	for _, e := range found {
		e.applyOverride(o)
	}
	return found, nil
}

// overrideOf returns the override of an endpoint: by address, else by name.
func (s *State) overrideOf(pool string, e *Endpoint) Override {
	if o, ok := s.overrides[overrideKey{pool, e.Addr}]; ok {
		return o
	}
	return s.overrides[overrideKey{pool, e.Name}]
}

func (l *endpointState) applyOverride(o Override) {
	l.paused.Store(o.Paused)
	l.weight.Store(int32(min(max(o.Weight, 0), maxWeight)))
}

// Paused reports whether the endpoint gets no new requests, by its spec or by an operator.
func (e *Endpoint) Paused() bool { return e.Drained || e.endpointState != nil && e.paused.Load() }

// maxWeight bounds weights, so that prices do not overflow.
const maxWeight = 10_000

// Weight returns the endpoint's assumed speed, in per cent.
func (e *Endpoint) Weight() int {
	if w := e.weight.Load(); w > 0 {
		return int(w)
	}
	if e.EndpointSpec.Weight > 0 {
		return min(e.EndpointSpec.Weight, maxWeight)
	}
	return 100
}

// RetainPools removes all pools that are not named, with their overrides, and orders the others as named.
func (s *State) RetainPools(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var kept []*Pool
	for _, name := range names {
		if p := s.pool(name); p != nil && !slices.Contains(kept, p) {
			kept = append(kept, p)
		}
	}
	for key := range s.overrides {
		if !slices.Contains(names, key.pool) {
			delete(s.overrides, key)
		}
	}
	s.pools.Store(&kept)
}
