package extproc

import (
	"context"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// An answer that is not streamed sends nothing until it is complete, so no timeout can tell a slow decode endpoint
// from one that has stopped. Instead Envoy hedges: when decode has been silent for hedgeAfter, Envoy keeps that try
// and sends another to the replan port, and one more after each further hedgeAfter. The replan port holds the hedge
// until the first try is lost. Then it answers with a redirect, for which Envoy drops the first try. If decode
// answers first, Envoy drops the hedge.

const (
	hedgeAfter    = 10 * time.Second
	hedgeEarly    = time.Second            // Envoy's timers may fire early by this much when its threads get no CPU
	hedgeInterval = 250 * time.Millisecond // how often a held try checks the endpoint
	// lostAfter is how long an endpoint must be marked as failed before its requests are given up. A failed request
	// or a stalled engine marks it for less.
	lostAfter = 3 * time.Second
)

// hedges are the tries that the replan port holds, by their hop's ticket.
type hedges struct {
	mu   sync.Mutex
	held map[[16]byte]*hedge
}

// hedge is the latest held try of a hop.
type hedge struct {
	failed chan struct{} // closed when Envoy reports that a try at the endpoint failed
	over   chan struct{} // closed when a later try of the hop is held instead
}

// enter starts to hold a try, and replaces an earlier one of the hop.
func (hs *hedges) enter(id [16]byte) *hedge {
	h := &hedge{failed: make(chan struct{}), over: make(chan struct{})}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if earlier := hs.held[id]; earlier != nil {
		close(earlier.over)
	}
	hs.held[id] = h
	return h
}

func (hs *hedges) leave(id [16]byte, h *hedge) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.held[id] == h {
		delete(hs.held, id)
	}
}

// fail ends the wait of a hop's held try, because its try at the endpoint has failed.
func (hs *hedges) fail(id [16]byte) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.held[id]; h != nil {
		close(h.failed)
		delete(hs.held, id)
	}
}

// hedged reports whether a try at the replan port is a hedge: the try before it may still get its answer. Envoy
// sends the retry of a failed try sooner.
func hedged(t *kvtransfer.Ticket, took time.Duration) bool {
	return took >= hedgeAfter-hedgeEarly && (t.Stage == kvtransfer.DecodeLeg || t.Stage == kvtransfer.PairLegs)
}

// awaitLoss holds a hedge until the try at the endpoint is lost. It returns false if the hedge needs no answer any
// more.
func awaitLoss(ctx context.Context, s *Server, t *kvtransfer.Ticket) bool {
	h := s.hedges.enter(t.ID)
	defer s.hedges.leave(t.ID, h)
	look := time.NewTicker(hedgeInterval)
	defer look.Stop()
	for {
		if e := endpointOf(s.State, t.Pool, t.Decode); e != nil && s.State.FailedFor(e) >= lostAfter || overdue(s.since(t), answerLimit(s, t, e)) {
			return true
		}
		select {
		case <-h.failed:
			return true
		case <-h.over:
			return false
		case <-s.draining:
			return false
		case <-ctx.Done():
			return false
		case <-look.C:
		}
	}
}

// answerLimit returns how long the answer may take to begin; 0: no limit. e may be nil.
func answerLimit(s *Server, t *kvtransfer.Ticket, e *kvstate.Endpoint) time.Duration {
	pool := s.State.Pool(t.Pool)
	if t.Stage != kvtransfer.DecodeLeg || pool == nil {
		return 0
	}
	tokens := t.PromptTokens
	if e != nil && !t.Split { // it computes its prompts one after the other
		_, booked := e.Load()
		tokens = max(tokens, booked)
	}
	policy, _ := s.policy(t.Pool)
	return policy.AnswerStart(t.Stream, pool.PrefillTime(tokens, policy.PerToken))
}

// endpointOf returns an endpoint of a pool; nil: it is gone.
func endpointOf(state *kvstate.State, pool, addr string) *kvstate.Endpoint {
	if p := state.Pool(pool); p != nil {
		return p.Endpoint(addr)
	}
	return nil
}
