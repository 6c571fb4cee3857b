package kvstate

// View is what a decision is made from: a copy of the numbers at one moment. Reusing one costs no allocation.
type View struct {
	Endpoints []Candidate // in the pool's order
	Grouped   bool        // endpoints of one group stand next to each other; so they do in all views of a State
	scratch   lookup
}

// Candidate is one endpoint as a decision sees it.
type Candidate struct {
	Endpoint     *Endpoint
	Usable       bool  // not left out for having failed
	Requests     int64 // booked
	PromptTokens int64 // of those
	Hit          int   // leading blocks of the prompt that it holds
}

// View fills v with the pool's endpoints as they are now. hashes are the prompt's blocks, none if hits do not matter.
//
// Failure is a hint, not a verdict: where all endpoints of a role have failed, all of them are usable again, since one of
// them may well be back and refusing helps nobody. But for prefill endpoints that hang: to find out that one still does
// costs a time limit, and decode endpoints can do without; the next good probe takes it in. One that drains stays out: it
// is in the view because KV blocks that it holds may still have to be fetched.
func (s *State) View(p *Pool, hashes []uint64, v *View) {
	v.Endpoints, v.Grouped = v.Endpoints[:0], true
	var usable Role
	for _, e := range p.endpoints {
		ok := !e.failed.Load() && !e.Draining
		if ok {
			usable |= e.Role
		}
		v.Endpoints = append(v.Endpoints, Candidate{Endpoint: e, Usable: ok, Requests: e.requests.Load(), PromptTokens: e.tokens.Load()})
	}
	if usable != RoleBoth {
		for i := range v.Endpoints {
			if c := &v.Endpoints[i]; !c.Endpoint.Draining && c.Endpoint.Role&^usable != 0 && (c.Endpoint.Role != RolePrefill || !c.Endpoint.hung.Load()) {
				c.Usable = true
			}
		}
	}
	if len(hashes) > 0 {
		p.index.hits(hashes, v)
	}
}

// Routed notes that an endpoint will hold the prompt's blocks: it was just sent the prompt. Bursts of requests with one
// prefix find it at once; should the engine not keep the blocks, the entry is forgotten with its generation.
func (s *State) Routed(p *Pool, e *Endpoint, hashes []uint64) { p.index.add(e.slot, hashes) }

// MarkFailed leaves an endpoint out from now on; true if it was not already.
func (s *State) MarkFailed(e *Endpoint) bool {
	e.hung.Store(false)
	return e.failed.CompareAndSwap(false, true)
}

// MarkHung is MarkFailed for an endpoint that did not answer in time, rather than fail at once.
func (s *State) MarkHung(e *Endpoint) bool {
	e.hung.Store(true)
	return e.failed.CompareAndSwap(false, true)
}

// MarkGood takes an endpoint in again; true if it was out.
func (s *State) MarkGood(e *Endpoint) bool {
	return e.failed.Load() && e.failed.CompareAndSwap(true, false)
}
