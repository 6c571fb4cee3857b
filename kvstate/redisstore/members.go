package redisstore

import (
	"slices"
	"time"

	"github.com/cespare/xxhash/v2"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// remoteReplica is another replica's part for a pool. It lasts until its lease ends, which each of its batches renews.
// Package roster has what people and Envoys need to know of it.
type remoteReplica struct {
	seq     uint64
	expires time.Time
	loads   map[string]kvstate.Booked // by address

	prefillRate, localRate uint32   // as in statev1.Batch
	ticketKeys             []uint64 // fingerprints, the sealing key's first; none: it publishes none
	// so far it has only requested a snapshot: it cannot write one yet, and other starting replicas do not wait for it
	starting bool
	genuine  bool // its batches are signed with this replica's keys, if any are
}

// maxMembers bounds the replicas that somebody can make others believe in.
const maxMembers = 1024

// observe renews the lease of a replica whose batch has that age. nil: the lease has ended since, and the reservations
// in the batch are void.
func (p *poolReplica) observe(b *statev1.Batch, age time.Duration) *remoteReplica {
	p.s.roster.Observe(b, age)
	left := min(time.Duration(b.GetLeaseMs())*time.Millisecond, maxLease) - age
	m := p.members[b.GetReplica()]
	if left <= 0 || b.GetLeaving() {
		p.forget(b.GetReplica())
		return nil
	}
	if m == nil && len(p.members) >= maxMembers {
		return nil
	}
	if m == nil {
		m = &remoteReplica{loads: map[string]kvstate.Booked{}, starting: true}
		p.members[b.GetReplica()] = m
		p.count()
		p.s.log.Debug("a replica is there", "pool", p.pool, "replica", b.GetReplica(), "replicas", len(p.members)+1)
	}
	if m.starting && !(b.GetJoining() && b.GetSeq() == 1) {
		m.starting = false
		if p.joined && b.GetReplica() < p.s.replica {
			p.ask() // an older one, unknown before: it may know more
		}
	}
	m.expires = time.Now().Add(left)
	return m
}

// maxLease bounds the lease that another replica can claim.
const maxLease = time.Minute

// forget drops a replica and its reservations.
func (p *poolReplica) forget(replica uint64) {
	m := p.members[replica]
	if m == nil {
		return
	}
	delete(p.members, replica)
	for addr := range m.loads {
		p.set(m, addr, kvstate.Booked{})
	}
	p.sumLoads()
	p.setRates()
	p.s.keysMayDiffer()
	if pool := p.s.state.Pool(p.pool); pool != nil {
		pool.ApplyQueued(replica, nil, nil, nil, true)
	}
	p.count()
	p.s.log.Debug("a replica is gone", "pool", p.pool, "replica", replica, "replicas", len(p.members)+1)
}

// expire forgets replicas whose lease has ended.
func (p *poolReplica) expire(now time.Time) {
	for replica, m := range p.members {
		if now.After(m.expires) {
			p.forget(replica)
		}
	}
}

// set records a member's reservations on an endpoint. sumLoads updates the endpoint's total.
func (p *poolReplica) set(m *remoteReplica, addr string, next kvstate.Booked) {
	if next == (kvstate.Booked{}) {
		delete(m.loads, addr)
	} else {
		m.loads[addr] = next
	}
	p.resum[addr] = struct{}{}
}

// sumLoads updates the totals of endpoints with other reservations: once for all entries of a read, because every
// member has to be looked at. poolReplica.mu is held.
func (p *poolReplica) sumLoads() {
	pool := p.s.state.Pool(p.pool)
	for addr := range p.resum {
		if pool == nil {
			break
		}
		e := p.endpoints.find(pool, addr)
		if e == nil {
			continue
		}
		all := kvstate.RemoteLoad{At: time.Now()}
		for _, m := range p.members {
			if l, ok := m.loads[addr]; ok {
				all.Add(&l)
			}
		}
		e.SetRemoteLoad(all)
	}
	clear(p.resum)
}

// setRates sets the pool's total of the rates at which members book prefill.
func (p *poolReplica) setRates() {
	pool := p.s.state.Pool(p.pool)
	if pool == nil {
		return
	}
	var prefill, local float64
	for _, m := range p.members {
		prefill += float64(m.prefillRate)
		local += float64(m.localRate)
	}
	pool.SetRemoteRates(prefill/1e6, local/1e6)
}

// count rebuilds the list of living replicas.
func (p *poolReplica) count() {
	ids := []uint64{p.s.replica}
	for id := range p.members {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	p.ids.Store(&ids)
}

// leads reports whether this replica writes snapshots: the oldest one does, except the one that asks.
func (p *poolReplica) leads(asking uint64) bool {
	for _, id := range *p.ids.Load() {
		if id != asking {
			return id == p.s.replica
		}
	}
	return false
}

// Owns reports whether this replica scrapes an endpoint. Replicas that know each other agree without communication: it
// is the one with the highest hash of itself and the address. When a replica dies, its endpoints are scraped by others
// as soon as its lease ends; without Redis each replica scrapes all.
func (s *Store) Owns(pool *kvstate.Pool, e *kvstate.Endpoint) bool {
	p := s.poolReplica(pool.Spec.Name)
	if p == nil {
		return true
	}
	ids := *p.ids.Load()
	if len(ids) == 1 {
		return true
	}
	at := xxhash.Sum64String(e.Addr)
	owner, highest := uint64(0), uint64(0)
	for _, id := range ids {
		h := (id ^ at) * 0x9E3779B185EBCA87
		h ^= h >> 29
		h *= 0xC2B2AE3D27D4EB4F
		if h ^= h >> 32; h >= highest {
			owner, highest = id, h
		}
	}
	return owner == s.replica
}
