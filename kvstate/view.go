package kvstate

import (
	"slices"
	"time"
)

// View is what a decision is made from: a copy of the numbers at one moment. Reusing one costs no allocation.
type View struct {
	Endpoints []Candidate // in the pool's order
	Grouped   bool        // endpoints of one group stand next to each other; so they do in all views of a State
	Groups    []int32     // where each group of the pool ends; see GroupAt. Not to be changed
	Uniform   bool        // within a group only roles tell endpoints apart: no engine, layout or zone is known
	Load      Utilisation // of the pool

	Neighbours [][]int32 // of the pool's endpoints, as [View.Beside] has them; nil: there are none
	scratch    lookup
}

// Candidate is one endpoint as a decision sees it.
type Candidate struct {
	Endpoint     *Endpoint
	Usable       bool     // not left out for having failed, nor by an operator
	Weight       int      // how fast it is taken to be, in per cent; 0 is 100
	Requests     int64    // booked, by all replicas, and what came another way ([Signals.Elsewhere])
	PromptTokens int64    // of those
	Hit          int      // leading blocks of the prompt that it holds
	Session      Role     // what of the request's session it served last
	Signals      *Signals // what the engine itself said last; nil: nothing. Not to be changed
	Trust        float64  // how much that is worth by now: 1 fresh, 0 nothing
	KVTokens     int64    // that its KV cache holds, as the engine says; 0: it does not. Not a matter of trust: it stays as it is

	Jobs  int64         // of those requests, prefills that wait or are under way
	Queue time.Duration // work of those jobs that is not done yet
	Local time.Duration // work not done yet on prompts that an endpoint which decodes computes itself
	Share float64       // 0 to 1: of its time that such work lately took
	Speed float64       // learned: a factor on the cost model's prefill times, 1 as modelled; 0: not known

	Transfer float64 // learned: a factor on the cost model's times of KV transfers to it, 1 as modelled; 0: not known
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
	v.Grouped, v.Groups, v.Uniform, v.Neighbours = true, p.groups, p.uniform, p.neighbours
	v.Endpoints = slices.Grow(v.Endpoints[:0], len(p.endpoints))[:len(p.endpoints)]
	nano := now.UnixNano()
	fleet, moves := p.load.fleetSpeeds(nano)
	var usable Role
	prefills, decodes := 0, 0
	for i, e := range p.endpoints {
		c := &v.Endpoints[i]
		e.fill(c, nano, fleet, moves)
		if !c.Usable {
			continue
		}
		usable |= e.Role
		if e.Role&RolePrefill != 0 {
			prefills++
		}
		if e.Role&RoleDecode != 0 {
			decodes++
		}
	}
	v.Load = p.load.utilisation(prefills, decodes, now)
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

// Copy makes v a view of the same moment as another one.
func (v *View) Copy(of *View) {
	v.Endpoints = append(v.Endpoints[:0], of.Endpoints...)
	v.Grouped, v.Groups, v.Uniform, v.Load, v.Neighbours = of.Grouped, of.Groups, of.Uniform, of.Load, of.Neighbours
}

// GroupAt is where the group of the endpoint in a place begins and ends, in a view that is Grouped; in another, all are one.
func (v *View) GroupAt(place int) (from, to int) {
	if !v.Grouped {
		return 0, len(v.Endpoints)
	}
	if n := len(v.Groups); n > 0 && int(v.Groups[n-1]) == len(v.Endpoints) {
		i, _ := slices.BinarySearch(v.Groups, int32(place+1))
		if i > 0 {
			from = int(v.Groups[i-1])
		}
		return from, int(v.Groups[i])
	}
	group := v.Endpoints[place].Endpoint.Group // some of the pool's endpoints were taken out of the view
	for from = place; from > 0 && v.Endpoints[from-1].Endpoint.Group == group; {
		from--
	}
	for to = place + 1; to < len(v.Endpoints) && v.Endpoints[to].Endpoint.Group == group; {
		to++
	}
	return from, to
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

// fill makes c the endpoint as it is now. It writes field by field: to copy what was just written takes longer than that.
func (e *Endpoint) fill(c *Candidate, now int64, fleet, moves float64) {
	c.Endpoint, c.Hit, c.Session = e, 0, 0
	c.Usable = !e.failed.Load() && !e.Paused() && !e.Draining
	c.Weight = e.Weight()
	c.Requests, c.PromptTokens = e.requests.Load(), e.tokens.Load()
	c.Jobs, c.Queue = e.queue.n.Load(), e.queue.ahead(now)
	c.Speed, c.Transfer = e.speedWithin(fleet), e.transferWithin(moves, now)
	c.Local, c.Share = e.local.ahead(now)
	if others := e.others.Load(); others != nil {
		others.addTo(c, now)
	}
	c.Trust, c.KVTokens = 0, 0
	if c.Signals = e.signals.Load(); c.Signals != nil {
		c.Trust, c.KVTokens = c.Signals.Trust(time.Unix(0, now)), max(c.Signals.KVTokens, 0)
		c.Signals.addTo(c)
	}
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
