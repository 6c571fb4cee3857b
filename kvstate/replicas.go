package kvstate

import (
	"time"

	"tandem/kvstate/prefixindex"
)

// Replicas connects a State to the other replicas (package redisstore).
type Replicas interface {
	Publisher
	Shared
}

// Publisher tells other replicas of changes. Its methods are called on the request path, so they copy their arguments
// and return at once.
type Publisher interface {
	// Changed reports that a reservation, the health or a signal of some endpoint has changed.
	Changed()
	// Routed publishes that a prompt with these blocks was sent to an endpoint.
	Routed(p *Pool, e *Endpoint, hashes []uint64)
	// Released publishes that a reservation of another replica has ended.
	Released(p *Pool, id ReservationID)
	// Learned publishes the tokens of a prompt. The callee owns l.
	Learned(p *Pool, l prefixindex.LearnedTokens)
	// SessionServed publishes which endpoints served a session; either may be nil.
	SessionServed(p *Pool, session uint64, prefill, decode *Endpoint)
	// KVLoaded publishes that a decode endpoint could not load the KV of a prefill endpoint, or can again.
	KVLoaded(p *Pool, prefill, decode string, failed bool)
	// Reachable reports whether others receive now what is published.
	Reachable() bool
}

// Shared is what all replicas have in common. Each method has its own deadline of a few milliseconds and reports if
// there was no answer.
type Shared interface {
	// Consume marks a ticket as consumed. first reports whether it was not consumed before; it is valid only if
	// known. patient means that no request waits for the answer.
	Consume(ticket [16]byte, patient bool) (first, known bool)
	// PutHandOver stores params for all replicas.
	PutHandOver(ref [16]byte, params []byte)
	// TakeHandOver returns and removes an entry that any replica stored.
	TakeHandOver(ref [16]byte) ([]byte, bool)
}

// link is the connection to the other replicas, which the parts of a state share.
type link struct {
	replicas Replicas // nil: none
}

func (l *link) changed() {
	if l.replicas != nil {
		l.replicas.Changed()
	}
}

// Connect connects the state to other replicas. Call it once, before the state is in use.
func (s *State) Connect(p Replicas) { s.link.replicas = p }

// HasReplicas reports whether there may be other replicas. Then [HandOvers.Consume], [HandOvers.TakeHandOver] and
// [HandOvers.PutHandOver] may wait for Redis.
func (s *State) HasReplicas() bool { return s.link.replicas != nil }

// Shares reports whether other replicas receive now what this one publishes.
func (s *State) Shares() bool { return s.link.replicas != nil && s.link.replicas.Reachable() }

// ApplyRouted applies [State.Routed] of another replica.
func (s *State) ApplyRouted(p *Pool, e *Endpoint, hashes []uint64) {
	p.routedElsewhere(e, hashes, s.o.Now())
	e.state.blocks.Add(hashes)
	if e.Role&RolePrefill != 0 {
		p.uses.Note(hashes, s.o.Now())
	}
}

// Booked is one replica's load on an endpoint, as published to the others.
type Booked struct {
	Requests, PromptTokens int64

	Jobs  int64         // of the requests, waiting and running prefills
	Work  time.Duration // of those jobs
	Lead  time.Duration // of that work, the part in the engine's current step
	Since time.Time     // when that step began; zero without jobs

	LocalUntil time.Time // when a decode endpoint will have computed the prompts that it computes itself; zero: none

	Room Room
}

// Booked returns this replica's load on the endpoint. Equal values mean equal reservations: nothing in it changes
// with time, except that LocalUntil passes.
func (e *Endpoint) Booked(now time.Time) Booked {
	b := Booked{Requests: e.state.requests.Load(), PromptTokens: e.state.tokens.Load()}
	b.Room = Room{e.state.memory.room.Held(), e.state.memory.room.Need(e.Word() == RolePrefill)}
	if b.Jobs = e.state.queue.n.Load(); b.Jobs > 0 {
		b.Work, b.Lead = time.Duration(e.state.queue.total.Load()), time.Duration(e.state.queue.lead.Load())
		b.Since = time.Unix(0, e.state.queue.since.Load())
	}
	if until := e.state.local.until.Load(); until > now.UnixNano() {
		b.LocalUntil = time.Unix(0, until)
	}
	return b
}

// RemoteLoad is the load of all other replicas on an endpoint at a moment.
type RemoteLoad struct {
	Requests, PromptTokens, Jobs int64

	Queue time.Duration // unfinished work of the jobs
	Lead  time.Duration // of that, the part in the engine's current step, which shrinks with time
	Local time.Duration // as in [Candidate]; it shrinks with time
	At    time.Time

	Room Room
}

// Add adds the load of one more replica, as of o.At.
func (o *RemoteLoad) Add(b *Booked) {
	o.Requests += b.Requests
	o.PromptTokens += b.PromptTokens
	o.Jobs += b.Jobs
	o.Room.add(b.Room)
	done := min(b.Lead, max(o.At.Sub(b.Since), 0))
	o.Queue += max(b.Work-done, 0)
	o.Lead += b.Lead - done
	if !b.LocalUntil.IsZero() {
		o.Local += max(b.LocalUntil.Sub(o.At), 0)
	}
}

// addTo adds the remote load to a candidate.
func (o *RemoteLoad) addTo(c *Candidate, now int64) {
	passed := max(time.Duration(now-o.At.UnixNano()), 0)
	c.Requests += o.Requests
	c.PromptTokens += o.PromptTokens
	c.Jobs += o.Jobs
	c.Room.add(o.Room)
	c.Queue += max(o.Queue-min(o.Lead, passed), 0)
	c.Local += max(o.Local-passed, 0)
}

// SetRemoteLoad sets the load of all other replicas on an endpoint.
func (e *Endpoint) SetRemoteLoad(o RemoteLoad) { e.state.remoteLoad.Store(&o) }

// RemoteLoad returns the load of other replicas on the endpoint.
func (e *Endpoint) RemoteLoad() RemoteLoad {
	if o := e.state.remoteLoad.Load(); o != nil {
		return *o
	}
	return RemoteLoad{}
}

// PrefillRates returns the prefill work that this replica reserves in the pool, in seconds of engine time per second:
// on prefill endpoints, and on decode endpoints that compute prompts themselves.
func (p *Pool) PrefillRates(now time.Time) (prefill, local float64) {
	p.load.mu.Lock()
	defer p.load.mu.Unlock()
	return p.load.rates(now)
}

// SetRemoteRates sets the [Pool.PrefillRates] of all other replicas. The value of a cached prefix depends on how
// busy the whole fleet is.
func (p *Pool) SetRemoteRates(prefill, local float64) {
	p.load.mu.Lock()
	defer p.load.mu.Unlock()
	p.load.remotePrefill, p.load.remoteLocal = prefill, local
}
