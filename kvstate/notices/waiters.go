package notices

import (
	"context"
	"sync"
	"time"

	"tandem/internal/periodic"
)

// Waiters matches notifications with the requests that wait for them. Either may come first. It is safe for
// concurrent use.
type Waiters struct {
	ttl time.Duration
	max int

	mu    sync.Mutex
	ids   map[string]*pending
	order []aged // of ids, oldest first; a settled id stays here until it is as old as the rest
	count Counts
}

// pending is an id with a notification or a waiter.
type pending struct {
	notices int
	want    int           // number of expected notifications; 0: no waiter yet
	arrived chan struct{} // closed when notices reached want
	since   time.Time
}

type aged struct {
	id    string
	since time.Time
}

// Counts count the results of notifications and waits.
type Counts struct {
	Received  uint64 // received here
	Forwarded uint64 // received by other replicas
	Ignored   uint64 // messages that are not notifications
	Unwanted  uint64 // ids without a waiter in time, or dropped for newer ones
	First     uint64 // waits that found the notification already there
	Woken     uint64 // waits that a notification ended
	Missed    uint64 // waits that ended without a notification
}

// NewWaiters keeps an id for ttl, and at most limit of them; the oldest are dropped. Zero values: one minute,
// 65,536.
func NewWaiters(ttl time.Duration, limit int) *Waiters {
	if ttl <= 0 {
		ttl = time.Minute
	}
	if limit <= 0 {
		limit = 1 << 16
	}
	return &Waiters{ttl: ttl, max: limit, ids: map[string]*pending{}}
}

// Arrived records a notification for an id. Surplus ones do nothing. A duplicate from one rank can wake a waiter
// early, which costs what a missing one costs: D computes.
func (b *Waiters) Arrived(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count.Received++
	b.arrived(id)
}

// ArrivedAtReplica is Arrived for a notification that another replica received: engines send to one replica, and
// the leg may wait at any.
func (b *Waiters) ArrivedAtReplica(id string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count.Forwarded++
	b.arrived(id)
}

func (b *Waiters) arrived(id string) {
	p := b.pending(id)
	p.notices++
	if p.want > 0 && p.notices == p.want {
		close(p.arrived)
	}
}

// Ignored counts a message that is not a notification.
func (b *Waiters) Ignored() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.count.Ignored++
}

// Wait waits until n notifications for the id have arrived, and reports whether they have; ctx bounds it. Only one
// wait is possible for an id: a second finds nothing.
func (b *Waiters) Wait(ctx context.Context, id string, n int) bool {
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

// pending finds or creates an id.
func (b *Waiters) pending(id string) *pending {
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

// dropOldest forgets the oldest id, unless it is settled or has a waiter, which has its own timeout.
func (b *Waiters) dropOldest() {
	oldest := b.order[0]
	b.order = b.order[1:]
	if p := b.ids[oldest.id]; p != nil && p.since.Equal(oldest.since) && p.want == 0 {
		delete(b.ids, oldest.id)
		b.count.Unwanted++
	}
}

// Run removes old ids until ctx ends.
func (b *Waiters) Run(ctx context.Context) {
	periodic.Run(ctx, max(b.ttl/4, time.Millisecond), b.sweep)
}

func (b *Waiters) sweep(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.order) > 0 && now.Sub(b.order[0].since) >= b.ttl {
		b.dropOldest()
	}
}

// Held returns the number of ids.
func (b *Waiters) Held() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.ids)
}

// Counts returns the current counts.
func (b *Waiters) Counts() Counts {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.count
}
