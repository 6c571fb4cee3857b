package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// rendezvous is where the two legs of a request meet when both run at once: P offers a prompt's KV under a key, D joins
// under the same one, in either order, and P sends. It is P's side; D reaches it through P's side channel. The key is
// what the dialect has for it: SGLang's room, Mooncake's transfer id, the request id of NIXL push.
type rendezvous struct {
	held atomic.Int64 // KV blocks of this engine that wait for the other one

	mu    sync.Mutex
	rooms map[string]*room
	past  map[string]bool // keys that P has closed, and whether D had come
	order []string        // ring of keys in past
	next  int
}

// room is one key's meeting.
type room struct {
	offered, joined bool
	offer           chan struct{} // closed when P is there
	join            chan struct{} // closed when D is there; then want holds
	want            joinRequest
	answer          chan pullAnswer // of P, one
	gone            chan struct{}   // closed when D's connection is gone
}

const rememberedRooms = 16384

func newRendezvous() *rendezvous {
	return &rendezvous{rooms: make(map[string]*room), past: make(map[string]bool), order: make([]string, rememberedRooms)}
}

// at finds or makes the room of a key. The lock is held.
func (v *rendezvous) at(key string, used bool) (*room, error) {
	if used {
		return nil, &violation{"key_reused", "the room or transfer id " + key + " was used before"}
	}
	r := v.rooms[key]
	if r == nil {
		r = &room{offer: make(chan struct{}), join: make(chan struct{}), answer: make(chan pullAnswer, 1), gone: make(chan struct{})}
		v.rooms[key] = r
	}
	return r, nil
}

// enter is P's side of a meeting.
func (v *rendezvous) enter(key string) (*room, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, used := v.past[key]
	r, err := v.at(key, used)
	if err == nil && r.offered {
		return nil, &violation{"key_reused", "the room or transfer id " + key + " is in use on this prefill engine"}
	}
	if err == nil {
		r.offered = true
		close(r.offer)
	}
	return r, err
}

// meet is D's side. Where P was cut before D came, as both are when their client leaves, D is no second one: it waits for nobody.
func (v *rendezvous) meet(key string, want joinRequest) (*room, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	r, err := v.at(key, v.past[key])
	if err == nil && r.joined {
		return nil, &violation{"key_reused", "the room or transfer id " + key + " is in use by another decode"}
	}
	if err == nil {
		r.joined, r.want = true, want
		close(r.join)
	}
	return r, err
}

// close ends a meeting: its key is not good for another one.
func (v *rendezvous) close(key string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	r := v.rooms[key]
	delete(v.rooms, key)
	delete(v.past, v.order[v.next])
	v.order[v.next] = key
	v.next = (v.next + 1) % len(v.order)
	v.past[key] = r != nil && r.joined
}

// joinRequest is what D says of itself: what it believes the prompt's blocks hold.
type joinRequest struct {
	blockSize int
	tokens    int
	want      []uint64
}

func (j *joinRequest) encode(w *wireWriter) {
	w.uint(uint64(j.blockSize))
	w.uint(uint64(j.tokens))
	w.words(j.want)
}

func (j *joinRequest) decode(r *wireReader) {
	j.blockSize, j.tokens, j.want = int(r.uint()), int(r.uint()), r.words()
}

func (s *sim) joinOf(p *prompt) joinRequest {
	j := joinRequest{blockSize: s.cfg.blockSize, tokens: p.n, want: make([]uint64, blocksFor(p.n, s.cfg.blockSize))}
	for i := range j.want {
		j.want[i] = p.content(i)
	}
	return j
}

// send is what P's transfer comes to: what D's blocks hold afterwards, and whether that is what D needs.
func (s *sim) send(p *prompt, want *joinRequest) (a pullAnswer) {
	mine := s.joinOf(p)
	switch {
	case want.blockSize != mine.blockSize:
		a.refused = fmt.Sprintf("block sizes differ: %d and %d", want.blockSize, mine.blockSize)
	case want.tokens != mine.tokens || !slices.Equal(want.want, mine.want):
		a.violation = violation{"other_prompt", fmt.Sprintf("the KV is of another prompt: %d tokens on the prefill engine, %d on the decode engine", mine.tokens, want.tokens)}
		a.actual = slices.Grow(mine.want, len(want.want))[:len(want.want)]
	}
	return a
}

// answerJoin serves D's connection: it waits for P's KV, as long as D does. false: the connection is of no more use.
func (s *sim) answerJoin(key string, want joinRequest, hungUp <-chan struct{}) (pullAnswer, bool) {
	r, err := s.rooms.meet(key, want)
	if v, ok := errors.AsType[*violation](err); ok {
		return pullAnswer{violation: *v}, true
	}
	select {
	case a := <-r.answer:
		return a, true
	case <-hungUp:
		close(r.gone)
		return pullAnswer{}, false
	}
}

// join is D's wait for its KV: at most the transfer timeout. It returns what the blocks hold, nil where that is what the
// prompt needs.
func (s *sim) join(ctx context.Context, addr, key string, p *prompt) ([]uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.transferTimeout)
	defer cancel()
	j := s.joinOf(p)
	w := newFrame()
	w.b = append(w.b, opJoin)
	w.string("")
	w.string(key)
	j.encode(&w)
	frame, err := s.peers.call(ctx, addr, w.sealFrame())
	if err != nil {
		if errors.Is(context.Cause(ctx), context.Canceled) {
			return nil, context.Canceled
		}
		if ctx.Err() == nil { // P has died: two heartbeats, 5 s apart of 300, go unanswered
			if err := sleep(ctx, s.cfg.transferTimeout/30); err != nil {
				return nil, err
			}
		}
		s.metrics.failedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %w", errLoadFailed, err)
	}
	r := wireReader{b: frame}
	var a pullAnswer
	if a.decode(&r); r.err != nil {
		return nil, fmt.Errorf("%w: %w", errLoadFailed, r.err)
	}
	if a.refused != "" {
		s.metrics.failedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %s", errLoadFailed, a.refused)
	}
	if a.violation.kind != "" && !s.cfg.faithful {
		return nil, &a.violation
	}
	s.metrics.transferred(len(j.want), s.cfg.blockSize, time.Millisecond)
	return a.actual, nil
}

// took books KV that came from another engine.
func (c *call) took(q *sequence, actual []uint64) {
	s := c.s
	q.external = q.p.n - q.local(s.cfg.blockSize)
	s.metrics.external.Add(int64(q.external))
	s.metrics.externalHits.Add(int64(q.external))
	s.pool.write(&q.grant, q.p, q.grant.hits, actual)
	if actual != nil {
		q.corrupt(c.req, q.grant.hits, actual[q.grant.hits:], s.cfg.maxModelLen)
	}
}
