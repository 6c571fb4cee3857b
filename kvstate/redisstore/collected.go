package redisstore

import (
	"time"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// What this replica hears from engines that it listens to, on its way to the others, and theirs on its way to here.

// Follow has what is collected of KV events shared: f takes what others tell. To be called before [Store.Join].
func (s *Store) Follow(f kvstate.EventFollower) { s.follower = f }

var _ kvstate.EventRelay = (*Store)(nil)

// Collects implements [kvstate.EventRelay].
func (s *Store) Collects(pool *kvstate.Pool, e *kvstate.Endpoint) bool {
	p := s.sharer(pool.Spec.Name)
	return p == nil || s.ownerAmong(*p.collectors.Load(), e) == s.replica
}

// Alone implements [kvstate.EventRelay].
func (s *Store) Alone(pool *kvstate.Pool) bool {
	p := s.sharer(pool.Spec.Name)
	return p == nil || len(*p.collectors.Load()) == 1
}

// Lease implements [kvstate.EventRelay].
func (s *Store) Lease() time.Duration { return s.o.Lease }

// collected is what waits to be told of one publisher.
type collected struct {
	addr string
	rank int
	statev1.Collected
}

// maxCollected bounds what waits, in bytes: some 60,000 blocks. More is thrown away; who misses it asks for all.
const maxCollected = 1 << 20

// TellCollected implements [kvstate.EventRelay].
func (s *Store) TellCollected(pool *kvstate.Pool, c *kvstate.Collected) {
	p := s.sharer(pool.Spec.Name)
	if p == nil || s.Alone(pool) {
		return
	}
	p.outMu.Lock()
	p.out.collect(c)
	if p.out.collectedBytes > maxCollected {
		s.counters.collectedDropped.Add(int64(len(p.out.collected)))
		p.out.dropCollected()
	}
	p.outMu.Unlock()
	s.Changed()
}

// collect notes what was collected: together with what waits already, where it goes on from there.
func (o *outbox) collect(c *kvstate.Collected) {
	at := collectedAt{c.Endpoint.Addr, c.Rank}
	if i, ok := o.collectedAt[at]; ok && !c.Reset && !c.Doubt && o.collected[i].Next == c.From {
		told := o.collected[i]
		before := len(told.Events)
		told.Events, told.Next, told.Time = appendEvents(told.Events, c.Events), c.Next, c.Time
		if c.Next > c.From { // else it says no more than that it listens
			told.Old = c.Old
		}
		o.collectedBytes += len(told.Events) - before
		return
	}
	told := &collected{addr: c.Endpoint.Addr, rank: c.Rank, Collected: statev1.Collected{
		Rank: uint32(c.Rank), From: c.From, Next: c.Next, Epoch: c.Epoch, Time: c.Time, Anew: c.Reset, Doubt: c.Doubt, Old: c.Old,
		Events: appendEvents(nil, c.Events),
	}}
	if o.collectedAt == nil {
		o.collectedAt = map[collectedAt]int{}
	}
	o.collectedAt[at] = len(o.collected)
	o.collected = append(o.collected, told)
	o.collectedBytes += itemBytes + len(told.Events)
}

func (o *outbox) dropCollected() { o.collected, o.collectedAt, o.collectedBytes = nil, nil, 0 }

// giveBackCollected puts what could not be sent before what came since, and returns how much of both was dropped for want of
// room.
func (o *outbox) giveBackCollected(unsent *outbox) (dropped int) {
	if o.collectedBytes+unsent.collectedBytes > maxCollected {
		dropped = len(o.collected) + len(unsent.collected)
		o.dropCollected()
		return dropped
	}
	for at := range o.collectedAt {
		o.collectedAt[at] += len(unsent.collected)
	}
	o.collected = append(unsent.collected, o.collected...)
	o.collectedBytes += unsent.collectedBytes
	return 0
}

// collectedAt is a publisher.
type collectedAt struct {
	addr string
	rank int
}

// tellCollected adds to a batch what was collected, and, if it is complete, how far this replica's part in that goes.
func (p *sharer) tellCollected(b *statev1.Batch, out *outbox, t *addressTable, pool *kvstate.Pool) {
	for _, c := range out.collected {
		c.Address = t.position(c.addr)
		b.Collected = append(b.Collected, &c.Collected)
	}
	if f := p.s.follower; b.GetComplete() && f != nil && pool != nil && f.Follows(pool) {
		b.Collects = true
		for _, addr := range f.Lacks(pool) {
			b.Lacks = append(b.Lacks, t.position(addr))
		}
	}
}

// lackAll says in a first batch that nothing is known of any publisher yet.
func (p *sharer) lackAll(b *statev1.Batch) {
	pool := p.s.state.Pool(p.pool)
	if f := p.s.follower; f == nil || pool == nil || !f.Follows(pool) {
		return
	}
	b.Collects = true
	for i, e := range pool.Endpoints() {
		b.Addresses, b.Lacks = append(b.Addresses, e.Addr), append(b.Lacks, uint32(i))
	}
}

// takeCollected takes in what another replica, the teller, has collected; old: it is read again, or was said before this replica was
// there. sharer.mu is held.
func (p *sharer) takeCollected(pool *kvstate.Pool, teller uint64, all []*statev1.Collected, at func(uint32) *kvstate.Endpoint, old bool) {
	if p.s.follower == nil {
		return
	}
	for _, c := range all {
		e := at(c.GetAddress())
		if e == nil {
			continue
		}
		events, err := p.events.read(c.GetEvents())
		if err != nil {
			continue // of a release to come, or of nobody's: what comes next shows that something was missed
		}
		p.s.follower.TakeCollected(pool, &kvstate.Collected{
			Endpoint: e, Rank: int(c.GetRank()), Events: events, From: c.GetFrom(), Next: c.GetNext(), Epoch: c.GetEpoch(), Time: c.GetTime(),
			Reset: c.GetAnew(), Doubt: c.GetDoubt(), Part: c.GetPart(), More: c.GetMore(), Old: old || c.GetOld(),
			Heir: p.s.ownerAmong(*p.collectors.Load(), e) == teller,
		})
	}
}

// noteCollector notes whether a replica takes its part in collecting.
func (p *sharer) noteCollector(m *member, b *statev1.Batch) {
	if (b.GetComplete() || b.GetHello()) && m.collects != b.GetCollects() {
		m.collects = b.GetCollects()
		p.count()
	}
}
