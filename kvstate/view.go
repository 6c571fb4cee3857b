package kvstate

import "time"

// View is what a decision is made from: a copy of the numbers at one moment. Reusing one costs no allocation.
type View struct {
	Endpoints []Candidate // in the pool's order
	Grouped   bool        // endpoints of one group stand next to each other; so they do in all views of a State
	scratch   lookup
}

// Candidate is one endpoint as a decision sees it.
type Candidate struct {
	Endpoint     *Endpoint
	Usable       bool     // not left out for having failed
	Requests     int64    // booked, by all replicas
	PromptTokens int64    // of those
	Hit          int      // leading blocks of the prompt that it holds
	Session      Role     // what of the request's session it served last
	Signals      *Signals // what the engine itself said last; nil: nothing. Not to be changed
	Trust        float64  // how much that is worth by now: 1 fresh, 0 nothing
}

// View fills v with the pool's endpoints as they are now. hashes are the prompt's blocks, none if hits do not matter.
//
// Failure is a hint, not a verdict: where all endpoints of a role have failed, all of them are usable again, since one of
// them may well be back and refusing helps nobody. But for prefill endpoints that hang: to find out that one still does
// costs a time limit, and decode endpoints can do without; the next good probe takes it in.
func (s *State) View(p *Pool, hashes []uint64, v *View) {
	v.Endpoints, v.Grouped = v.Endpoints[:0], true
	var usable Role
	now := time.Now()
	for _, e := range p.endpoints {
		ok := !e.failed.Load()
		if ok {
			usable |= e.Role
		}
		signals := e.signals.Load()
		v.Endpoints = append(v.Endpoints, Candidate{
			Endpoint: e, Usable: ok,
			Requests:     e.requests.Load() + e.othersRequests.Load(),
			PromptTokens: e.tokens.Load() + e.othersTokens.Load(),
			Signals:      signals, Trust: signals.Trust(now),
		})
	}
	if usable != RoleBoth {
		for i := range v.Endpoints {
			if c := &v.Endpoints[i]; c.Endpoint.Role&^usable != 0 && (c.Endpoint.Role != RolePrefill || !c.Endpoint.hung.Load()) {
				c.Usable = true
			}
		}
	}
	if len(hashes) > 0 {
		p.index.hits(hashes, v, 1, 1, routedSlots)
	}
}

// Routed notes that an endpoint will hold the prompt's blocks: it was just sent the prompt. Bursts of requests with one
// prefix find it at once; should the engine not keep the blocks, the entry is forgotten with its generation.
func (s *State) Routed(p *Pool, e *Endpoint, hashes []uint64) {
	p.index.add(e.routed, hashes)
	if f := e.fresh.Load(); f != nil {
		p.index.add(f.m, hashes)
	}
	if s.peers != nil {
		s.peers.Routed(p, e, hashes)
	}
}

// MarkFailed leaves an endpoint out from now on; true if it was not already.
func (s *State) MarkFailed(e *Endpoint) bool { return s.markFailed(e, false) }

// MarkHung is MarkFailed for an endpoint that did not answer in time, rather than fail at once.
func (s *State) MarkHung(e *Endpoint) bool { return s.markFailed(e, true) }

func (s *State) markFailed(e *Endpoint, hung bool) bool {
	e.hung.Store(hung)
	marked := e.failed.CompareAndSwap(false, true)
	if marked {
		s.changed()
	}
	return marked
}

// MarkGood takes an endpoint in again; true if it was out.
func (s *State) MarkGood(e *Endpoint) bool {
	marked := e.failed.Load() && e.failed.CompareAndSwap(true, false)
	if marked {
		s.changed()
	}
	return marked
}
