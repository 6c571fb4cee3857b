package kvstate

import (
	"time"

	"tandem/kvstate/prefixindex"
	"tandem/kvstate/residency"
)

// What engines' KV memory holds of conversations (package residency), for the price of what a placement discards. It is
// fed by what happens anyway: prompts that arrive, are routed and reserved, and reservations that end.

// usualAnswer is the length of an answer of which nothing is known, tokens.
const usualAnswer = 256.

// inSeconds returns a moment in the unit of package residency.
func inSeconds(t time.Time) float64 { return float64(t.UnixNano()) * 1e-9 }

// Arrived records that a prompt of so many tokens has arrived, and returns its conversation, for [Booking.Of]. name is
// what its client calls it, hashed with its tenant; 0: nothing. v has the prompt's hits, and says then what engines'
// memory holds beside this conversation. Call it once for each request.
func (s *State) Arrived(p *Pool, hashes []uint64, tokens int64, name uint64, v *View) *residency.Conversation {
	prompt := residency.Prompt{Blocks: hashes, Tokens: float64(tokens), Name: name}
	for i := range v.Endpoints {
		prompt.Held = max(prompt.Held, v.Endpoints[i].Hit)
	}
	c := p.residents.Arrive(&prompt, inSeconds(s.o.Now()))
	for i := range v.Endpoints {
		e := &v.Endpoints[i]
		e.Memory = e.Endpoint.state.memory.holds.Memory()
	}
	return c
}

// Conversation returns the conversation of a prompt that has arrived here or was routed by another replica; nil: none
// that is known.
func (p *Pool) Conversation(hashes []uint64) *residency.Conversation {
	if len(hashes) == 0 {
		return nil
	}
	return p.residents.Of(hashes[len(hashes)-1])
}

// hold records that an endpoint computes a prompt, or has fetched it.
func (l *endpointState) hold(hashes []uint64, now time.Time) {
	if len(hashes) > 0 && l.residents != nil {
		l.residents.Holds(hashes[len(hashes)-1], &l.memory.holds, inSeconds(now))
	}
}

// routedElsewhere records that another replica has sent a prompt to an endpoint. Only the prompt's blocks are known,
// and the end of its answer will not be reported.
func (p *Pool) routedElsewhere(e *Endpoint, hashes []uint64, now time.Time) {
	prompt := residency.Prompt{
		Blocks: hashes, Tokens: float64(len(hashes)) * textBlockBytes / p.ratio.bytesPerToken(),
	}
	p.residents.Elsewhere(&prompt, &e.state.memory.holds, e.Role&RoleDecode != 0, func() (most int) {
		var of prefixindex.Lookup
		for _, depth := range of.Find(p.index, hashes, len(p.endpoints), func(i int) []int32 {
			return p.endpoints[i].state.blocks.Routed()
		}) {
			most = max(most, int(depth))
		}
		return most
	}, inSeconds(now))
}

// answers records that an endpoint answers a reservation's request, and will have all of its conversation.
func (l *endpointState) answers(r *reservation) {
	if r.of != nil && !r.began.IsZero() {
		l.residents.Sent(r.of, &l.memory.holds, inSeconds(r.began))
	}
}

// Withdrawn records that a prompt that has arrived will go to no endpoint: its client has left, or it was refused.
func (s *State) Withdrawn(p *Pool, c *residency.Conversation) {
	if p != nil && c != nil {
		p.residents.Withdrawn(c, inSeconds(s.o.Now()))
	}
}

// answered records that the answer has ended, or, of a tentative reservation, that nothing will be answered unless
// another endpoint does it already.
func (l *endpointState) answered(r *reservation, now time.Time) {
	switch {
	case r.of == nil:
		return
	case r.began.IsZero():
		l.residents.Withdrawn(r.of, inSeconds(now))
		return
	}
	tokens := usualAnswer
	if l.load != nil {
		l.load.mu.Lock()
		if mean := l.load.answers.Value(); mean > 0 {
			tokens = mean
		}
		l.load.mu.Unlock()
	}
	l.residents.End(r.of, tokens, now.Sub(r.began).Seconds(), inSeconds(now))
}

// resizeMemory sets how much an endpoint keeps, as its engine reports.
func (l *endpointState) resizeMemory(g *Signals, now time.Time) {
	if l.residents == nil || g.KVTokens <= 0 {
		return
	}
	// engines copy what they compute to the host at once, so its memory repeats their own
	tokens := max(g.KVTokens, g.Host.capacity(l.load.learnedTokenBytes()))
	l.residents.Resize(&l.memory.holds, float64(tokens), inSeconds(now))
}

// SweepMemory learns how likely conversations are to return.
func (p *Pool) SweepMemory(now time.Time) {
	p.residents.Sweep(inSeconds(now), func(yield func(*residency.Engine) bool) {
		for _, e := range p.endpoints {
			if !yield(&e.state.memory.holds) {
				return
			}
		}
	})
}

// emptyMemory records that an engine has restarted.
func (l *endpointState) emptyMemory() {
	if l.residents != nil {
		l.residents.Empty(&l.memory.holds, false)
	}
}

// Computes records that an endpoint is about to compute the prompt of a conversation that has arrived, and returns what
// of it is computed again. v has the prompt's hits.
func (s *State) Computes(p *Pool, c *residency.Conversation, at *Endpoint, v *View) residency.Again {
	if c == nil {
		return residency.Again{}
	}
	blocks, most := 0, 0
	for i := range v.Endpoints {
		e := &v.Endpoints[i]
		if most = max(most, e.Hit); e.Endpoint == at {
			blocks = e.Hit
		}
	}
	return p.residents.Computes(c, blocks, most)
}

// Conversations is what a pool's conversations need of its engines' memory.
type Conversations struct {
	residency.Report
	Memory  float64 // tokens that engines keep in their memory or on the host, as far as they report it
	Engines int     // that say so
}

// Lacks returns the tokens of host memory that each engine would need to keep all conversations that come back; 0: they
// have enough. It is all of it, since host memory repeats what an engine has in its own.
func (c *Conversations) Lacks() float64 {
	if c.Engines == 0 || c.Needs <= c.Memory {
		return 0
	}
	return c.Needs / float64(c.Engines)
}

// Conversations returns what is known of the pool's conversations, at this replica.
func (p *Pool) Conversations() Conversations {
	out := Conversations{Report: p.residents.Report()}
	for _, e := range p.endpoints {
		if m := e.state.memory.holds.Memory(); m != nil {
			out.Memory += m.Tokens
			out.Engines++
		}
	}
	return out
}
