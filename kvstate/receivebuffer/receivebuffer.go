// Package receivebuffer makes requests wait for space in the buffer into which a prefill engine pushes their KV.
package receivebuffer

import (
	"context"
	"slices"
	"sync"
)

// Buffer tracks the free space of an endpoint's receive buffer, in tokens. A prefill engine that pushes
// blocks allocates them there one by one. If several long prompts each got a part of the buffer, they would wait
// for each other for ever. So a prompt gets all the space that it needs, or waits.
type Buffer struct {
	mu      sync.Mutex
	used    int64
	waiting []*waiter // first come, first served
}

type waiter struct {
	tokens, limit int64
	ready         chan struct{} // closed when its space is reserved
}

// Acquire waits for space for tokens, of limit in total. It returns false if ctx ends first, or if they never fit.
func (r *Buffer) Acquire(ctx context.Context, tokens, limit int64) bool {
	if tokens > limit {
		return false
	}
	r.mu.Lock()
	w := &waiter{tokens, limit, make(chan struct{})}
	r.waiting = append(r.waiting, w)
	r.grant()
	r.mu.Unlock()
	select {
	case <-w.ready:
		return true
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.waiting, w); i >= 0 {
		r.waiting = slices.Delete(r.waiting, i, i+1)
		r.grant() // a smaller one behind it may fit
		return false
	}
	return true // the space was granted at the same moment
}

// Release gives tokens back.
func (r *Buffer) Release(tokens int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used -= tokens
	r.grant()
}

func (r *Buffer) grant() {
	for len(r.waiting) > 0 {
		w := r.waiting[0]
		if r.used+w.tokens > w.limit {
			return
		}
		r.used += w.tokens
		r.waiting = r.waiting[1:]
		close(w.ready)
	}
}
