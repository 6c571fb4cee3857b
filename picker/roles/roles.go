package roles

import (
	"fmt"
	"math"

	"tandem/kvstate"
	"tandem/picker"
)

// Every is the time between two decisions, in seconds. A decision changes the words of an eighth of the engines at
// most, so that the next one sees its effect.
const Every = 3.0

// Constants of the rule. Factors of two either way change little in replay (docs/decision.md).
const (
	fullShare = 0.85 // of an engine's time that prompts may take: with more of it they queue without end
	fullKV    = 0.8  // of an engine's KV memory that answers may take
	margin    = 0.9  // of the promised time per token
	drain     = 10.0 // s within which prompts that wait should be computed
	horizon   = 10.0 // s that a choice is priced for
	maxRho    = 0.97 // largest utilisation in the formula of a queue

	least = 0.05 // engines that either side needs at least
	// One more engine prefills when prompts need half of it, and one fewer when prompts need a tenth less than the rest
	// provides; in between nothing changes.
	more = 0.5
	less = 0.1
	// Among the numbers that suffice for both sides, another one must be cheaper by this share, and by this many
	// requests.
	cheaper      = 0.05
	fewer        = 0.02
	queueTooLong = 2.0 // s of prompts on an engine that keeps its word until they are computed
	usualAnswer  = 256 // tokens of an answer in a pool without observations

	// Engines serve whole requests while conversations that are expected back take more than this part of their
	// memory: at the first, two copies cannot fit. It is more than without roles ([picker.Policy], where engines
	// that serve both legs decide for each request), since with roles a change costs what waits and runs.
	wholeFrom, wholeUntil = 0.5, 0.42
	// ... and while few answers run at each, for prompts delay all of them there. Coding agents that fill the memory
	// have up to 4, chats 15 and more.
	wholeFew, wholeMany = 6, 10
)

// Engine is an endpoint, as far as its word depends on it.
type Engine struct {
	At       int          // position in the view
	Word     kvstate.Role // prefill, decode, or both while engines serve whole requests; 0: none yet
	Fixed    bool         // its word cannot change
	Usable   bool
	Answers  float64 // that run there
	KV       float64 // tokens of those
	Capacity float64 // tokens of its KV memory
	Queue    float64 // s of prompts that are computed or wait there
	Backlog  float64 // s of those that wait for another one
}

// Fleet is the state of a pool.
type Fleet struct {
	Engines  []Engine
	Model    *picker.Model
	Promise  picker.Targets
	Weight   float64 // of a second of answers ([picker.Policy])
	Pace     float64 // learned factor on decode steps
	Arriving float64 // s of prompt work per second
	Waiting  float64 // s of prompt work in the admission queue
	Mean     float64 // s of work of a prompt

	Live   float64 // tokens of conversations that are expected back ([kvstate.Utilisation])
	Memory float64 // tokens of KV that engines keep for those; 0: not known of all, or some have a fixed role
}

// Of returns the state of a view's endpoints. waiting is the work in the pool's admission queue in seconds. Endpoints
// of a fixed role have it as their word: what the rule wants then is advice.
func Of(v *kvstate.View, p *picker.Policy, waiting float64) Fleet {
	f := Fleet{Model: &p.Model, Promise: p.Promise, Weight: p.AnswerWeight, Pace: v.Load.Step, Waiting: waiting,
		Mean: v.Load.Work.Seconds()}
	if f.Pace <= 0 {
		f.Pace = 1
	}
	f.Live, f.Memory = v.Load.Live, memory(v)
	answer := v.Load.Answer
	if answer <= 0 {
		answer = usualAnswer
	}
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		role := c.Endpoint.Role & kvstate.RoleBoth
		if role == 0 {
			continue
		}
		e := Engine{
			At: i, Word: role, Fixed: true, Usable: c.Usable, Answers: float64(max(c.Requests-c.Jobs, 0)),
			Queue: c.Queue.Seconds(), Capacity: p.Model.KVTokens,
		}
		switch role {
		case kvstate.RoleBoth:
			e.Word, e.Fixed = c.Endpoint.Word(), false // c has none while all of the other word are out
		case kvstate.RolePrefill:
			e.Answers = 0
		}
		if c.KVTokens > 0 {
			e.Capacity = float64(c.KVTokens)
		}
		// the tokens are also those of prompts that wait there to be computed, and they may wait for long
		e.KV = float64(c.PromptTokens)*e.Answers/max(float64(c.Requests), 1) + e.Answers*answer/2
		if c.Jobs > 1 { // the first one is at work, and no other engine can take its place
			e.Backlog = e.Queue * float64(c.Jobs-1) / float64(c.Jobs)
		}
		f.Engines = append(f.Engines, e)
	}
	f.Arriving = v.Load.Prefill*float64(v.Load.Prefills) + v.Load.Local*float64(v.Load.Decodes)
	if v.Load.Prefills+v.Load.Decodes > len(v.Endpoints) { // without words all work counts on both sides
		f.Arriving = v.Load.Prefill * float64(v.Load.Prefills)
	}
	return f
}

