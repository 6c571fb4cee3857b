// Package membership chooses the replicas that Envoys with xDS get, so that Envoys follow replicas that come and go
// (docs/adr/0035).
//
// Each replica's addresses are in its record of the roster (redisstore), which it publishes with its leases. A replica
// that is missing stays in the list for [Options.Hold], so that one that hangs or starts anew at the same address does
// not change Envoys; their health checks leave it out meanwhile. While Redis does not answer, nobody is missing.
//
// Each replica also has a slot, a small number that it chooses among those that no other has, and keeps. If two chose
// the same, the younger chooses again.
package membership

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/roster"
)

// Replica has the addresses of one replica, each an IP address with a port.
type Replica struct {
	Slot    int
	ExtProc string // gRPC: ext_proc, access log, xDS
	Replan  string
}

// Options of [New].
type Options struct {
	Self  func(context.Context) (Replica, error) // this replica without its slot; asked until it knows
	Slots int                                    // how many there are
	Every time.Duration                          // interval at which the list is read; default 1 s
	Hold  time.Duration                          // how long a missing replica stays in the list; default 30 s
	// Changed is called with the list when it changes, sorted, this replica included. If there is no list yet, an error
	// says why: ten times Every after the start.
	Changed func([]Replica, error)
	// Full is called with true when this replica finds that all slots are taken, so that no Envoy learns of it, and
	// with false when it gets one after that.
	Full func(bool)
}

const within = 500 * time.Millisecond // for looking up this replica's addresses, and one exchange with Redis

// Members follows the list.
type Members struct {
	o     Options
	redis redisstore.Access
	up    func() bool

	self    Replica               // its slot is -1 if it has none
	found   bool                  // self has its addresses
	full    bool                  // the last choice found no slot
	lost    time.Time             // the last time at which the others had lost this one: Redis took nothing for a lease
	seen    map[Replica]time.Time // when each was last known to live
	list    []Replica             // as published
	known   bool                  // a list was published
	started time.Time
	down    time.Time // when Redis last did not answer
}

// New returns the membership of a replica. It does nothing before [Members.Run].
func New(store *redisstore.Store, o Options) *Members {
	o.Every, o.Hold = cmp.Or(o.Every, time.Second), cmp.Or(o.Hold, 30*time.Second)
	up := func() bool { _, up := store.Status(); return up }
	return &Members{o: o, redis: store.Access(), up: up, seen: map[Replica]time.Time{}, self: Replica{Slot: -1}}
}

// Run publishes this replica's addresses and follows those of the others until ctx ends. Start it when the store has
// joined the other replicas.
func (m *Members) Run(ctx context.Context) {
	m.started = time.Now()
	tick := time.NewTicker(m.o.Every)
	defer tick.Stop()
	for ctx.Err() == nil {
		living, err := m.look(ctx)
		if err == nil || ctx.Err() == nil {
			m.take(time.Now(), living, err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// look returns the living replicas with a slot, oldest first, and publishes this one's addresses and slot.
func (m *Members) look(ctx context.Context) ([]Replica, error) {
	if !m.found {
		ctx, cancel := context.WithTimeout(ctx, within)
		defer cancel()
		self, err := m.o.Self(ctx)
		if err != nil {
			return nil, fmt.Errorf("finding this replica's addresses: %w", err)
		}
		self.Slot = m.self.Slot
		m.self, m.found = self, true
	}
	others, ids := m.redis.Roster.Others(), m.redis.Living()
	if _, published := m.redis.Roster.Self(); !published.IsZero() && time.Since(published) >= m.redis.Lease {
		m.lost = time.Now()
	}
	var older, younger []Replica
	for _, id := range ids {
		r, found := others[id]
		switch {
		case !found || r.Slot < 0 || r.Slot >= m.o.Slots: // it starts, or Envoys do not get it from Redis
		case id < m.redis.Replica:
			older = append(older, Replica{r.Slot, r.ExtProc, r.Replan})
		default:
			younger = append(younger, Replica{r.Slot, r.ExtProc, r.Replan})
		}
	}
	m.choose(older, younger, time.Since(m.lost) >= 3*m.o.Every) // by then the others' batches are read
	m.redis.Roster.Edit(func(self *roster.Member) {
		self.Slot, self.ExtProc, self.Replan = m.self.Slot, m.self.ExtProc, m.self.Replan
	})
	if full := m.self.Slot < 0; full != m.full {
		m.full = full
		m.o.Full(full)
	}
	out := slices.Concat(older, younger)
	if m.self.Slot >= 0 {
		out = append(out, m.self)
	}
	return out, nil
}

// choose sets this replica's slot. It keeps the one that it has, unless an older replica has it, too, or the others
// have not seen this one for a while.
func (m *Members) choose(older, younger []Replica, known bool) {
	taken := make([]bool, m.o.Slots)
	for _, r := range older {
		taken[r.Slot] = true
	}
	if known && m.self.Slot >= 0 && !taken[m.self.Slot] {
		return
	}
	for _, r := range younger {
		taken[r.Slot] = true
	}
	if m.self.Slot < 0 || taken[m.self.Slot] {
		m.self.Slot = slices.Index(taken, false)
	}
}

// take applies what a look at the roster returned, and publishes the list if it has changed.
func (m *Members) take(now time.Time, living []Replica, err error) {
	if err != nil || !m.up() {
		m.down = now
		for r := range m.seen {
			m.seen[r] = now // no other replica can be seen
		}
		if !m.known && now.Sub(m.started) >= 10*m.o.Every {
			m.known = true
			m.o.Changed(nil, cmp.Or(err, errNoWrites))
		}
		return
	}
	for _, r := range living {
		m.seen[r] = now
	}
	maps.DeleteFunc(m.seen, func(r Replica, at time.Time) bool {
		// in its place, or at its address
		succeeded := slices.ContainsFunc(living, func(l Replica) bool {
			return l.Slot == r.Slot || l.ExtProc == r.ExtProc
		})
		return now.Sub(at) >= m.o.Hold || at.Before(now) && succeeded
	})
	// After an outage replicas come back one after the other.
	if len(m.list) == 0 && !m.down.IsZero() && now.Sub(m.down) < 5*m.o.Every {
		return
	}
	list := slices.SortedFunc(maps.Keys(m.seen), func(a, b Replica) int {
		return cmp.Or(cmp.Compare(a.Slot, b.Slot), cmp.Compare(a.ExtProc, b.ExtProc))
	})
	// Two replicas may have one slot until the younger notices it.
	list = slices.CompactFunc(list, func(a, b Replica) bool { return a.Slot == b.Slot })
	if len(list) > 0 && !slices.Equal(list, m.list) {
		m.list, m.known = list, true
		m.o.Changed(list, nil)
	}
}

var errNoWrites = errors.New("what replicas publish is not taken by Redis")
