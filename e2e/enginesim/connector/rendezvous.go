package connector

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/handover"
)

// rendezvous is the meeting of the two legs of a request when both run at once: P offers a prompt's KV under a key, D
// joins under the same one, in either order, and P sends. It is on P's side; D reaches it through P's side channel.
// The key is the dialect's: SGLang's room, Mooncake's transfer id, the request id of NIXL push.
type rendezvous struct {
	Held atomic.Int64 // KV blocks of this engine that wait for the other leg

	mu    sync.Mutex
	rooms map[string]*room
	past  map[string]bool // keys that P has closed, and whether D had joined
	order []string        // ring of keys in past
	next  int
}

// room is one key's meeting.
type room struct {
	offered, joined bool
	offer           chan struct{} // closed when P is there
	join            chan struct{} // closed when D is there; then want holds
	want            *handover.Question
	answer          chan handover.Answer // of P, one
	gone            chan struct{}        // closed when D's connection is gone
}

const rememberedRooms = 16384

func newRendezvous() *rendezvous {
	return &rendezvous{rooms: make(map[string]*room), past: make(map[string]bool),
		order: make([]string, rememberedRooms)}
}

// at returns the room of a key, new if there is none. The lock is held.
func (v *rendezvous) at(key string, used bool) (*room, error) {
	if used {
		return nil, &engine.Violation{Kind: "key_reused",
			Message: "the room or transfer id " + key + " was used before"}
	}
	r := v.rooms[key]
	if r == nil {
		r = &room{offer: make(chan struct{}), join: make(chan struct{}), answer: make(chan handover.Answer, 1),
			gone: make(chan struct{})}
		v.rooms[key] = r
	}
	return r, nil
}

// enter returns P's side of a meeting.
func (v *rendezvous) enter(key string) (*room, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	_, used := v.past[key]
	r, err := v.at(key, used)
	if err == nil && r.offered {
		return nil, &engine.Violation{Kind: "key_reused",
			Message: "the room or transfer id " + key + " is in use on this prefill engine"}
	}
	if err == nil {
		r.offered = true
		close(r.offer)
	}
	return r, err
}

// meet is D's side. If P was cancelled before D came, as happens when their client leaves, this is the key's first D:
// it waits in vain.
func (v *rendezvous) meet(key string, want *handover.Question) (*room, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	r, err := v.at(key, v.past[key])
	if err == nil && r.joined {
		return nil, &engine.Violation{Kind: "key_reused",
			Message: "the room or transfer id " + key + " is in use by another decode"}
	}
	if err == nil {
		r.joined, r.want = true, want
		close(r.join)
	}
	return r, err
}

// expired reports whether P has closed a meeting to which D never came.
func (v *rendezvous) expired(key string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	joined, used := v.past[key]
	return used && !joined
}

// close ends a meeting: its key must not be used again.
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

// joinOf returns D's part in a meeting: the content that it expects in the prompt's blocks.
func (s *Node) joinOf(p *engine.Prompt) *handover.Question {
	j := &handover.Question{Op: handover.OpJoin, BlockSize: s.cfg.BlockSize, KVDtype: s.cfg.KVDtype,
		Revision: s.cfg.Revision, Tokens: p.N, Want: make([]uint64, engine.BlocksFor(p.N, s.cfg.BlockSize))}
	for i := range j.Want {
		j.Want[i] = p.Content(i)
	}
	return j
}

// send returns the result of P's transfer: the content of D's blocks, and whether it is the right one.
func (s *Node) send(p *engine.Prompt, want *handover.Question) (a handover.Answer) {
	own := s.joinOf(p)
	switch {
	case want.KVDtype != own.KVDtype && s.cfg.Connector != Mooncake,
		want.BlockSize != own.BlockSize && s.cfg.Connector == SGLang: // 0.5.23, disaggregation/common/conn.py:1320
		a.Refused = fmt.Sprintf("blocks of %d tokens of %s here, of %d of %s there", own.BlockSize, own.KVDtype,
			want.BlockSize, want.KVDtype)
	case want.BlockSize != own.BlockSize, want.KVDtype != own.KVDtype: // of Mooncake no code compares either
		a = handover.OtherBlocks(own.BlockSize, want)
	case s.otherWeights(want):
		a = otherWeights(want)
	case want.Tokens != own.Tokens || !slices.Equal(want.Want, own.Want):
		a.Violation = engine.Violation{Kind: "other_prompt",
			Message: fmt.Sprintf("the KV is of another prompt: %d tokens on the prefill engine, %d on the decode "+
				"engine", own.Tokens, want.Tokens)}
		a.Actual = slices.Grow(own.Want, len(want.Want))[:len(want.Want)]
	}
	return a
}

// answerJoin serves D's connection: it waits for P's KV, as long as D does. nil: D has left.
func (s *Node) answerJoin(key string, want *handover.Question, hungUp <-chan struct{}) *handover.Answer {
	if s.cfg.Connector == MoRIIORead && s.Rooms.expired(key) { // D goes on with what the blocks hold by now
		garbage := slices.Repeat([]uint64{1}, len(want.Want))
		return &handover.Answer{Actual: garbage, Violation: engine.Violation{Kind: "expired",
			Message: "the prefill engine has freed the blocks of " + key}}
	}
	r, err := s.Rooms.meet(key, want)
	if v, ok := errors.AsType[*engine.Violation](err); ok {
		return &handover.Answer{Violation: *v}
	}
	select {
	case a := <-r.answer:
		return &a
	case <-hungUp:
		close(r.gone)
		return nil
	}
}

// join waits for D's KV, for at most the transfer timeout. It returns the blocks' content, nil if it is the prompt's.
func (s *Node) join(ctx context.Context, addr, key string, p *engine.Prompt) ([]uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.TransferTimeout)
	defer cancel()
	j := s.joinOf(p)
	j.RequestID = key
	a, err := s.peers.Ask(ctx, addr, j)
	if err != nil {
		if errors.Is(context.Cause(ctx), context.Canceled) {
			return nil, context.Canceled
		}
		if ctx.Err() == nil { // P has died: two heartbeats, 5 s apart of 300, go unanswered
			if err := engine.Sleep(ctx, s.cfg.TransferTimeout/30); err != nil {
				return nil, err
			}
		}
		s.Metrics.FailedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %w", engine.ErrLoadFailed, err)
	}
	if a.Refused != "" {
		s.Metrics.FailedTransfers.Add(1)
		return nil, fmt.Errorf("%w: %s", engine.ErrLoadFailed, a.Refused)
	}
	if a.Violation.Kind != "" && !s.cfg.Faithful {
		return nil, &a.Violation
	}
	s.Metrics.Transferred(len(j.Want), s.cfg.BlockSize, time.Millisecond)
	return a.Actual, nil
}

// took records KV that came from another engine.
func (l *Leg) took(q *engine.Sequence, actual []uint64) {
	s := l.Node
	s.CountFetched(q, q.P.N-q.Local(s.cfg.BlockSize))
	s.Pool.Write(&q.Grant, q.P, q.Grant.Hits, actual)
	if actual != nil {
		q.Corrupt(l.Job.Sampling, q.Grant.Hits, actual[q.Grant.Hits:], s.cfg.MaxModelLen)
	}
}
