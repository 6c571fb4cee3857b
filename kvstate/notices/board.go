package notices

import (
	"context"
	"sync"
	"time"
)

// Board matches notices with those who wait for them. Either may come first. It is safe for concurrent use.
type Board struct {
	ttl time.Duration
	max int

	mu    sync.Mutex
	ids   map[string]*pending
	order []aged // of ids, oldest first; an id that was settled stays here until it is as old as the rest
	count Counts
}

// pending is an id that was noticed or is waited for.
type pending struct {
	notices int
	want    int           // 0: nobody waits yet
	arrived chan struct{} // closed when notices reached want
	since   time.Time
}

type aged struct {
	id    string
	since time.Time
}

// Counts say what became of notices and waits.
type Counts struct {
	Received uint64 // notices that came here
	Told     uint64 // and those that other replicas told
	Ignored  uint64 // messages that were none
	Unwanted uint64 // ids that nobody waited for in time, or that gave way to newer ones
	First    uint64 // waits that found the notice there
	Woken    uint64 // waits that a notice ended
	Missed   uint64 // waits that no notice ended
}

// NewBoard keeps an id for ttl, and at most limit of them; the oldest give way. Zero values: one minute, 65,536.
func NewBoard(ttl time.Duration, limit int) *Board {
	if ttl <= 0 {
		ttl = time.Minute
	}
	if limit <= 0 {
		limit = 1 << 16
	}
	return &Board{ttl: ttl, max: limit, ids: map[string]*pending{}}
}

// Arrived is one notice for an id. One notice too many does nothing, so being told twice by the same rank can wake a wait
// early, and costs what a missing one costs: D computes.
func (b *Board) Arrived(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count.Received++
	b.arrived(id)
}

// Told is Arrived for a notice that another replica received: engines push at one of them, and the leg may wait at any.
func (b *Board) Told(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count.Told++
	b.arrived(id)
}

func (b *Board) arrived(id string) {
	p := b.pending(id)
	p.notices++
	if p.want > 0 && p.notices == p.want {
		close(p.arrived)
	}
}

// Ignored is a message that was no notice.
func (b *Board) Ignored() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count.Ignored++
}

// Wait waits until n notices for the id are there, and reports whether they are; ctx bounds it. There is one wait for an
// id: the second one finds nothing.
func (b *Board) Wait(ctx context.Context, id string, n int) bool {
	b.mu.Lock()
	p := b.pending(id)
	if p.notices >= n {
		b.count.First++
		delete(b.ids, id)
		b.mu.Unlock()
		return true
	}
	p.want, p.arrived = n, make(chan struct{})
	arrived := p.arrived
	b.mu.Unlock()

	ok := true
	select {
	case <-arrived:
	case <-ctx.Done():
		ok = false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ids[id] == p {
		delete(b.ids, id)
	}
	if ok {
		b.count.Woken++
	} else {
		b.count.Missed++
	}
	return ok
}

// pending finds an id or makes room for it.
func (b *Board) pending(id string) *pending {
	if p := b.ids[id]; p != nil {
		return p
	}
	for len(b.order) >= b.max {
		b.dropOldest()
	}
	p := &pending{since: time.Now()}
	b.ids[id] = p
	b.order = append(b.order, aged{id, p.since})
	return p
}

// dropOldest forgets the oldest id, unless it was settled or is waited for: a wait has its own end.
func (b *Board) dropOldest() {
	oldest := b.order[0]
	b.order = b.order[1:]
	if p := b.ids[oldest.id]; p != nil && p.since.Equal(oldest.since) && p.want == 0 {
		delete(b.ids, oldest.id)
		b.count.Unwanted++
	}
}

// Run sweeps what is too old until ctx ends.
func (b *Board) Run(ctx context.Context) {
	tick := time.NewTicker(max(b.ttl/4, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			b.sweep(now)
		}
	}
}

func (b *Board) sweep(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.order) > 0 && now.Sub(b.order[0].since) >= b.ttl {
		b.dropOldest()
	}
}

// Held is how many ids are kept now.
func (b *Board) Held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.ids)
}

// Counts are the counts so far.
func (b *Board) Counts() Counts {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count
}
