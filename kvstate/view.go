package kvstate

import (
	"slices"
	"time"

	"tandem/kvstate/prefixindex"
	"tandem/kvstate/residency"
)

// View is the input of a decision: a copy of the numbers at one moment. Reusing a View allocates nothing.
type View struct {
	Endpoints []Candidate // in the pool's order
	Grouped   bool        // endpoints of one group are adjacent, as in all views of a State
	Groups    []int32     // end of each group of the pool; see GroupAt. Do not modify
	Uniform   bool        // endpoints of a group differ only in their roles: no engine, report or zone sets them apart
	Load      Utilisation // of the pool

	Uses []UseStep // popularity of the prompt's blocks among prefills; none if only this prompt has them

	SameNode [][]int32 // decode endpoints on the node of each prefill endpoint, for [View.DecodesOnNode]; nil: none
	lookup   prefixindex.Lookup
}

// Candidate is one endpoint as a decision sees it.
type Candidate struct {
	Endpoint     *Endpoint
	Usable       bool     // neither failed nor paused nor draining nor full
	Full         bool     // it would be usable, but refused a request and gets none for a while
	Stands       bool     // it would be usable, but its core stands still: it may go on
	Weight       int      // assumed speed, in per cent; 0 is 100
	Requests     int64    // reserved by all replicas, plus external ones ([Signals.External])
	PromptTokens int64    // of those
	Hit          int      // leading blocks of the prompt that it holds
	guess        int32    // Hit by what was routed to it, where the tokens of less are known ([Pool.DropGuesses])
	Loads        Loads    // those of Hit that it has to load into GPU memory first
	Session      Role     // the legs of the request's session that it served last
	Signals      *Signals // the engine's last report; nil: none. Do not modify
	Trust        float64  // weight of the signals now: 1 fresh, 0 too old
	// capacity of its KV cache, as reported; 0: not reported. It does not depend on Trust: it stays valid
	KVTokens int64
	Room     Room
	Memory   *residency.Memory // what its KV memory holds of conversations; nil: unknown. Do not modify
	Coming   float64           // tokens of conversations that will come there, and are not in Memory yet

	Jobs  int64         // of those requests, waiting and running prefills
	Queue time.Duration // unfinished work of those jobs
	Local time.Duration // unfinished work on prompts that a decode endpoint computes itself
	Share float64       // 0 to 1: share of its recent time that such work took

	Learned

	Faults *LoadFaults // failed KV loads with other endpoints; nil: none
	Report *Report     // what its engine says of the facts that pairs must share; nil: nothing. Do not modify
	Awaits bool        // its engine's report, and is not paired before

	// what the router uses it for now, of the legs that it may serve; 0: all of them ([Candidate.Used])
	Word Role
}

// Learned are the learned factors on the cost model's times of an engine. 1: as modelled; 0: unknown.
type Learned struct {
	Speed    float64 // of prefills
	Transfer float64 // of KV transfers to it
	Step     float64 // of decode steps
}

// Room is what hand-overs need of an engine's KV memory, in tokens.
type Room struct {
	Held int64 // by prompts that it computes or computed for others, until they have fetched them
	// of the largest request that it answers or will; 0 if it does not prefill. Pass 2 sends nothing to an endpoint
	// that prefills for now, so only what it answers counts there.
	Need int64
}

func (r *Room) add(other Room) { r.Held, r.Need = r.Held+other.Held, max(r.Need, other.Need) }

// View fills v with the pool's endpoints as they are now. hashes are the prompt's blocks; none if hits do not
// matter.
//
// If all endpoints of a role have failed, all of them count as usable, because one may have recovered and refusing
// helps nobody. Prefill endpoints that failed by a timeout are the exception: trying one costs a timeout, and
// decode endpoints can compute the prompt instead; a successful probe makes them usable again. Paused endpoints are
// never usable. Neither are draining ones, which are in the view because blocks that they hold may still have to be
// fetched.
func (s *State) View(p *Pool, hashes []uint64, v *View) {
	now := s.o.Now()
	v.Grouped, v.Groups, v.Uniform, v.SameNode = true, p.groups, p.uniform && !p.unlike.Load(), p.sameNode
	v.Endpoints = slices.Grow(v.Endpoints[:0], len(p.endpoints))[:len(p.endpoints)]
	nano := now.UnixNano()
	fleet, moves, steps := p.load.fleetSpeeds(nano)
	var usable Role
	prefills, decodes, both := 0, 0, 0
	for i, e := range p.endpoints {
		c := &v.Endpoints[i]
		e.fill(c, nano, fleet, moves, steps)
		v.Uniform = v.Uniform && !c.Awaits
		if c.Full {
			usable |= e.Role // it works: no reason to try those that failed
		}
		if !c.Usable {
			continue
		}
		usable |= e.Role
		count(c.Used(), &prefills, &decodes, &both)
	}
	if usable == RoleBoth && (prefills == 0 || decodes == 0) {
		// all endpoints with one of the roles have failed, so the others serve both
		prefills, decodes, both = v.dropWords()
	}
	v.Load = p.load.utilisation(prefills, decodes, both, now)
	p.forget(nano)
	v.Load.Densest, v.Load.Live = p.density.Most(), p.residents.Live()
	if usable != RoleBoth {
		for i := range v.Endpoints {
			c := &v.Endpoints[i]
			e := c.Endpoint
			hangs := e.Role == RolePrefill && Hung(e)
			if e.Role&^usable != 0 && !e.Paused() && !e.Draining && !hangs && !c.Full {
				c.Usable = true
			}
		}
	}
	p.guessHits(hashes, v, (*prefixindex.Owner).Routed)
	v.Uses = p.uses.Steps(v.Uses[:0], hashes, now)
}

