// Package attempts is where the streams of one attempt of a request meet. Envoy asks about each hop in a stream of its
// own, and its log and its second tries come on further ones, in any order, and perhaps at another replica. What one of
// them reports for another is kept by the id of the attempt's ticket.
package attempts

import (
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
)

// Table has a T for each attempt that a stream uses or has reported on: as long as a stream uses it, and for a while
// after. Their number is bounded. The zero value is ready to use, and safe for concurrent use.
type Table[T any] struct {
	mu   sync.Mutex
	live map[kvtransfer.ID]*entry[T]
	idle []idle // what no stream uses, oldest first
}

type entry[T any] struct {
	of      *T
	streams int
}

type idle struct {
	id    kvtransfer.ID
	since time.Time
}

// How long, and how many, attempts are remembered that no stream uses: a report on one hop may come before the
// stream that asks for it, and reports on other replicas' attempts arrive too.
const (
	keptFor = 10 * time.Second
	maxIdle = 1 << 16
)

// Enter returns what is known of an attempt, for a stream that uses it; [Table.Leave] must follow. fresh makes what is
// known at first. The T has its own lock, or is changed only by [Table.Update].
func (t *Table[T]) Enter(id kvtransfer.ID, fresh func() *T) *T {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.at(id, fresh)
	e.streams++
	return e.of
}

// Leave ends what [Table.Enter] began.
func (t *Table[T]) Leave(id kvtransfer.ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.live[id]; e != nil {
		e.streams--
		t.rest(id, e)
	}
}

// Update changes what is known of an attempt. Only one update of a table runs at a time.
func (t *Table[T]) Update(id kvtransfer.ID, fresh func() *T, change func(*T)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.at(id, fresh)
	change(e.of)
	t.rest(id, e)
}

// UpdateUsed is Update for an attempt that a stream uses; of any other nothing is kept.
func (t *Table[T]) UpdateUsed(id kvtransfer.ID, change func(*T)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e := t.live[id]; e != nil {
		change(e.of)
	}
}

// Len returns how many attempts are known.
func (t *Table[T]) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.live)
}

// at finds an attempt, or creates it. The caller holds the lock.
func (t *Table[T]) at(id kvtransfer.ID, fresh func() *T) *entry[T] {
	e := t.live[id]
	if e == nil {
		if t.live == nil {
			t.live = map[kvtransfer.ID]*entry[T]{}
		}
		e = &entry[T]{of: fresh()}
		t.live[id] = e
	}
	return e
}

// rest records that no stream uses an attempt now, and forgets attempts that have not been used for long. The caller
// holds the lock.
func (t *Table[T]) rest(id kvtransfer.ID, e *entry[T]) {
	if e.streams > 0 {
		return
	}
	now := time.Now()
	t.idle = append(t.idle, idle{id, now})
	done := 0
	for done < len(t.idle) && (now.Sub(t.idle[done].since) > keptFor || len(t.idle)-done > maxIdle) {
		if e := t.live[t.idle[done].id]; e != nil && e.streams == 0 {
			delete(t.live, t.idle[done].id)
		}
		done++
	}
	if t.idle = t.idle[done:]; len(t.idle) == 0 {
		t.idle = nil
	}
}
