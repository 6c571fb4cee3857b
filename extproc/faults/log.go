package faults

import (
	"context"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
)

// The replan port gets Envoy's next try, which does not say how the one before it failed. Envoy's log of failed tries
// does, at about the same moment.

// keptFor and maxKept bound how long, and how many, failures are remembered.
const (
	keptFor = 10 * time.Second
	maxKept = 1 << 14
)

// tries has the failures of the latest tries, by their ticket's id. The zero value is ready to use.
type tries struct {
	mu    sync.Mutex
	known map[kvtransfer.ID]*entry
	order []*entry // oldest first
}

type entry struct {
	id      kvtransfer.ID
	at      time.Time
	known   chan struct{} // closed when failure is set
	failure Failure
}

// report records how a try failed. The first report of a ticket counts.
func (l *tries) report(id kvtransfer.ID, f Failure) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.at(id)
	select {
	case <-e.known:
	default:
		e.failure = f
		close(e.known)
	}
}

// await returns how the try of a ticket failed, once that is known; false if it is not within a time.
func (l *tries) await(ctx context.Context, id kvtransfer.ID, within time.Duration) (Failure, bool) {
	l.mu.Lock()
	e := l.at(id)
	l.mu.Unlock()
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-e.known:
		return e.failure, true
	case <-timer.C:
	case <-ctx.Done():
	}
	return Failure{}, false
}

// at finds an entry, or creates it. The caller holds the lock.
func (l *tries) at(id kvtransfer.ID) *entry {
	now, old := time.Now(), 0
	for old < len(l.order) && (now.Sub(l.order[old].at) > keptFor || len(l.order)-old >= maxKept) {
		delete(l.known, l.order[old].id)
		old++
	}
	l.order = l.order[old:]
	e := l.known[id]
	if e == nil {
		e = &entry{id: id, at: now, known: make(chan struct{})}
		if l.known == nil {
			l.known = map[kvtransfer.ID]*entry{}
		}
		l.known[id], l.order = e, append(l.order, e)
	}
	return e
}
