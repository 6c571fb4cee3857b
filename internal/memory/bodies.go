package memory

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tandem/internal/periodic"
)

// SlowBody is the time that a body may take to arrive while half of the budget is in use.
const SlowBody = 10 * time.Second

// Bodies are the bodies that are being received. While memory is short, the slowest end first: a client that sends most
// of a long body and then stalls must not hold what all share. It is safe for concurrent use.
type Bodies struct {
	budget *Budget
	mu     sync.Mutex
	open   map[*Body]struct{}
}

// Body is one of them. It may be used again after Done.
type Body struct {
	began time.Time
	bytes atomic.Int64
	end   func()
	ended bool // guarded by Bodies.mu
}

// NewBodies returns none, of a budget.
func NewBodies(b *Budget) *Bodies { return &Bodies{budget: b, open: map[*Body]struct{}{}} }

// Begin begins to receive a body. end is called once, on another goroutine, if it is to end.
func (bs *Bodies) Begin(b *Body, end func()) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	b.began, b.end, b.ended = time.Now(), end, false
	b.bytes.Store(0)
	bs.open[b] = struct{}{}
}

// Received records that a body has n bytes now.
func (b *Body) Received(n int64) { b.bytes.Store(n) }

// Done records that a body has been received, or will not be.
func (bs *Bodies) Done(b *Body) {
	bs.mu.Lock()
	defer bs.mu.Unlock()
	delete(bs.open, b)
	b.end = nil
}

// Run ends slow bodies until ctx ends.
func (bs *Bodies) Run(ctx context.Context) {
	periodic.Run(ctx, time.Second, bs.endSlow)
}

// endSlow ends as many of the slowest bodies as hold what is used above half of the budget.
func (bs *Bodies) endSlow(now time.Time) {
	much := bs.budget.Load() - bs.budget.Limit()/2
	if much <= 0 {
		return
	}
	bs.mu.Lock()
	defer bs.mu.Unlock()
	var slow []*Body
	for b := range bs.open {
		if b.ended { // its memory is on its way back
			much -= b.bytes.Load()
		} else if now.Sub(b.began) > SlowBody && b.bytes.Load() > 0 {
			slow = append(slow, b)
		}
	}
	rate := func(b *Body) float64 { return float64(b.bytes.Load()) / now.Sub(b.began).Seconds() }
	slices.SortFunc(slow, func(a, b *Body) int { return cmp.Compare(rate(a), rate(b)) })
	for _, b := range slow {
		if much <= 0 {
			return
		}
		much -= b.bytes.Load()
		b.ended = true
		go b.end()
	}
}
