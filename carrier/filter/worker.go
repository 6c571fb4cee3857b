package filter

import (
	"context"
	"sync"
)

// Which thread runs a line? Envoy calls the hooks of a request on one of its workers, one after the other, and all
// methods in this package run there, with these exceptions:
//
//   - the methods of [passing] run in a goroutine, one at a time, and the worker leaves the request
//     alone meanwhile. What they return, an [onWorker], the worker does next;
//   - the methods of [worker] run anywhere, and so does pair.settle;
//   - [Shared.Run], and what it calls in [Shared], run in a goroutine of the replica's. They only wake filters.

// onWorker is something that Envoy's worker does next for a request.
type onWorker func()

// passing is a request while a pass runs for it: its methods run in a goroutine.
type passing struct{ f *Filter }

// worker is Envoy's worker of one request, as other threads reach it.
type worker struct {
	mu      sync.Mutex
	waker   Waker              // nil: nothing had to wait yet
	cancel  context.CancelFunc // of the pass that runs in a goroutine; nil: none does
	todo    []onWorker
	outcome *Outcome // of a request that has ended; nil: it has not
}

// wake gives the worker something to do, unless the request has ended: then it returns false.
func (w *worker) wake(do onWorker) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.add(do)
}

// add is wake for a caller that has the lock.
func (w *worker) add(do onWorker) bool {
	if w.outcome != nil {
		return false
	}
	if do != nil {
		w.todo = append(w.todo, do)
	}
	w.waker.Wake()
	return true
}

// next returns what the worker does next; nil: nothing.
func (w *worker) next() onWorker {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.outcome != nil || len(w.todo) == 0 {
		w.todo = nil
		return nil
	}
	do := w.todo[0]
	w.todo = w.todo[1:]
	return do
}

// begins records that a pass runs in a goroutine until its context is canceled.
func (w *worker) begins(cancel context.CancelFunc) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancel = cancel
}

// ends records that the pass is over, and wakes the worker for what it has returned. false: the request has ended
// meanwhile, and the goroutine of the pass records its end.
func (w *worker) ends(then onWorker) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cancel = nil // in the same breath: either this or the worker records the end
	return w.add(then)
}

// leave records the end of the request, once. busy: a pass still runs, which is canceled, and records the end.
func (w *worker) leave(o Outcome) (first, busy bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.outcome != nil {
		return false, false
	}
	w.outcome = &o
	if w.cancel == nil {
		return true, false
	}
	w.cancel()
	return true, true
}
