package kvstate

import (
	"context"
	"slices"
	"sync"
)

// receiveBuffer tracks the free space of an endpoint's receive buffer, in tokens. A prefill engine that pushes
// blocks allocates them there one by one. If several long prompts each got a part of the buffer, they would wait
// for each other for ever. So a prompt gets all the space that it needs, or waits.
type receiveBuffer struct {
	mu      sync.Mutex
	used    int64
	waiting []*bufferWaiter // first come, first served
}

type bufferWaiter struct {
	tokens, limit int64
	ready         chan struct{} // closed when its space is reserved
}

// acquire waits for space for tokens, of limit in total. It returns false if ctx ends first, or if they never fit.
func (r *receiveBuffer) acquire(ctx context.Context, tokens, limit int64) bool {
	if tokens > limit {
		return false
	}
	r.mu.Lock()
	w := &bufferWaiter{tokens, limit, make(chan struct{})}
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

func (r *receiveBuffer) release(tokens int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used -= tokens
	r.grant()
}

func (r *receiveBuffer) grant() {
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

// ReserveBuffer is [Bookings.ReserveAs] for a request whose KV will be pushed into the endpoint's buffer of limit
// tokens. It waits, first come, first served, until the buffer has space for the prompt, and holds the space until
// the reservation is released. It books nothing and returns false if ctx ends first, or if the prompt is larger
// than the buffer. Replicas do not coordinate their use of a buffer.
func (s *Bookings) ReserveBuffer(ctx context.Context, id ReservationID, e *Endpoint, b Booking, limit int64,
	from *Source) (ReservationID, bool) {
	promptTokens := max(b.PromptTokens, 0)
	if !e.buffer.acquire(ctx, promptTokens, limit) {
		return 0, false
	}
	id = s.reserve(id, e, b, promptTokens, from)
	if id == 0 {
		e.buffer.release(promptTokens)
	}
	return s.unlessEnded(id), true
}
