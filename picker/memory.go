package picker

import "tandem/kvstate"

// Memory has a price (docs/decision.md, Memory): what a placement discards is computed again when its conversation
// comes back, and conversations that come back while an engine computes a prompt wait for it.

// twoCopies is a share of the fleet's memory. If conversations that are expected back take more than that, engines that
// serve both legs serve whole requests: a pair keeps a second copy of each, and running requests need memory, too.
const twoCopies = 0.35

// whole reports whether engines that serve both legs should serve whole requests, because two copies of the
// conversations that are expected back do not fit into their memory. Engines that are out do not matter, nor do those
// that encode media.
func (t *terms) whole(v *kvstate.View) bool {
	all := 0.0
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if !c.Computes() {
			continue
		}
		if c.Memory == nil || !isBoth(c) || c.Used() != kvstate.RoleBoth {
			return false
		}
		all += c.Memory.Tokens
	}
	return v.Load.Live > twoCopies*all
}

// evicts returns the time to compute again what an endpoint discards to make room for a number of tokens, weighted with
// the chance that it is needed again.
func (t *terms) evicts(c *kvstate.Candidate, need float64) (seconds float64) {
	if c.Memory == nil || t.latencyOnly {
		return 0
	}
	over := need - c.Memory.Free
	for i := 0; i < len(c.Memory.Old) && over > 0; i++ {
		p := &c.Memory.Old[i]
		if p.Tokens <= 0 {
			break
		}
		n := min(p.Tokens, over)
		position := p.End - (p.End-p.Middle)*n/p.Tokens
		seconds += p.Back * n * (t.m.PrefillToken + t.m.PrefillContext*position)
		over -= n
	}
	return seconds * t.fleet
}

// discards returns the tokens that an endpoint discards to make room for so many, and the chance that they are asked
// for again, on average.
func discards(c *kvstate.Candidate, need float64) (tokens, back float64) {
	m := c.Memory
	if m == nil {
		return 0, 0
	}
	over := need - m.Free
	for i := 0; i < len(m.Old) && over > 0 && m.Old[i].Tokens > 0; i++ {
		n := min(m.Old[i].Tokens, over)
		tokens, back, over = tokens+n, back+n*m.Old[i].Back, over-n
	}
	return tokens, back / max(tokens, 1)
}

// returns is the time for which conversations wait that come back while an endpoint computes for so long: on average
// each waits half of it.
func (t *terms) returns(c *kvstate.Candidate, work float64) float64 {
	if c.Memory == nil || t.latencyOnly {
		return 0
	}
	return c.Memory.Returns * work * work / 2
}

// overcommitted is a share of the fleet's memory: if conversations that are expected back take more than that, cold
// prompts wait for room. roomy is the share of an engine's memory above which it has none, and largest the most that
// a prompt counts of it, or a small engine would have no room for a long one ever. What is admitted beyond that
// evicts what comes back, which is computed again and evicts more: a fleet that admits everything collapses, and stays
// so.
const (
	overcommitted = 0.5
	roomy         = 0.6
	largest       = 0.5
)

// noMemory reports whether a request should wait, because the conversations at the endpoint that would compute and
// answer it leave no room. One that finds most of its prompt at some endpoint never waits, nor does a pair: engines
// that only prefill admit few prompts at a time anyway.
func (k *Picker) noMemory(r *Request, v *kvstate.View, c *Choice) bool {
	if !k.Late || c.Prefill >= 0 || r.Blocks == 0 || float64(c.Uncached) <= k.Model.StepTokens {
		return false
	}
	e := &v.Endpoints[c.Decode]
	if e.Memory == nil ||
		e.Memory.Live+e.Coming+min(float64(r.PromptTokens), largest*e.Memory.Tokens) <= roomy*e.Memory.Tokens {
		return false
	}
	all, most := 0.0, 0
	for i := range v.Endpoints {
		if e := &v.Endpoints[i]; e.Usable && e.Memory != nil {
			all, most = all+e.Memory.Tokens, max(most, e.Hit)
		}
	}
	held := float64(r.PromptTokens) / float64(r.Blocks) * float64(most)
	cold := float64(r.PromptTokens)-held > k.Model.StepTokens && 2*held <= float64(r.PromptTokens)
	return cold && v.Load.Live > overcommitted*all
}
