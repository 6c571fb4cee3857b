package kvstate

import "time"

// View is what a decision is made from: a copy of the numbers at one moment. Reusing one costs no allocation.
type View struct {
	Endpoints []Candidate // in the pool's order
	Grouped   bool        // endpoints of one group stand next to each other; so they do in all views of a State
	Load      Utilisation // of the pool
	scratch   lookup
}

// Candidate is one endpoint as a decision sees it.
type Candidate struct {
	Endpoint     *Endpoint
	Usable       bool     // not left out for having failed, nor by an operator
	Weight       int      // how fast it is taken to be, in per cent; 0 is 100
	Requests     int64    // booked, by all replicas
	PromptTokens int64    // of those
	Hit          int      // leading blocks of the prompt that it holds
	Session      Role     // what of the request's session it served last
	Signals      *Signals // what the engine itself said last; nil: nothing. Not to be changed
	Trust        float64  // how much that is worth by now: 1 fresh, 0 nothing

	Jobs  int64         // of those requests, prefills that wait or are under way
	Queue time.Duration // work of those jobs that is not done yet
	Local time.Duration // work not done yet on prompts that an endpoint which decodes computes itself
	Share float64       // 0 to 1: of its time that such work lately took
	Speed float64       // learned: a factor on the cost model's prefill times, 1 as modelled; 0: not known
}

// View fills v with the pool's endpoints as they are now. hashes are the prompt's blocks, none if hits do not matter.
//
// Failure is a hint, not a verdict: where all endpoints of a role have failed, all of them are usable again, since one of
// them may well be back and refusing helps nobody. But for prefill endpoints that hang: to find out that one still does
// costs a time limit, and decode endpoints can do without; the next good probe takes it in. What an operator has paused
// stays out whatever happens, and so does one that drains: it is in the view because KV blocks that it holds may still have
// to be fetched.
func (s *State) View(p *Pool, hashes []uint64, v *View) {
	now := s.o.Now()
	v.Endpoints, v.Grouped = v.Endpoints[:0], true
	prefills, decodes := p.legs()
	v.Load = p.load.utilisation(prefills, decodes, now)
	nano := now.UnixNano()
	var usable Role
	for _, e := range p.endpoints {
		v.Endpoints = append(v.Endpoints, e.candidate(nano, v.Load.Speed))
		if v.Endpoints[len(v.Endpoints)-1].Usable {
			usable |= e.Role
		}
	}
	if usable != RoleBoth {
		for i := range v.Endpoints {
			if c := &v.Endpoints[i]; c.Endpoint.Role&^usable != 0 && !c.Endpoint.Paused() && !c.Endpoint.Draining && (c.Endpoint.Role != RolePrefill || !c.Endpoint.hung.Load()) {
				c.Usable = true
			}
		}
	}
	if len(hashes) > 0 {
		p.index.hits(hashes, v, 1, 1, routedSlots)
	}
}

// Hits fills in the hits of another prompt, into a view that stays as it is.
func (s *State) Hits(p *Pool, hashes []uint64, v *View) {
	for i := range v.Endpoints {
		v.Endpoints[i].Hit = 0
	}
	if len(hashes) > 0 {
		p.index.hits(hashes, v, 1, 1, routedSlots)
	}
}

// othersPerToken is how long a prompt token takes that another replica has booked on a prefill endpoint; replicas tell each
// other tokens, not times.
const othersPerToken = time.Second / 16000

// candidate is the endpoint as it is now.
func (e *Endpoint) candidate(now int64, fleet float64) Candidate {
	c := Candidate{
		Endpoint: e, Usable: !e.failed.Load() && !e.Paused() && !e.Draining, Weight: e.Weight(),
		Requests:     e.requests.Load() + e.othersRequests.Load(),
		PromptTokens: e.tokens.Load() + e.othersTokens.Load(),
		Jobs:         e.queue.n.Load(), Queue: e.queue.ahead(now), Speed: e.speedWithin(fleet),
	}
	c.Local, c.Share = e.local.ahead(now)
	if others := e.othersTokens.Load(); others > 0 && e.Role == RolePrefill {
		c.Queue += time.Duration(float64(others) * float64(othersPerToken) * fleet)
	}
	if c.Signals = e.signals.Load(); c.Signals != nil {
		c.Trust = c.Signals.Trust(time.Unix(0, now))
	}
	return c
}

// Prefills reports whether any endpoint of the view can prefill now.
func (v *View) Prefills() bool {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Usable && c.Endpoint.Role&RolePrefill != 0 {
			return true
		}
	}
	return false
}

// legs counts the endpoints that can serve either leg, without those that failed or are paused or draining.
func (p *Pool) legs() (prefills, decodes int) {
	for _, e := range p.endpoints {
		if e.failed.Load() || e.Paused() || e.Draining {
			continue
		}
		if e.Role&RolePrefill != 0 {
			prefills++
		}
		if e.Role&RoleDecode != 0 {
			decodes++
		}
	}
	return prefills, decodes
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
