package kvstate

import (
	"slices"
	"time"

	"tandem/kvstate/prefixindex"
)

// View is what a decision is made from: a copy of the numbers at one moment. Reusing one costs no allocation.
type View struct {
	Endpoints []Candidate // in the pool's order
	Grouped   bool        // endpoints of one group stand next to each other; so they do in all views of a State
	Groups    []int32     // where each group of the pool ends; see GroupAt. Not to be changed
	Uniform   bool        // within a group only roles tell endpoints apart: no engine, layout or zone is known
	Load      Utilisation // of the pool

	Uses []UseStep // how popular the prompt's blocks are among prefills; none if only this prompt has them

	Neighbours [][]int32 // of the pool's endpoints, as [View.Beside] has them; nil: there are none
	lookup     prefixindex.Lookup
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
	Step     float64 // learned: a factor on the cost model's times of decode steps, 1 as modelled; 0: not known

	Faults *LoadFaults // of its KV loads with other endpoints; nil: none
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
	fleet, moves, steps := p.load.fleetSpeeds(nano)
	var usable Role
	prefills, decodes := 0, 0
	for i, e := range p.endpoints {
		c := &v.Endpoints[i]
		e.fill(c, nano, fleet, moves, steps)
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
	v.Uses = v.Uses[:0]
	if len(hashes) > 0 {
		p.noteHits(hashes, v, 1, 1, (*prefixindex.Owner).Routed)
		s.FindUses(p, hashes, v)
	}
}

// Copy makes v a view of the same moment as another one.
func (v *View) Copy(of *View) {
	v.Endpoints = append(v.Endpoints[:0], of.Endpoints...)
	v.Grouped, v.Groups, v.Uniform, v.Load, v.Neighbours = of.Grouped, of.Groups, of.Uniform, of.Load, of.Neighbours
	v.Uses = append(v.Uses[:0], of.Uses...)
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
	v.Uses = v.Uses[:0]
	if len(hashes) > 0 {
		p.noteHits(hashes, v, 1, 1, (*prefixindex.Owner).Routed)
		s.FindUses(p, hashes, v)
	}
}

// fill makes c the endpoint as it is now. It writes field by field: to copy what was just written takes longer than that.
func (e *Endpoint) fill(c *Candidate, now int64, fleet, moves, steps float64) {
	c.Endpoint, c.Hit, c.Session = e, 0, 0
	c.Usable = e.failed.Load() == 0 && !e.Paused() && !e.Draining
	c.Weight = e.Weight()
	c.Requests, c.PromptTokens = e.requests.Load(), e.tokens.Load()
	c.Jobs, c.Queue = e.queue.n.Load(), e.queue.ahead(now)
	c.Speed, c.Transfer, c.Step = e.speedWithin(fleet, now), e.transferWithin(moves, now), e.stepWithin(steps, now)
	c.Local, c.Share = e.local.ahead(now)
	c.Faults = e.loads.Load()
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
	e.blocks.Add(hashes)
	e.blocks.AddFresh(hashes)
	if s.peers != nil {
		s.peers.Routed(p, e, hashes)
	}
}

// HealthCause is how a change of an endpoint's health was noticed.
type HealthCause string

// The causes.
const (
	CauseRequest   HealthCause = "request"    // a request failed there
	CauseTimeLimit HealthCause = "time_limit" // it did not answer a request in time
	CauseCheck     HealthCause = "check"      // it did not answer a health check, or answers one again
	CauseAnswer    HealthCause = "answer"     // it answered a request
	CauseReplica   HealthCause = "replica"    // another replica noticed
)

// MarkFailed leaves an endpoint out from now on; true if it was not already.
func (s *State) MarkFailed(e *Endpoint) bool { return s.markFailed(e, false, CauseRequest) }

// MarkHung is MarkFailed for an endpoint that did not answer in time, rather than fail at once.
func (s *State) MarkHung(e *Endpoint) bool { return s.markFailed(e, true, CauseTimeLimit) }

// MarkUnhealthy is MarkFailed for an endpoint that failed a health check.
func (s *State) MarkUnhealthy(e *Endpoint) bool { return s.markFailed(e, false, CauseCheck) }

// MarkUnresponsive is MarkUnhealthy for an endpoint that left its health checks unanswered.
func (s *State) MarkUnresponsive(e *Endpoint) bool { return s.markFailed(e, true, CauseCheck) }

// FailedFor is for how long an endpoint has been left out.
func (s *State) FailedFor(e *Endpoint) time.Duration {
	since := e.failed.Load()
	if since == 0 {
		return 0
	}
	return s.o.Now().Sub(time.Unix(0, since))
}

// setFailed leaves an endpoint out or takes it in; false if it was so before.
func (s *State) setFailed(e *Endpoint, failed bool) bool {
	since := e.failed.Load()
	if failed {
		return since == 0 && e.failed.CompareAndSwap(0, s.o.Now().UnixNano())
	}
	return since != 0 && e.failed.CompareAndSwap(since, 0)
}

func (s *State) markFailed(e *Endpoint, hung bool, cause HealthCause) bool {
	e.hung.Store(hung)
	marked := s.setFailed(e, true)
	if marked {
		s.changed()
		s.healthChanged(e, false, cause)
	}
	return marked
}

func (s *State) healthChanged(e *Endpoint, good bool, cause HealthCause) {
	if s.o.HealthChanged != nil {
		s.o.HealthChanged(e, good, cause)
	}
}

// MarkGood takes an endpoint in again that answered a request; true if it was out.
func (s *State) MarkGood(e *Endpoint) bool { return s.markGood(e, CauseAnswer) }

// MarkHealthy is MarkGood for an endpoint that answered a health check.
func (s *State) MarkHealthy(e *Endpoint) bool { return s.markGood(e, CauseCheck) }

func (s *State) markGood(e *Endpoint, cause HealthCause) bool {
	marked := s.setFailed(e, false)
	if marked {
		s.forgetLoads(e)
		s.changed()
		s.healthChanged(e, true, cause)
	}
	return marked
}