// dropWords uses every endpoint for all that it may serve, and counts the usable ones of each role.
func (v *View) dropWords() (prefills, decodes, both int) {
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.Word = 0; c.Usable {
			count(c.Endpoint.Role, &prefills, &decodes, &both)
		}
	}
	return prefills, decodes, both
}

// count counts an endpoint that is used for these legs.
func count(used Role, prefills, decodes, both *int) {
	if used&RolePrefill != 0 {
		*prefills++
	}
	if used&RoleDecode != 0 {
		*decodes++
	}
	if used == RoleBoth {
		*both++
	}
}

// Copy copies another view.
func (v *View) Copy(of *View) {
	v.Endpoints = append(v.Endpoints[:0], of.Endpoints...)
	v.Grouped, v.Groups, v.Uniform, v.Load, v.SameNode = of.Grouped, of.Groups, of.Uniform, of.Load, of.SameNode
	v.Uses = append(v.Uses[:0], of.Uses...)
}

// Computes reports whether the endpoint can compute prompts or answers: it is usable, and not there to encode media.
func (c *Candidate) Computes() bool { return c.Usable && c.Endpoint.Role != RoleEncode }

// LeaveOut makes a candidate with a role unusable.
func (c *Candidate) LeaveOut(role Role) {
	if c.Endpoint.Role == role {
		c.Usable, c.Full = false, false
	}
}

// GroupAt returns the range of the group of the endpoint at a position in a Grouped view; otherwise all endpoints.
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
	group := v.Endpoints[place].Endpoint.Group // the view lacks some of the pool's endpoints
	for from = place; from > 0 && v.Endpoints[from-1].Endpoint.Group == group; {
		from--
	}
	for to = place + 1; to < len(v.Endpoints) && v.Endpoints[to].Endpoint.Group == group; {
		to++
	}
	return from, to
}

// Hits replaces the hits of the view by those of another prompt.
func (s *State) Hits(p *Pool, hashes []uint64, v *View) {
	for i := range v.Endpoints {
		v.Endpoints[i].SetHeld(HeldBlocks{})
	}
	p.guessHits(hashes, v, (*prefixindex.Owner).Routed)
	s.FindUses(p, hashes, v)
}

// fill sets c to the endpoint's current state. It writes field by field, which is faster than copying a struct that
// was just written.
func (e *Endpoint) fill(c *Candidate, now int64, fleet, moves, steps float64) {
	c.Endpoint, c.Hit, c.Loads, c.Session = e, 0, Loads{}, 0
	c.Usable = e.state.condition.failed.Load() == 0 && !e.Paused() && !e.Draining
	c.Stands = e.stands()
	if c.Full = c.Usable && e.state.condition.fullUntil.Load() > now; c.Full {
		c.Usable = false
	}
	c.Weight = e.Weight()
	c.Requests, c.PromptTokens = e.state.requests.Load(), e.state.tokens.Load()
	c.Room = Room{e.state.memory.room.Held(), e.state.memory.room.Need(e.Word() == RolePrefill)}
	c.Jobs, c.Queue = e.state.queue.n.Load(), e.state.queue.ahead(now)
	c.Speed, c.Transfer = e.state.speedWithin(fleet, now), e.state.transferWithin(moves, now)
	c.Step = e.state.stepWithin(steps, now)
	c.Local, c.Share = e.state.local.ahead(now)
	c.Faults, c.Word, c.Report, c.Awaits = e.state.loads.Load(), e.Word(), e.state.report.Load(), e.state.awaits(now)
	if others := e.state.remoteLoad.Load(); others != nil {
		others.addTo(c, now)
	}
	c.Trust, c.KVTokens, c.Memory, c.Coming = 0, 0, e.state.memory.holds.Memory(), 0
	if c.Signals = e.state.signals.Load(); c.Signals != nil {
		c.Trust, c.KVTokens = trust(time.Duration(now-c.Signals.oldest)), max(c.Signals.KVTokens, 0)
		c.Signals.addTo(c)
	}
}

// Prefills reports whether any endpoint of the view can prefill now for one of its group that can decode.
func (v *View) Prefills() bool {
	roles, group := Role(0), ""
	for i := range v.Endpoints { // sorted by group
		c := &v.Endpoints[i]
		if c.Endpoint.Group != group {
			roles, group = 0, c.Endpoint.Group
		}
		if c.Usable {
			roles |= c.Endpoint.Role
		}
		if roles&(RolePrefill|RoleDecode) == RolePrefill|RoleDecode {
			return true
		}
	}
	return false
}

// Routed records that an endpoint will hold the prompt's blocks, because the prompt was just sent to it. Bursts of
// requests with one prefix find it at once. If the engine does not keep the blocks, the entry expires.
func (s *State) Routed(p *Pool, e *Endpoint, hashes []uint64) {
	e.state.blocks.Add(hashes)
	e.state.blocks.AddFresh(hashes)
	e.state.hold(hashes, s.o.Now())
	if s.link.replicas != nil {
		s.link.replicas.Routed(p, e, hashes)
	}
}
