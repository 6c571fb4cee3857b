package kvstate

import (
	"context"
	"slices"
	"sync"
)

// room is what an endpoint's receive buffer has left for prompts on their way to it, in tokens. A prefill engine that
// pushes blocks while it allocates there, and several long prompts that each got a part of the buffer would wait for each
// other for ever: so a prompt gets all it needs, or waits its turn.
type room struct {
	mu      sync.Mutex
	used    int64
	waiting []*roomWait // first come, first served
}

type roomWait struct {
	tokens, limit int64
	ready         chan struct{} // closed when it has its tokens
}

// take waits for room for tokens of limit; false if ctx ended first, or if they never fit.
func (r *room) take(ctx context.Context, tokens, limit int64) bool {
	if tokens > limit {
		return false
	}
	r.mu.Lock()
	w := &roomWait{tokens, limit, make(chan struct{})}
	r.waiting = append(r.waiting, w)
	r.next()
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
		r.next() // a smaller one behind it may fit
		return false
	}
	return true // it got its turn at the same moment
}

func (r *room) give(tokens int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.used -= tokens
	r.next()
}

func (r *room) next() {
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

// ReserveRoom is [State.ReserveAs] for a request whose KV will be pushed into the endpoint's buffer: it waits until the
// buffer (limit tokens) has room for the prompt, in the order of coming, and holds that until the reservation is released.
// It books nothing and is false if ctx ends first, or if the prompt is larger than the buffer. Replicas of Tandem do not
// know of each other here.
func (s *State) ReserveRoom(ctx context.Context, id ReservationID, e *Endpoint, promptTokens, limit int64, from *Source) (ReservationID, bool) {
	promptTokens = max(promptTokens, 0)
	if !e.room.take(ctx, promptTokens, limit) {
		return 0, false
	}
	id = s.reserve(id, e, promptTokens, promptTokens, from)
	if id == 0 {
		e.room.give(promptTokens)
	}
	return id, true
}
