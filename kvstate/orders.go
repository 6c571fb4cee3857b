package kvstate

import (
	"errors"
	"fmt"
	"slices"
)

// Order is what an operator wants of an endpoint, whatever else is known of it.
type Order struct {
	Paused bool // no new work; what runs there ends as usual
	Weight int  // in the place of the spec's; 0: no say in it
}

// maxOrders bounds the orders that are kept: each names an endpoint that was there when it was given.
const maxOrders = 4096

// orderKey names what an order is for: the address of an endpoint, or the name it was configured by, which may stand for
// several addresses, and others tomorrow.
type orderKey struct{ pool, endpoint string }

// ErrUnknown says that there is no such pool or endpoint.
var ErrUnknown = errors.New("not known here")

// PausePool has a pool take no new requests, or take them again. The order outlives changes of the pool, not the pool.
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

// Paused reports whether the pool takes no new requests.
func (p *Pool) Paused() bool { return p.paused.Load() }

// Find is the pool's endpoints at an address, or configured by a name.
func (p *Pool) Find(nameOrAddr string) (out []*Endpoint) {
	for _, e := range p.endpoints {
		if e.Addr == nameOrAddr || e.Name == nameOrAddr {
			out = append(out, e)
		}
	}
	return out
}

// SetOrder changes what is ordered of an endpoint, given by address or by the name it was configured by. The order stays
// for as long as its pool does, also for an endpoint that leaves and returns; one for a name is also for addresses that
// the name will stand for later. It returns the endpoints that it is for now.
func (s *State) SetOrder(pool, endpoint string, change func(*Order)) ([]*Endpoint, error) {
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
	key := orderKey{pool, endpoint}
	if _, known := s.orders[key]; !known && len(s.orders) >= maxOrders {
		return nil, fmt.Errorf("endpoint %q of pool %q: there are %d orders already", endpoint, pool, maxOrders)
	}
	o := s.orderOf(pool, found[0])
	change(&o)
	for _, e := range found { // what was ordered of one address of the name is over
		delete(s.orders, orderKey{pool, e.Addr})
	}
	s.orders[key] = o
	for _, e := range found {
		e.obey(o)
	}
	return found, nil
}

// orderOf is what is ordered of an endpoint: by its address, or else by its name.
func (s *State) orderOf(pool string, e *Endpoint) Order {
	if o, ok := s.orders[orderKey{pool, e.Addr}]; ok {
		return o
	}
	return s.orders[orderKey{pool, e.Name}]
}

func (l *live) obey(o Order) {
	l.paused.Store(o.Paused)
	l.weight.Store(int32(min(max(o.Weight, 0), maxWeight)))
}

// Paused reports whether the endpoint is to get no new work, by its spec or by an operator's order.
func (e *Endpoint) Paused() bool { return e.Drained || e.live != nil && e.paused.Load() }

// maxWeight bounds weights, so that prices do not overflow.
const maxWeight = 10_000

// Weight is how fast the endpoint is taken to be, in per cent.
func (e *Endpoint) Weight() int {
	if w := e.weight.Load(); w > 0 {
		return int(w)
	}
	if e.EndpointSpec.Weight > 0 {
		return min(e.EndpointSpec.Weight, maxWeight)
	}
	return 100
}

// KeepPools forgets the pools that are not named, with what was ordered of their endpoints, and puts the others in the
// order of the names.
func (s *State) KeepPools(names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var kept []*Pool
	for _, name := range names {
		if p := s.pool(name); p != nil && !slices.Contains(kept, p) {
			kept = append(kept, p)
		}
	}
	for key := range s.orders {
		if !slices.Contains(names, key.pool) {
			delete(s.orders, key)
		}
	}
	s.pools.Store(&kept)
}
