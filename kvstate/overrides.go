package kvstate

import (
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Override is an operator's setting for an endpoint.
type Override struct {
	Paused bool // no new requests; running ones end as usual
	Weight int  // replaces the spec's weight; 0: does not
}

// Order is an override with its target, as replicas share it. Of two orders for one target the higher version counts.
type Order struct {
	Pool     string `json:"pool"`
	Endpoint string `json:"endpoint,omitempty"` // address or configured name; "": the pool itself
	Paused   bool   `json:"paused,omitempty"`
	Weight   int    `json:"weight,omitempty"`
	Version  int64  `json:"version"` // microseconds since 1970 when it was given, or one more than all known before
}

// maxOverrides bounds the stored overrides.
const maxOverrides = 4096

// overrideKey is the target of an override: an endpoint's address, or its configured name, which may resolve to
// several addresses and to others later; or, with endpoint "", a pool.
type overrideKey struct{ pool, endpoint string }

// versioned is an override with its version ([Order.Version]).
type versioned struct {
	Override
	version int64
}

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
	key := overrideKey{pool: name}
	if err := s.mayOverride(key); err != nil {
		return fmt.Errorf("pool %q: %w", name, err)
	}
	s.overrides[key] = versioned{Override{Paused: paused}, s.nextVersion()}
	p.paused.Store(paused)
	return nil
}

// errManyOrders means that there are maxOverrides already.
var errManyOrders = fmt.Errorf("there are %d orders already", maxOverrides)

func (s *State) mayOverride(key overrideKey) error {
	if _, known := s.overrides[key]; !known && len(s.overrides) >= maxOverrides {
		return errManyOrders
	}
	return nil
}

// nextVersion returns a version above all known ones.
func (s *State) nextVersion() int64 {
	next := s.o.Now().UnixMicro()
	for _, o := range s.overrides {
		next = max(next, o.version+1)
	}
	return next
}

// Orders returns all overrides, in no order.
func (s *State) Orders() []Order {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Order, 0, len(s.overrides))
	for key, o := range s.overrides {
		out = append(out, Order{key.pool, key.endpoint, o.Paused, o.Weight, o.version})
	}
	return out
}

// ApplyOrders applies the orders of other replicas that are newer than the known ones for the same targets, and
// returns their number. Their pools and endpoints may not exist yet. Orders beyond maxOverrides are ignored.
func (s *State) ApplyOrders(orders []Order) (changed int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pools := map[string]bool{}
	for _, o := range orders {
		key := overrideKey{o.Pool, o.Endpoint}
		if old, known := s.overrides[key]; known && old.version >= o.Version || s.mayOverride(key) != nil {
			continue
		}
		s.overrides[key] = versioned{Override{o.Paused, min(max(o.Weight, 0), maxWeight)}, o.Version}
		pools[o.Pool] = true
		changed++
	}
	for name := range pools {
		if p := s.pool(name); p != nil {
			p.paused.Store(s.overrides[overrideKey{pool: name}].Paused)
			for _, e := range p.endpoints {
				e.state.applyOverride(s.overrideOf(name, e))
			}
		}
	}
	return changed
}

// Paused reports whether the pool gets no new requests.
func (p *Pool) Paused() bool { return p.paused.Load() }

// Find returns the pool's endpoints with an address or a configured name.
func (p *Pool) Find(nameOrAddr string) (out []*Endpoint) {
	for _, e := range p.endpoints {
		if e.Addr == nameOrAddr || e.HostPort() == nameOrAddr || e.Name == nameOrAddr ||
			e.DisplayName() == nameOrAddr {
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
	if err := s.mayOverride(key); err != nil {
		return nil, fmt.Errorf("endpoint %q of pool %q: %w", endpoint, pool, err)
	}
	o := s.overrideOf(pool, found[0])
	change(&o)
	s.overrides[key] = versioned{o, s.nextVersion()}
	for _, e := range found {
		e.state.applyOverride(o)
	}
	return found, nil
}

// overrideOf returns the override of an endpoint: the newest of those by its address and by its names.
func (s *State) overrideOf(pool string, e *Endpoint) Override {
	newest := s.overrides[overrideKey{pool, e.Addr}]
	for _, name := range []string{e.HostPort(), e.Name, e.DisplayName()} {
		if o := s.overrides[overrideKey{pool, name}]; name != "" && o.version > newest.version {
			newest = o
		}
	}
	return newest.Override
}

func (l *endpointState) applyOverride(o Override) {
	l.instructions.paused.Store(o.Paused)
	l.instructions.weight.Store(int32(min(max(o.Weight, 0), maxWeight)))
}

// Paused reports whether the endpoint gets no new requests, by its spec or by an operator.
func (e *Endpoint) Paused() bool {
	return e.Drained || e.state != nil && e.state.instructions.paused.Load()
}

// TakesWork reports whether an endpoint may get new requests: it is not paused, has not failed, and does not terminate.
func (e *Endpoint) TakesWork() bool { return !e.Paused() && !e.Failed() && !e.Draining }

// maxWeight bounds weights, so that prices do not overflow.
const maxWeight = 10_000

// Weight returns the endpoint's assumed speed, in per cent; 0 if it gets no work by its spec, which no order changes.
func (e *Endpoint) Weight() int {
	if e.Drained {
		return 0
	}
	if w := e.state.instructions.weight.Load(); w > 0 {
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
	maps.DeleteFunc(s.overrides, func(key overrideKey, _ versioned) bool { return !slices.Contains(names, key.pool) })
	s.pools.Store(&kept)
}
