package kvstate

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Waits is a request that waits for endpoints at one replica, as others need to know it: they let it go before their own that
// stand behind it (picker.Queue).
type Waits struct {
	ID           uint64 // no two replicas' requests have the same, but by chance
	Arrived      time.Time
	Work         time.Duration // on the endpoint where it is least
	Place        float64       // in its replica's order among those of its priority, least first; others do not learn it
	Priority     int32
	Flow         uint64
	PromptTokens int64
	Held         []Held // by those endpoints that hold most of the prompt, at most [MaxHeld] of them
	Replica      uint64 // that it waits at; 0: this one
	Told         uint64 // changes whenever anything is told anew of it
}

// Held is how much of a prompt an endpoint holds.
type Held struct {
	Addr   string
	Tokens int64
}

// MaxHeld bounds [Waits.Held], and MaxWaitsTold the requests that a replica tells of: those in front.
const (
	MaxHeld      = 8
	MaxWaitsTold = 128

	maxWaitsHeard = 2 * MaxWaitsTold // of one replica: who began to wait is told before who has ended
	maxWaitsSent  = 1024             // that were sent, here and not told yet, or elsewhere and remembered
)

// waitBoard is who waits for a pool's endpoints at all replicas. It stays with the pool when its endpoints change.
type waitBoard struct {
	mu       sync.Mutex
	here     map[uint64]Waits
	heard    map[uint64]Waits   // at others
	replicas map[uint64]int     // how many of those, by replica
	sent     []uint64           // of those here that wait no more, since they were last told
	gone     [2]map[uint64]bool // of those at others that wait no more, those that were sent: the latest, and those before
	told     uint64             // counts what was told, here or by others
	changes  atomic.Uint64      // of heard
}

func newWaitBoard() *waitBoard {
	return &waitBoard{here: map[uint64]Waits{}, heard: map[uint64]Waits{}, replicas: map[uint64]int{}}
}

// Wait tells other replicas, if there are any, that a request waits here for endpoints of the pool, or what has changed about
// one that does. [State.WaitOver] must follow.
func (s *State) Wait(p *Pool, w Waits) {
	if s.peers == nil {
		return
	}
	p.waits.mu.Lock()
	p.waits.told++
	w.Told = p.waits.told
	p.waits.here[w.ID] = w
	p.waits.mu.Unlock()
	s.changed()
}

// WaitOver says that it does not wait any more; with sent, that it was its turn. What it was booked on is to be told before.
func (s *State) WaitOver(p *Pool, id uint64, sent bool) {
	if s.peers == nil {
		return
	}
	p.waits.mu.Lock()
	_, known := p.waits.here[id]
	delete(p.waits.here, id)
	if known && sent && len(p.waits.sent) < maxWaitsSent {
		p.waits.sent = append(p.waits.sent, id)
	}
	p.waits.mu.Unlock()
	if known {
		s.changed()
	}
}

// Shares reports whether there may be other replicas, which are to know what waits here.
func (s *State) Shares() bool { return s.peers != nil }

// Waits are the requests that wait here, those in front of them where they are more than [MaxWaitsTold].
func (p *Pool) Waits() []Waits {
	p.waits.mu.Lock()
	all := slices.Collect(maps.Values(p.waits.here))
	p.waits.mu.Unlock()
	if len(all) > MaxWaitsTold {
		slices.SortFunc(all, func(a, b Waits) int {
			return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.Place, b.Place), cmp.Compare(a.ID, b.ID))
		})
		all = all[:MaxWaitsTold]
	}
	return all
}

// WaitsSent are those that have waited here and were sent since it was called last.
func (p *Pool) WaitsSent() []uint64 {
	p.waits.mu.Lock()
	defer p.waits.mu.Unlock()
	sent := p.waits.sent
	p.waits.sent = nil
	return sent
}

// remember notes that a request elsewhere waits no more because it was sent, for those who ask in time.
func (b *waitBoard) remember(id uint64) {
	if len(b.gone[0]) >= maxWaitsSent {
		b.gone[0], b.gone[1] = nil, b.gone[0]
	}
	if b.gone[0] == nil {
		b.gone[0] = map[uint64]bool{}
	}
	b.gone[0][id] = true
}

// ApplyWaits takes in what another replica tells: who began to wait there, and who does not any more; with all, began are all
// that do. sent are those of the latter whose turn it was. A replica that tells of more than it should is not heard of the rest.
func (p *Pool) ApplyWaits(replica uint64, began []Waits, over, sent []uint64, all bool) {
	b := p.waits
	b.mu.Lock()
	defer b.mu.Unlock()
	changed := false
	forget := func(id uint64) {
		if b.heard[id].Replica == replica {
			delete(b.heard, id)
			b.replicas[replica]--
			changed = true
		}
	}
	for _, id := range sent {
		if b.heard[id].Replica == replica {
			b.remember(id)
			forget(id)
		}
	}
	if all && b.replicas[replica] > 0 {
		stay := make(map[uint64]bool, len(began))
		for i := range began {
			stay[began[i].ID] = true
		}
		for id := range b.heard {
			if !stay[id] {
				forget(id)
			}
		}
	}
	for _, id := range over {
		forget(id)
	}
	for _, w := range began {
		if before, known := b.heard[w.ID]; !known {
			if b.replicas[replica] >= maxWaitsHeard {
				continue
			}
			b.replicas[replica]++
		} else if before.Replica != replica {
			continue
		}
		b.told++
		w.Replica, w.Told = replica, b.told
		b.heard[w.ID] = w
		changed = true
	}
	if b.replicas[replica] == 0 {
		delete(b.replicas, replica)
	}
	if changed {
		b.changes.Add(1)
		p.load.freedSome()
	}
}

// WaitElsewhere is how many requests wait at other replicas, as far as they tell.
func (p *Pool) WaitElsewhere() int {
	p.waits.mu.Lock()
	defer p.waits.mu.Unlock()
	return len(p.waits.heard)
}

// WaitsElsewhere brings known, which are requests that wait at other replicas by id, up to date: said is called for each that is
// new to it or told anew, and over for each that does not wait any more, with whether it was sent. changes is the count that it was brought up to; where
// nothing has changed since it costs nothing.
func (p *Pool) WaitsElsewhere(known map[uint64]Waits, changes *uint64, said func(*Waits), over func(id uint64, sent bool)) {
	b := p.waits
	if b.changes.Load() == *changes {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	*changes = b.changes.Load()
	for id := range known {
		if _, still := b.heard[id]; !still {
			delete(known, id)
			over(id, b.gone[0][id] || b.gone[1][id])
		}
	}
	for id, w := range b.heard {
		if before, ok := known[id]; !ok || before.Told != w.Told {
			known[id] = w
			said(&w)
		}
	}
}
