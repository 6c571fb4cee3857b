package replan

import (
	"context"
	"sync"
	"time"

	"tandem/extproc/journey"
)

// An answer that is not streamed sends nothing until it is complete, so no timeout can tell a slow decode endpoint
// from one that has stopped. Instead Envoy hedges: when decode has been silent for [HedgeAfter], Envoy keeps that try
// and sends another to the replan port, and one more after each further HedgeAfter. The replan port holds the hedge
// until the first try is lost. Then it answers with a redirect, for which Envoy drops the first try. If decode
// answers first, Envoy drops the hedge.

const (
	// HedgeAfter is how long decode is silent before Envoy hedges.
	HedgeAfter = journey.Silence
	early      = time.Second // how much sooner Envoy's timers may fire when its threads get no CPU

	interval = 250 * time.Millisecond // how often a held try checks the endpoint
)

// tries are the tries that are held, by their hop's ticket.
type tries struct {
	mu   sync.Mutex
	held map[[16]byte]*try
}

// newTries returns no tries.
func newTries() *tries { return &tries{held: map[[16]byte]*try{}} }

// try is the latest held try of a hop.
type try struct {
	failed chan struct{} // closed when Envoy reports that a try at the endpoint failed
	over   chan struct{} // closed when a later try of the hop is held instead
}

// enter starts to hold a try, and replaces an earlier one of the hop.
func (hs *tries) enter(id [16]byte) *try {
	h := &try{failed: make(chan struct{}), over: make(chan struct{})}
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if earlier := hs.held[id]; earlier != nil {
		close(earlier.over)
	}
	hs.held[id] = h
	return h
}

func (hs *tries) leave(id [16]byte, h *try) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.held[id] == h {
		delete(hs.held, id)
	}
}

// fail ends the wait of a hop's held try, because its try at the endpoint has failed.
func (hs *tries) fail(id [16]byte) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if h := hs.held[id]; h != nil {
		close(h.failed)
		delete(hs.held, id)
	}
}

// awaitLoss holds a hedge until lost says that the try at the endpoint is. It returns false if the hedge needs no
// answer any more: Envoy or the server has given it up.
func (hs *tries) awaitLoss(ctx context.Context, id [16]byte, draining <-chan struct{}, lost func() bool) bool {
	h := hs.enter(id)
	defer hs.leave(id, h)
	look := time.NewTicker(interval)
	defer look.Stop()
	for !lost() {
		select {
		case <-h.failed:
			return true
		case <-h.over:
			return false
		case <-draining:
			return false
		case <-ctx.Done():
			return false
		case <-look.C:
		}
	}
	return true
}
