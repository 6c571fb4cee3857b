package redisstore

import (
	"time"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// apply takes another replica's batch into the state. sharer.mu is held.
func (p *sharer) apply(b *statev1.Batch, id streamID) {
	pool := p.s.state.Pool(p.pool)
	if pool == nil {
		return
	}
	now := time.Now()
	age := p.s.clock.age(id, now)
	c := &p.s.counters
	c.batchesRead.Add(1)
	c.lagMicroseconds.Store(age.Microseconds())
	if m := p.meet(b, age); m != nil {
		if m.seq != 0 && b.GetSeq() > m.seq+1 {
			c.gaps.Add(1)
			p.ask()
		}
		m.seq = b.GetSeq()
		p.applyLoads(m, b)
	}
	endpoints := p.endpoints(pool, b.GetAddresses())
	at := func(i uint32) *kvstate.Endpoint {
		if int(i) < len(endpoints) {
			return endpoints[i]
		}
		return nil
	}
	for _, blocks := range b.GetBlocks() {
		if e := at(blocks.GetAddress()); e != nil {
			p.applyBlocks(pool, e, blocks)
		}
	}
	for _, h := range b.GetHealth() {
		if e := at(h.GetAddress()); e != nil {
			p.applyHealth(e, h.GetFailed())
		}
	}
	for _, g := range b.GetSignals() {
		if e := at(g.GetAddress()); e != nil {
			p.applySignals(e, g, now.Add(-age-time.Duration(g.GetAgeMs())*time.Millisecond))
		}
	}
	for _, session := range b.GetSessions() {
		p.s.state.ApplyStick(pool, session.GetKey(), at(session.GetPrefill()-1), at(session.GetDecode()-1))
	}
	for _, id := range b.GetReleased() {
		p.s.state.Release(kvstate.ReservationID(id))
	}
	if b.GetHello() && p.leads(b.GetReplica()) {
		p.wantSnapshot(false)
	}
	if n := b.GetSnapshot(); n != nil {
		p.noticed(n)
	}
}

// endpoints are those at the addresses of a batch; nil where none is known here, which is so while a name resolves to
// different addresses here and there, or replicas have different configurations.
func (p *sharer) endpoints(pool *kvstate.Pool, addresses []string) []*kvstate.Endpoint {
	out := make([]*kvstate.Endpoint, len(addresses))
	for i, a := range addresses {
		if out[i] = pool.Endpoint(a); out[i] == nil {
			p.s.counters.unknown.Add(1)
		}
	}
	return out
}

func (p *sharer) applyLoads(m *member, b *statev1.Batch) {
	named := make(map[string]bool, len(b.GetLoads()))
	for _, l := range b.GetLoads() {
		if i := int(l.GetAddress()); i < len(b.GetAddresses()) {
			addr := b.GetAddresses()[i]
			named[addr] = true
			p.set(m, addr, load{max(l.GetRequests(), 0), max(l.GetPromptTokens(), 0)})
		}
	}
	if b.GetComplete() {
		for addr := range m.loads {
			if !named[addr] {
				p.set(m, addr, load{})
			}
		}
	}
}

func (p *sharer) applyBlocks(pool *kvstate.Pool, e *kvstate.Endpoint, b *statev1.Blocks) {
	switch b.GetKind() {
	case statev1.Blocks_KIND_ROUTED:
		p.s.state.ApplyRouted(pool, e, b.GetHashes())
	default: // of a release to come
	}
}

func (p *sharer) applyHealth(e *kvstate.Endpoint, failed bool) {
	p.s.state.ApplyFailed(e, failed)
	t := p.told[e.Addr]
	t.failed = failed
	p.told[e.Addr] = t
}

func (p *sharer) applySignals(e *kvstate.Endpoint, g *statev1.Signals, at time.Time) {
	if p.s.state.ApplyObserved(e, kvstate.Signals{
		Running: g.GetRunning(), Waiting: g.GetWaiting(), KVUsage: fromPPM(g.GetKvUsagePpm()), KVTokens: g.GetKvTokens(), At: at,
	}) {
		t := p.told[e.Addr]
		t.signals = at
		p.told[e.Addr] = t
	}
}