// memory returns the tokens that endpoints keep, if each may serve either leg and reports it. Those that are out do not
// matter, nor do those that encode media.
func memory(v *kvstate.View) (sum float64) {
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if !c.Computes() {
			continue
		}
		if c.Endpoint.Role != kvstate.RoleBoth || c.Memory == nil {
			return 0
		}
		sum += c.Memory.Tokens
	}
	return sum
}

// Want is how many engines should compute prompts, and what it follows from.
type Want struct {
	Prefills, Decodes int
	Prompts           float64 // engines that prompts need to keep up, and to work off what waits
	Answers           float64 // engines that answers need to keep the promised time per token, and to fit into memory
	Why               Why
}

// Why is the reason for a number.
type Why uint8

// The reasons.
const (
	Cheapest      Why = iota // both sides have enough, and the number has the least price
	PromptsNeed              // prompts need at least this number
	AnswersNeed              // too few engines for both: answers get what they need, prompts the others
	TooFewEngines            // there is one engine, or none
	Conversations            // two copies of those that come back do not fit: whole engines serve
)

func (w Why) String() string {
	return [...]string{"least price", "prompts need it", "answers need the others", "too few engines",
		"two copies of the conversations that come back do not fit"}[w]
}

// sums are the fleet's load.
type sums struct {
	engines, prefills             float64 // usable ones
	answers, kv, capacity, queued float64
}

func (f *Fleet) sums() (s sums) {
	for i := range f.Engines {
		e := &f.Engines[i]
		if !e.Usable {
			continue
		}
		s.engines++
		s.answers, s.kv, s.capacity = s.answers+e.Answers, s.kv+e.KV, s.capacity+e.Capacity
		if e.Word == kvstate.RolePrefill {
			s.prefills++
			s.queued += e.Backlog
		}
	}
	s.queued += f.Waiting
	return s
}

// Want returns how many of the usable engines should compute prompts.
func (f *Fleet) Want() Want {
	s := f.sums()
	if s.engines < 2 {
		return Want{Prefills: int(s.prefills), Decodes: int(s.engines - s.prefills), Why: TooFewEngines}
	}
	w := Want{
		Prompts: max(f.Arriving/fullShare+s.queued/drain, least), Answers: max(f.forMemory(&s), f.forPace(&s), least),
	}
	p := 0.0
	if w.Prompts+w.Answers > s.engines { // otherwise unfetched KV would fill the engines that prefill
		p, w.Why = s.engines-w.Answers, AnswersNeed
		if math.Abs(p-s.prefills) < more+less {
			p = s.prefills
		}
	} else {
		p, w.Why = f.cheapest(&s, &w)
	}
	p = min(max(math.Round(p), 1), s.engines-1)
	w.Prefills, w.Decodes = int(p), int(s.engines-p)
	return w
}

// forMemory returns the engines in whose memory the answers fit.
func (f *Fleet) forMemory(s *sums) float64 { return s.kv / (fullKV * max(s.capacity/s.engines, 1)) }

// forPace returns the engines on which the steps of all answers keep the promise.
func (f *Fleet) forPace(s *sums) float64 {
	if f.Promise.TPOT <= 0 {
		return 0
	}
	left := margin*f.Promise.TPOT - f.Pace*f.Model.DecodeStep
	if left <= 0 { // no number of engines keeps it
		left = f.Pace * f.Model.DecodeStep
	}
	return f.Pace * (s.answers*f.Model.DecodeAnswer + s.kv*f.Model.DecodeToken) / left
}

// cheapest returns the number of engines for prompts with the least price, of those that both sides can live with.
func (f *Fleet) cheapest(s *sums, w *Want) (p float64, why Why) {
	from, up := math.Ceil(w.Prompts-less), math.Ceil(w.Prompts-more)
	switch {
	case up > s.prefills:
		from = up
	case from > s.prefills:
		from = s.prefills
	}
	from = min(max(from, 1), s.engines-1)
	to := max(min(math.Round(s.engines-w.Answers), s.engines-1), from)
	best := math.Inf(1)
	if s.prefills >= from && s.prefills <= to {
		p, best = s.prefills, f.price(s, s.prefills)*(1-cheaper)-fewer
	}
	for n := from; n <= to; n++ {
		if price := f.price(s, n); price < best {
			p, best = n, price
		}
	}
	if p == from && w.Prompts > 1 {
		why = PromptsNeed
	}
	return p, why
}

