package kvstate

import (
	"time"

	"tandem/kvstate/prefixindex"
)

// Peers are the other replicas, as a State reaches them (package redisstore). Its first half is told what others should
// know; these calls come from the request path, so they copy what they need and return. Its second half asks what only all
// replicas together can answer; each of these has a deadline of its own, of milliseconds, and says when it has no answer.
type Peers interface {
	// Changed says that a booking, a failure or a signal of some endpoint is not what it was.
	Changed()
	// Routed says that an endpoint was sent a prompt with these blocks.
	Routed(p *Pool, e *Endpoint, hashes []uint64)
	// Released says that a reservation that another replica made is over.
	Released(p *Pool, id ReservationID)
	// Learned says what the tokens of a prompt are. l is the callee's.
	Learned(p *Pool, l prefixindex.LearnedTokens)
	// Stuck says where a session was served; either may be nil.
	Stuck(p *Pool, session uint64, prefill, decode *Endpoint)

	// Spend notes that a ticket is used. first is whether nobody had; it means nothing unless known. patient is whether no request waits
	// for the answer.
	Spend(ticket [16]byte, patient bool) (first, known bool)
	// PutHandOver keeps params where every replica finds them.
	PutHandOver(ref [16]byte, params []byte)
	// TakeHandOver returns what a replica has put there.
	TakeHandOver(ref [16]byte) ([]byte, bool)
	// KeepTurn keeps what a conversation's last turn left, for ttl, in place of what was kept before.
	KeepTurn(conversation [16]byte, turn []byte, ttl time.Duration)
	// TakeTurn returns what is kept of a conversation, to one replica, once.
	TakeTurn(conversation [16]byte) ([]byte, bool)
}

// Share connects the state with other replicas. To be called once, before the state is in use.
func (s *State) Share(p Peers) { s.peers = p }

func (s *State) changed() {
	if s.peers != nil {
		s.peers.Changed()
	}
}

// ReleaseWherever ends a reservation that any replica may have made: whoever has made it is told that it is over. (It would
// learn that from Envoy's log too, but as much as a second later.)
func (s *State) ReleaseWherever(p *Pool, id ReservationID) {
	if id != 0 && !s.Release(id) && s.peers != nil {
		s.peers.Released(p, id)
	}
}

// Shared reports whether there are other replicas, so that [State.Spend], [State.TakeHandOver] and [State.PutHandOver] may wait for Redis.
func (s *State) Shared() bool { return s.peers != nil }

// ApplyRouted is [State.Routed] by another replica.
func (s *State) ApplyRouted(p *Pool, e *Endpoint, hashes []uint64) {
	e.blocks.Add(hashes)
	if e.Role&RolePrefill != 0 {
		p.uses.Note(hashes, s.o.Now())
	}
}

// ApplyFailed is [State.MarkFailed] or [State.MarkGood] by another replica.
func (s *State) ApplyFailed(e *Endpoint, failed bool) {
	if s.setFailed(e, failed) {
		s.healthChanged(e, !failed, CauseReplica)
	}
}

// Booked is what a replica has booked on an endpoint, as far as others need it to decide as it does.
type Booked struct {
	Requests, PromptTokens int64

	Jobs  int64         // of the requests, prefills that wait or are under way
	Work  time.Duration // of those jobs
	Lead  time.Duration // of that work, what the engine is at work on
	Since time.Time     // and since when; zero where there are no jobs

	LocalUntil time.Time // when the endpoint, which decodes, will be done with the prompts that it computes itself; zero: it has none
}

// Booked is what this replica has booked on the endpoint. Two that are equal were booked alike: nothing in it passes with time
// but that LocalUntil ends.
func (e *Endpoint) Booked(now time.Time) Booked {
	b := Booked{Requests: e.requests.Load(), PromptTokens: e.tokens.Load()}
	if b.Jobs = e.queue.n.Load(); b.Jobs > 0 {
		b.Work, b.Lead = time.Duration(e.queue.total.Load()), time.Duration(e.queue.lead.Load())
		b.Since = time.Unix(0, e.queue.since.Load())
	}
	if until := e.local.until.Load(); until > now.UnixNano() {
		b.LocalUntil = time.Unix(0, until)
	}
	return b
}

// Others is what all other replicas have booked on an endpoint, as it was at a moment.
type Others struct {
	Requests, PromptTokens, Jobs int64

	Queue time.Duration // work of the jobs that is not done yet
	Lead  time.Duration // of that, what the engine is at work on, so that it gets less with time
	Local time.Duration // as [Candidate] has it; it gets less with time too
	At    time.Time
}

// Add counts what one more replica has booked, as it is at o.At.
func (o *Others) Add(b *Booked) {
	o.Requests += b.Requests
	o.PromptTokens += b.PromptTokens
	o.Jobs += b.Jobs
	done := min(b.Lead, max(o.At.Sub(b.Since), 0))
	o.Queue += max(b.Work-done, 0)
	o.Lead += b.Lead - done
	if !b.LocalUntil.IsZero() {
		o.Local += max(b.LocalUntil.Sub(o.At), 0)
	}
}

// addTo counts what others have booked into a candidate.
func (o *Others) addTo(c *Candidate, now int64) {
	passed := max(time.Duration(now-o.At.UnixNano()), 0)
	c.Requests += o.Requests
	c.PromptTokens += o.PromptTokens
	c.Jobs += o.Jobs
	c.Queue += max(o.Queue-min(o.Lead, passed), 0)
	c.Local += max(o.Local-passed, 0)
}

// SetOthers says what all other replicas have booked on an endpoint.
func (e *Endpoint) SetOthers(o Others) { e.others.Store(&o) }

// Others is what other replicas have booked on the endpoint.
func (e *Endpoint) Others() Others {
	if o := e.others.Load(); o != nil {
		return *o
	}
	return Others{}
}

// PrefillRates is how much prefill this replica books in the pool, in seconds of engine time a second: on endpoints that
// prefill, and on endpoints that decode, for prompts that they compute themselves.
func (p *Pool) PrefillRates(now time.Time) (prefill, local float64) {
	p.load.mu.Lock()
	defer p.load.mu.Unlock()
	return p.load.rates(now)
}

// SetOthersRates says what all other replicas book, as [Pool.PrefillRates] has it: how busy a fleet is depends on all of
// them, and with it how much a prefix that is held is worth.
func (p *Pool) SetOthersRates(prefill, local float64) {
	p.load.mu.Lock()
	defer p.load.mu.Unlock()
	p.load.othersPrefill, p.load.othersLocal = prefill, local
}
