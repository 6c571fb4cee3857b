package replay

import (
	"math"

	"tandem/kvstate"
	"tandem/replay/engine"
)

// planner is Dynamo's planner with SLA targets (ai-dynamo 1.6, components/planner: throughput scaling, load predictor
// "constant", a GPU budget of the whole fleet) over Dynamo's router. Every three minutes it takes the last ones' rate,
// lengths and hit share:
//
//	prefills = max(rate x prefill of what a prompt lacks, that time / promised time to the first token)
//	decodes  = rate x answer x step / batch, of the largest batch that keeps the promised time per token and fits
//
// both rounded up, and scaled to the engines there are. An engine that changes ends what it has, and starts again
// without a cache: its best case, a minute.
type planner struct {
	*peer
	words      []kvstate.Role // of each engine; 0: it drains or starts
	ttft, tpot float64
	since      interval
}

// interval is what came since the last plan: how many requests, tokens of prompts and of them to compute, of answers.
type interval struct{ requests, prompts, misses, out float64 }

const (
	planEvery   = 180.0
	engineStart = 60.0
)

func newPlanner(p *peer, c Config) *planner {
	a := &planner{peer: p, ttft: c.TTFT, tpot: c.TPOT}
	for i := range p.decodes {
		word := kvstate.RoleDecode
		if !p.both && i < len(p.prefills) || p.both && i < len(p.decodes)/2 {
			word = kvstate.RolePrefill
		}
		a.words = append(a.words, word)
	}
	p.choose = &planned{&dynamo{p}, a}
	if p.both {
		p.After(planEvery, a.plan)
	}
	return a
}

func (a *planner) arrive(j *job) {
	a.peer.arrive(j)
	a.since.requests++
	a.since.prompts += float64(j.Input)
	a.since.misses += float64(j.uncached)
	a.since.out += float64(j.Output)
}

// wanted returns the engines that should prefill.
func (a *planner) wanted() int {
	n, m := float64(len(a.words)), &a.model
	rate, input, output := a.since.requests/planEvery, a.since.prompts/a.since.requests, a.since.out/a.since.requests
	first := a.prefillTime(int(a.since.misses/a.since.requests), 0)
	prefills := math.Max(math.Ceil(rate*first), math.Ceil(first/a.ttft))
	kv := input + output/2
	batch := math.Floor((a.tpot - m.DecodeStep) / (m.DecodeAnswer + m.DecodeToken*kv))
	batch = max(min(batch, m.MaxAnswers, math.Floor(m.KVTokens/kv)), 1)
	decodes := math.Ceil(rate * output * stepTime(m, int(batch), int(batch*kv)) / batch)
	prefills = max(prefills, 1)
	share := n / (prefills + max(decodes, 1))
	if share < 1 {
		return int(min(max(math.Floor(prefills*share), 1), n-1))
	}
	return int(min(math.Ceil(prefills*share), n-1))
}

// plan decides on a ratio, unless engines are still on their way from the last one.
func (a *planner) plan() {
	a.After(planEvery, a.plan)
	now := 0
	for _, w := range a.words {
		if w == 0 {
			return
		}
		if w == kvstate.RolePrefill {
			now++
		}
	}
	if a.since.requests == 0 {
		return
	}
	more := a.wanted() - now
	for i := range a.words {
		switch {
		case more > 0 && a.words[i] == kvstate.RoleDecode:
			more--
			a.restart(i, kvstate.RolePrefill)
		case more < 0 && a.words[i] == kvstate.RolePrefill:
			more++
			a.restart(i, kvstate.RoleDecode)
		}
	}
	a.since = interval{}
}

// restart gives an engine another role when all that it has is done.
func (a *planner) restart(i int, word kvstate.Role) {
	a.words[i] = 0
	e := a.decodes[i]
	var drain func()
	drain = func() {
		if answers, prompts := e.Requests(); answers+prompts+e.Unfetched()+a.booked[i]+a.answers[i] > 0 {
			a.After(1, drain)
			return
		}
		a.After(engineStart, func() { engine.Forget(e); a.words[i] = word })
	}
	drain()
}

// planned is Dynamo's choice among the engines of a role.
type planned struct {
	*dynamo
	a *planner
}

func (p *planned) only(i int, word kvstate.Role, cost float64) float64 {
	if p.both && p.a.words[i] != word {
		return math.Inf(1)
	}
	return cost
}

func (p *planned) prefill(j *job) int {
	return p.argmin(len(p.prefills), func(i int) float64 {
		return p.only(i, kvstate.RolePrefill, float64(p.tokens[i]+j.Input-j.CachedTokens(p.hit(i, j))))
	})
}

func (p *planned) decode(j *job) int {
	return p.argmin(len(p.decodes), func(i int) float64 {
		return p.only(i, kvstate.RoleDecode, float64(p.kv[i]+j.Input))
	})
}
