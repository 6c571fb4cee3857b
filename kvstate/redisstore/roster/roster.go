// Package roster has the record of each replica: its name, release, slot, addresses, and when it last reported. Each
// replica publishes its own with its leases (package redisstore); the status page, operators' questions and Envoys'
// list of replicas read them here. A record stays for an hour after the replica's last lease, and snapshots hand it on,
// so that a replica that died has a name for people.
package roster

import (
	"maps"
	"net/netip"
	"sync"
	"time"

	statev1 "tandem/protos/state/v1"
)

// Member is the record of one replica. Each publishes its own with its leases (statev1.Member).
type Member struct {
	Replica         uint64    // when it started in milliseconds since 1970, and 20 random bits
	Name            string    // for people
	Version         string    // its release; empty: one that kept records of its own
	Slot            int       // among the replicas that Envoys know; -1: none
	ExtProc, Replan string    // addresses ip:port at which Envoys reach it; empty: Envoys do not get them from Redis
	Ended           bool      // in order
	Heard           time.Time // when it last reported; zero for this replica
}

// Remembered is how long a replica that has ended stays in the [Roster].
const Remembered = time.Hour

// Bounds of another replica's record.
const (
	maxName    = 300
	maxRelease = 100
	maxMembers = 1024
)

// Roster has the records of all replicas that reported in the last hour, and publishes this one's. Its methods may be
// called concurrently.
type Roster struct {
	replica uint64
	changed func() // makes the store publish

	mu     sync.Mutex
	self   Member
	edited int // counts changes of self, so that each pool publishes them once
	others map[uint64]Member
	sent   time.Time // when Redis last accepted self in its current form
}

// New returns the roster of a replica. changed makes the store publish; it must not block.
func New(self Member, changed func()) *Roster {
	return &Roster{replica: self.Replica, changed: changed, self: self, others: map[uint64]Member{}}
}

// Edit changes this replica's record, which is then published at once.
func (r *Roster) Edit(change func(self *Member)) {
	r.mu.Lock()
	before := r.self
	change(&r.self)
	edited := r.self != before
	if edited {
		r.edited++
		r.sent = time.Time{}
	}
	r.mu.Unlock()
	if edited {
		r.changed()
	}
}

// Self returns this replica's record, and when Redis last took it; zero: it has not since the record changed.
func (r *Roster) Self() (self Member, sent time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.self, r.sent
}

// Others returns the records of the other replicas by their number.
func (r *Roster) Others() map[uint64]Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.expire(time.Now())
	return maps.Clone(r.others)
}

// Add adds a replica's record that came another way than with its leases, unless a later one is known.
func (r *Roster) Add(m Member) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, found := r.others[m.Replica]
	if m.Replica == r.replica || found && (!m.Heard.After(known.Heard) || known.Version != "" && m.Version == "") {
		return
	}
	r.put(m)
}

// Observe records what a batch of that age says of its sender. A batch without a record renews the known one.
func (r *Roster) Observe(b *statev1.Batch, age time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	known, found := r.others[b.GetReplica()]
	m := known
	if b.GetMember() != nil {
		m = memberOf(b.GetMember())
	} else if !found {
		return
	}
	m.Replica, m.Heard = b.GetReplica(), time.Now().Add(-age)
	if known.Heard.After(m.Heard) {
		m.Heard = known.Heard
	}
	m.Ended = known.Ended || b.GetLeaving()
	r.put(m)
}

// put stores a record, if it is a valid one. mu is held.
func (r *Roster) put(m Member) {
	now := time.Now()
	if m.Heard.After(now) { // by a clock that is ahead of ours
		m.Heard = now
	}
	if len(m.Name) > maxName || len(m.Version) > maxRelease || now.Sub(m.Heard) > Remembered {
		return
	}
	if !isAddress(m.ExtProc) || !isAddress(m.Replan) { // Envoys would refuse it
		m.Slot, m.ExtProc, m.Replan = -1, "", ""
	}
	if _, found := r.others[m.Replica]; !found && len(r.others) >= maxMembers {
		if r.expire(now); len(r.others) >= maxMembers {
			return
		}
	}
	r.others[m.Replica] = m
}

// expire drops the records of replicas that have not reported for an hour. mu is held.
func (r *Roster) expire(now time.Time) {
	maps.DeleteFunc(r.others, func(_ uint64, m Member) bool { return now.Sub(m.Heard) > Remembered })
}

func isAddress(text string) bool {
	at, err := netip.ParseAddrPort(text)
	return err == nil && at.Port() != 0 && !at.Addr().IsUnspecified()
}

// AddTo adds this replica's record to a batch that is complete, and to the first one after a change. It returns the
// edition that the other replicas have after the batch; published is the one that they have before it.
func (r *Roster) AddTo(b *statev1.Batch, published int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if b.GetComplete() || r.edited != published {
		b.Member = Record(&r.self)
	}
	return r.edited
}

// Took notes that Redis took an edition of this replica's record.
func (r *Roster) Took(edition int, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if edition == r.edited {
		r.sent = at
	}
}

// Gone returns the records of the replicas that are not among the living.
func (r *Roster) Gone(living []uint64) (out []*statev1.Member) {
	all := r.Others()
	for _, id := range living {
		delete(all, id)
	}
	for _, m := range all {
		record := Record(&m)
		record.Replica, record.HeardMs, record.Ended = m.Replica, m.Heard.UnixMilli(), m.Ended
		out = append(out, record)
	}
	return out
}

// Load adds the records of a snapshot.
func (r *Roster) Load(all []*statev1.Member) {
	for _, record := range all {
		m := memberOf(record)
		m.Replica, m.Heard, m.Ended = record.GetReplica(), time.UnixMilli(record.GetHeardMs()), record.GetEnded()
		r.Add(m)
	}
}

// Record returns a record as it is published.
func Record(m *Member) *statev1.Member {
	return &statev1.Member{
		Name: m.Name, Version: m.Version, Slot: uint32(m.Slot + 1), ExtProc: m.ExtProc, Replan: m.Replan,
	}
}

func memberOf(m *statev1.Member) Member {
	return Member{
		Name: m.GetName(), Version: m.GetVersion(), Slot: int(m.GetSlot()) - 1, ExtProc: m.GetExtProc(),
		Replan: m.GetReplan(),
	}
}
