package kvstate

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Queued is a request that waits for endpoints at one replica. The other replicas dispatch it before their own
// requests that rank behind it (admission.Queue).
type Queued struct {
	ID           uint64 // unique among all replicas, with high probability
	Arrived      time.Time
	Work         time.Duration // on the endpoint where it is least
	Position     float64       // among its replica's requests of the same priority, lowest first; not published
	Priority     int32
	Flow         uint64
	PromptTokens int64
	Held         []Held // the endpoints that hold most of the prompt, at most [MaxHeld]
	Replica      uint64 // where it waits; 0: this one
	Version      uint64 // changes whenever the entry is published again
}

// Held is the part of a prompt that an endpoint holds.
type Held struct {
	Addr   string
	Tokens int64
}

// MaxHeld bounds [Queued.Held]. MaxQueuedPublished bounds the requests that a replica publishes: the first in its
// queue.
const (
	MaxHeld            = 8
	MaxQueuedPublished = 128

	maxRemoteQueued = 2 * MaxQueuedPublished // per replica: new requests are published before ended ones
	// dispatched requests: local and not yet published, or remote and remembered.
	maxDispatched = 1024
)

// poolQueue holds the requests that wait for a pool's endpoints at all replicas. It stays with the pool when its
// endpoints change.
type poolQueue struct {
	mu         sync.Mutex
	local      map[uint64]Queued
	remote     map[uint64]Queued // at other replicas
	replicas   map[uint64]int    // number of remote requests, by replica
	dispatched []uint64          // local requests dispatched since the last publication
	// remote requests that were dispatched: the latest generation and the one before
	remoteDispatched [2]map[uint64]bool
	version          uint64        // counts published entries, local and remote
	changes          atomic.Uint64 // of remote
}

func newPoolQueue() *poolQueue {
	return &poolQueue{local: map[uint64]Queued{}, remote: map[uint64]Queued{}, replicas: map[uint64]int{}}
}

// PublishQueued publishes, to other replicas and in the pool's [Pool.Backlog], that a request waits here, or that its
// entry has changed. [State.PublishDequeued] must follow.
func (s *State) PublishQueued(p *Pool, w Queued) {
	p.queue.mu.Lock()
	p.queue.version++
	w.Version = p.queue.version
	p.queue.local[w.ID] = w
	p.queue.mu.Unlock()
	s.link.changed()
}

// PublishDequeued publishes that it no longer waits, and whether it was dispatched. Its reservations must be
// published before.
func (s *State) PublishDequeued(p *Pool, id uint64, sent bool) {
	p.queue.mu.Lock()
	_, known := p.queue.local[id]
	delete(p.queue.local, id)
	if known && sent && s.link.replicas != nil && len(p.queue.dispatched) < maxDispatched {
		p.queue.dispatched = append(p.queue.dispatched, id)
	}
	p.queue.mu.Unlock()
	if known {
		s.link.changed()
	}
}

// Queued returns the requests that wait here: the first [MaxQueuedPublished] of them.
func (p *Pool) Queued() []Queued {
	p.queue.mu.Lock()
	all := slices.Collect(maps.Values(p.queue.local))
	p.queue.mu.Unlock()
	if len(all) > MaxQueuedPublished {
		slices.SortFunc(all, func(a, b Queued) int {
			return cmp.Or(
				cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.Position, b.Position), cmp.Compare(a.ID, b.ID),
			)
		})
		all = all[:MaxQueuedPublished]
	}
	return all
}

// Backlog returns the work of the requests that wait at this replica and, as far as is known, at others.
func (p *Pool) Backlog() (work time.Duration) {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	for _, all := range []map[uint64]Queued{p.queue.local, p.queue.remote} {
		for _, w := range all {
			work += w.Work
		}
	}
	return work
}

// TakeDispatched returns the requests that were dispatched since the last call.
func (p *Pool) TakeDispatched() []uint64 {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	sent := p.queue.dispatched
	p.queue.dispatched = nil
	return sent
}

// rememberDispatched records that a remote request was dispatched.
func (b *poolQueue) rememberDispatched(id uint64) {
	if len(b.remoteDispatched[0]) >= maxDispatched {
		b.remoteDispatched[0], b.remoteDispatched[1] = nil, b.remoteDispatched[0]
	}
	if b.remoteDispatched[0] == nil {
		b.remoteDispatched[0] = map[uint64]bool{}
	}
	b.remoteDispatched[0][id] = true
}

// ApplyQueued applies the publication of another replica: the requests that began to wait there, those that no
// longer wait, and which of the latter were dispatched. With all set, began lists every request that waits there.
// Requests above the limit of a replica are ignored.
func (p *Pool) ApplyQueued(replica uint64, began []Queued, over, sent []uint64, all bool) {
	b := p.queue
	b.mu.Lock()
	defer b.mu.Unlock()
	changed := false
	forget := func(id uint64) {
		if b.remote[id].Replica == replica {
			delete(b.remote, id)
			b.replicas[replica]--
			changed = true
		}
	}
	for _, id := range sent {
		if b.remote[id].Replica == replica {
			b.rememberDispatched(id)
			forget(id)
		}
	}
	if all && b.replicas[replica] > 0 {
		stay := make(map[uint64]bool, len(began))
		for i := range began {
			stay[began[i].ID] = true
		}
		for id := range b.remote {
			if !stay[id] {
				forget(id)
			}
		}
	}
	for _, id := range over {
		forget(id)
	}
	for _, w := range began {
		if before, known := b.remote[w.ID]; !known {
			if b.replicas[replica] >= maxRemoteQueued {
				continue
			}
			b.replicas[replica]++
		} else if before.Replica != replica {
			continue
		}
		b.version++
		w.Replica, w.Version = replica, b.version
		b.remote[w.ID] = w
		changed = true
	}
	if b.replicas[replica] == 0 {
		delete(b.replicas, replica)
	}
	if changed {
		b.changes.Add(1)
		p.load.signalFreed()
	}
}

// RemoteQueueLength returns the number of requests known to wait at other replicas.
func (p *Pool) RemoteQueueLength() int {
	p.queue.mu.Lock()
	defer p.queue.mu.Unlock()
	return len(p.queue.remote)
}

// SyncRemoteQueue updates known, the requests that wait at other replicas by id. It calls said for each new or changed
// request, and over for each that no longer waits, with whether it was dispatched. changes is the version of known; if
// nothing has changed since, the call is free.
func (p *Pool) SyncRemoteQueue(
	known map[uint64]Queued, changes *uint64, changed func(*Queued), removed func(id uint64, dispatched bool),
) {
	b := p.queue
	if b.changes.Load() == *changes {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	*changes = b.changes.Load()
	for id := range known {
		if _, still := b.remote[id]; !still {
			delete(known, id)
			removed(id, b.remoteDispatched[0][id] || b.remoteDispatched[1][id])
		}
	}
	for id, w := range b.remote {
		if before, ok := known[id]; !ok || before.Version != w.Version {
			known[id] = w
			changed(&w)
		}
	}
}