// price returns the cost of a second with a number of engines for prompts: the requests that wait for their first
// token, and the running answers, at the pool's weight.
func (f *Fleet) price(s *sums, prefills float64) float64 {
	// what waits, on average over the horizon, and what a queue with random arrivals holds (Sakasegawa 1977)
	drift := f.Arriving - prefills
	waiting := s.queued / 2
	if end := s.queued + drift*horizon; end >= 0 {
		waiting += end / 2
	} else {
		waiting *= s.queued / (-drift * horizon)
	}
	rho := min(f.Arriving/prefills, maxRho)
	waits := waiting/max(f.Mean, 1e-3) + math.Pow(rho, math.Sqrt(2*(prefills+1)))/(1-rho)
	// Answers come at the rate at which they are written now. On fewer engines steps are longer, so more of them run.
	each := f.Model.DecodeAnswer
	if s.answers > 0 {
		each += f.Model.DecodeToken * s.kv / s.answers
	}
	step := f.Pace * (f.Model.DecodeStep + each*s.answers/max(s.engines-s.prefills, 1))
	rate := s.answers / step
	busy := min(f.Pace*each*rate/(s.engines-prefills), maxFill)
	return waits + f.Weight*rate*f.Pace*f.Model.DecodeStep/(1-busy)
}

// maxFill bounds the part of a step that grows with the answers.
const maxFill = 0.9

// Change is a new word.
type Change struct {
	At   int // position in the view
	Word kvstate.Role
	Want Want
}

// Reason describes for operators why the assigned role changes.
func (c *Change) Reason() string {
	switch {
	case c.Want == (Want{}):
		return "it was new"
	case c.Want.Why == Conversations:
		return c.Want.Why.String()
	}
	return fmt.Sprintf("%v: prompts need %.1f engines, answers %.1f", c.Want.Why, c.Want.Prompts, c.Want.Answers)
}

// Changes returns the words that change now: of engines without a word all, of others one in eight of the usable
// engines, at most as many as are wanted. The engine with the fewest answers, which go on there, becomes one that
// prefills; the one with the fewest waiting prompts becomes one that decodes.
func (f *Fleet) Changes() (out []Change) {
	if f.whole() {
		return f.toWhole()
	}
	out = f.first()
	w := f.Want()
	s := f.sums()
	if w.Why == TooFewEngines {
		return out
	}
	now, limit := int(s.prefills), max(int(s.engines)/8, 1)
	for ; limit > 0 && now != w.Prefills; limit-- {
		word := kvstate.RolePrefill
		if w.Prefills < now {
			word = kvstate.RoleDecode
		}
		e := f.toChange(word)
		if e == nil {
			break
		}
		if e.Word = word; word == kvstate.RolePrefill {
			now++
		} else {
			now--
		}
		out = append(out, Change{At: e.At, Word: word, Want: w})
	}
	return out
}

// whole reports whether engines should serve whole requests.
func (f *Fleet) whole() bool {
	limit, most := wholeFrom, float64(wholeFew)
	for i := range f.Engines {
		if f.Engines[i].Word == kvstate.RoleBoth {
			limit, most = wholeUntil, wholeMany
		}
	}
	s := f.sums()
	return f.Memory > 0 && f.Live > limit*f.Memory && s.answers <= most*s.engines
}

// toWhole has all engines serve whole requests, at once: what they compute and write goes on.
func (f *Fleet) toWhole() (out []Change) {
	for i := range f.Engines {
		if e := &f.Engines[i]; e.Word != kvstate.RoleBoth {
			e.Word = kvstate.RoleBoth
			out = append(out, Change{At: e.At, Word: e.Word, Want: Want{Why: Conversations}})
		}
	}
	return out
}

// toChange returns the engine whose change to a word costs least; nil: none may change.
func (f *Fleet) toChange(word kvstate.Role) (best *Engine) {
	cost := func(e *Engine) float64 {
		if word == kvstate.RolePrefill {
			return e.Answers
		}
		return e.Queue - 1e-3*e.Answers
	}
	for i := range f.Engines {
		e := &f.Engines[i]
		full := word == kvstate.RoleDecode && e.Queue > queueTooLong
		if !e.Usable || e.Fixed || e.Word == word || e.Word == 0 || full {
			continue
		}
		if best == nil || cost(e) < cost(best) {
			best = e
		}
	}
	return best
}

// first gives a word to engines that have none, or serve whole requests: half of a new fleet prefills, and an engine
// that joins later gets the word of the smaller half.
func (f *Fleet) first() (out []Change) {
	prefills, decodes := 0, 0
	for i := range f.Engines {
		switch f.Engines[i].Word {
		case kvstate.RolePrefill:
			prefills++
		case kvstate.RoleDecode:
			decodes++
		}
	}
	for i := range f.Engines {
		e := &f.Engines[i]
		if e.Word == kvstate.RolePrefill || e.Word == kvstate.RoleDecode {
			continue
		}
		if prefills < decodes {
			e.Word = kvstate.RolePrefill
			prefills++
		} else {
			e.Word = kvstate.RoleDecode
			decodes++
		}
		out = append(out, Change{At: e.At, Word: e.Word})
	}
	return out
}
