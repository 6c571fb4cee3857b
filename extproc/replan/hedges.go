package replan

import (
	"context"
	"time"

	"tandem/extproc/attempts"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
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
type tries struct{ attempts attempts.Table[held] }

// held is the latest held try of a hop; nil: none is.
type held struct{ *try }

type try struct {
	failed chan struct{} // closed when Envoy reports that a try at the endpoint failed
	over   chan struct{} // closed when a later try of the hop is held instead
}

func newHeld() *held { return &held{} }

// enter starts to hold a try, and replaces an earlier one of the hop.
func (hs *tries) enter(id kvtransfer.ID) *try {
	t := &try{failed: make(chan struct{}), over: make(chan struct{})}
	hs.attempts.Enter(id, newHeld)
	hs.attempts.UpdateUsed(id, func(h *held) {
		if h.try != nil {
			close(h.over)
		}
		h.try = t
	})
	return t
}

func (hs *tries) leave(id kvtransfer.ID, t *try) {
	hs.attempts.UpdateUsed(id, func(h *held) {
		if h.try == t {
			h.try = nil
		}
	})
	hs.attempts.Leave(id)
}

// fail ends the wait of a hop's held try, because its try at the endpoint has failed.
func (hs *tries) fail(id kvtransfer.ID) {
	hs.attempts.UpdateUsed(id, func(h *held) {
		if h.try != nil {
			close(h.failed)
			h.try = nil
		}
	})
}

// awaitLoss holds a hedge until lost reports that the try at the endpoint is lost. It returns false if the hedge needs
// no answer any more: Envoy or the server has given it up.
func (hs *tries) awaitLoss(ctx context.Context, id kvtransfer.ID, draining <-chan struct{}, lost func() bool) bool {
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
