package replay

import (
	"cmp"
	"math"
	"slices"

	"tandem/replay/engine"
)

// Rules that know which requests one program makes, an agent with its tools. Their engines serve both legs of every
// request. They are told when a program has ended, which only some clients say.

// program is what a router knows of an agent's program.
type program struct {
	began   float64 // arrival of its first request
	at      int     // its engine; -1: none
	tokens  int     // of its context
	running int     // its requests at the engine; without any it uses a tool
	served  float64 // for how long engines served it, s
	ended   float64 // when its last answer ended
	last    bool    // it makes no other request
	paused  bool
	marked  bool // it is paused when its answer ends
	waiting []*job
	kept    []uint64 // blocks that its engine keeps while a tool runs
}

// programs routes by program.
type programs struct {
	*peer
	of  map[uint64]*program
	all []*program // in order of arrival
}

// program returns the program of a request; one of an unknown program has its own.
func (p *programs) program(j *job) *program {
	id := cmp.Or(j.asked.Program, 1<<63|j.ID)
	g := p.of[id]
	if g == nil {
		g = &program{began: p.Now, at: -1}
		p.of[id], p.all = g, append(p.all, g)
	}
	return g
}

// send lets a program's engine serve both legs of a request.
func (p *programs) send(g *program, j *job) {
	g.running++
	j.arrived = p.Now
	whole(p.peer, j, g.at)
}

func (p *programs) done(j *job) {
	p.peer.done(j)
	g := p.program(j)
	g.running--
	g.served, g.ended, g.tokens = g.served+p.Now-j.arrived, p.Now, max(g.tokens, j.Input+j.Output)
	if g.last = g.last || j.asked.Last || j.asked.Program == 0; g.last && g.running == 0 && len(g.waiting) == 0 {
		p.all = slices.DeleteFunc(p.all, func(o *program) bool { return o == g })
	}
}

// emptiest returns the engine with the fewest tokens of KV.
func (p *programs) emptiest() int {
	return p.argmin(len(p.decodes), func(i int) float64 { return float64(p.kv[i]) })
}

// thunderAgent is ThunderAgent (arXiv 2602.13692) with the constants of Dynamo's port (components/thunderagent_router,
// August 2026). Every 5 s, on an engine whose programs have more than .95 of its memory, those that use a tool are
// paused, the smallest first, until .8 is left; if they do not suffice, the others are when their answers end. Programs
// go on, those with a request first, the smaller ones first, where they leave the engine below .85. A new program waits
// behind those that are paused, and for an engine with room. Requests without a program go where Dynamo's router wants.
type thunderAgent struct{ programs }

const (
	thunderEvery  = 5.0
	thunderFull   = .95
	thunderPaused = .80
	thunderResume = .85
	thunderForced = 1800.0 // s after which a program goes on in any case
)

func (t *thunderAgent) arrive(j *job) {
	ready(t.peer)
	if j.asked.Program == 0 { // Dynamo's own router
		whole(t.peer, j, dynamoWhole(t.peer, j))
		return
	}
	g := t.program(j)
	fresh := g.tokens == 0
	g.tokens = max(g.tokens, j.Input)
	if !g.paused && g.at < 0 {
		used := t.used()
		fits := func(i int) bool { return used[i]+float64(g.tokens) <= t.model.KVTokens }
		g.at = t.argmin(len(used), func(i int) float64 {
			if !fits(i) {
				return math.Inf(1)
			}
			return float64(t.kv[i])
		})
		if !fits(g.at) || fresh && slices.ContainsFunc(t.all, func(o *program) bool { return o.paused }) {
			g.paused, g.at = true, -1
		}
	}
	if j.arrived = t.Now; g.paused {
		g.waiting = append(g.waiting, j)
		return
	}
	t.send(g, j)
}

// used returns the tokens of the programs that each engine has.
func (t *thunderAgent) used() []float64 {
	used := make([]float64, len(t.decodes))
	for _, g := range t.all {
		if g.at >= 0 {
			used[g.at] += float64(g.tokens)
		}
	}
	return used
}

// watch pauses programs, and lets them go on.
func (t *thunderAgent) watch() {
	t.After(thunderEvery, t.watch)
	ready(t.peer)
	used := t.used()
	t.resume(used)
	bySize := slices.SortedStableFunc(slices.Values(t.all), func(a, b *program) int {
		return cmp.Compare(a.tokens, b.tokens)
	})
	for i := range used {
		if used[i] <= thunderFull*t.model.KVTokens {
			continue
		}
		for _, g := range bySize {
			if g.at == i && g.running == 0 && used[i] > thunderPaused*t.model.KVTokens {
				used[i] -= float64(g.tokens)
				g.paused, g.at = true, -1
			}
		}
		for _, g := range bySize {
			g.marked = g.marked || g.at == i && g.running > 0 && used[i] > thunderPaused*t.model.KVTokens
		}
	}
}

func (t *thunderAgent) resume(used []float64) {
	paused := slices.Collect(func(yield func(*program) bool) {
		for _, g := range t.all {
			if g.paused && !yield(g) {
				return
			}
		}
	})
	slices.SortStableFunc(paused, func(a, b *program) int {
		return cmp.Or(cmp.Compare(min(len(b.waiting), 1), min(len(a.waiting), 1)), cmp.Compare(a.tokens, b.tokens))
	})
	for _, g := range paused {
		at := t.argmin(len(used), func(i int) float64 { return used[i] })
		forced := len(g.waiting) > 0 && t.Now-g.waiting[0].arrived > thunderForced
		if used[at]+float64(g.tokens) > thunderResume*t.model.KVTokens && !forced {
			continue
		}
		used[at] += float64(g.tokens)
		g.paused, g.at = false, at
		for _, j := range g.waiting {
			t.send(g, j)
		}
		g.waiting = nil
	}
}

func (t *thunderAgent) done(j *job) {
	if j.asked.Program == 0 {
		t.peer.done(j)
		return
	}
	t.programs.done(j)
	if g := t.program(j); g.marked && g.running == 0 && !g.last {
		g.marked, g.paused, g.at = false, true, -1
	}
}

// inOrder is a router that holds requests back, so that each engine gets the one that its rule wants next when it has
// memory and time for it.
type inOrder struct {
	programs
	rule programRule
	line struct {
		waiting [][]*job // by engine
		ticking bool
	}
}

// programRule is an order of programs.
type programRule interface {
	place(*inOrder, *program, *job) int          // where a request is served
	key(*inOrder, *program, *job) (a, b float64) // the least goes first
	ended(*inOrder, *program, *job)
}

func (o *inOrder) arrive(j *job) {
	ready(o.peer)
	if o.line.waiting == nil {
		o.line.waiting = make([][]*job, len(o.decodes))
	}
	g := o.program(j)
	at := o.rule.place(o, g, j)
	o.line.waiting[at] = append(o.line.waiting[at], j)
	o.dispatch()
}

func (o *inOrder) done(j *job) {
	o.programs.done(j)
	o.rule.ended(o, o.program(j), j)
	o.dispatch()
}

func (o *inOrder) dispatch() {
	left := false
	for at, waiting := range o.line.waiting {
		e := o.decodes[at]
		for len(waiting) > 0 && e.Waiting() == 0 && float64(e.Uncomputed()) < o.model.StepTokens {
			next := slices.MinFunc(waiting, func(a, b *job) int {
				a1, a2 := o.rule.key(o, o.program(a), a)
				b1, b2 := o.rule.key(o, o.program(b), b)
				return cmp.Or(cmp.Compare(a1, b1), cmp.Compare(a2, b2))
			})
			g := o.program(next)
			o.free(g)
			if o.makeRoom(at, next); !e.Fits(&next.Job) {
				break
			}
			waiting = slices.DeleteFunc(waiting, func(j *job) bool { return j == next })
			g.at = at
			o.send(g, next)
		}
		o.line.waiting[at] = waiting
		left = left || len(waiting) > 0
	}
	if left && !o.line.ticking {
		o.line.ticking = true
		o.After(tickSeconds, func() { o.line.ticking = false; o.dispatch() })
	}
}

// free ends the time to live of a program's prefix.
func (o *inOrder) free(g *program) {
	if kept := g.kept; len(kept) > 0 {
		g.kept = nil
		engine.Release(o.decodes[g.at], kept)
	}
}

// makeRoom frees prefixes of an engine that does nothing else until a request fits, the latest programs' first.
func (o *inOrder) makeRoom(at int, j *job) {
	e := o.decodes[at]
	for _, g := range slices.Backward(o.all) {
		answers, prompts := e.Requests()
		if answers+prompts > 0 || e.Usage()*o.model.KVTokens+float64(j.Input) <= o.model.KVTokens {
			return
		}
		if g.at == at {
			o.free(g)
		}
	}
}

// autellix is Autellix (arXiv 2502.13965): the program that was served least goes first, in classes of doubling times
// and in order of arrival within a class; a request that has waited for as long as its program was served is in the
// first class. Requests of 2,048 tokens or more go to their program's engine, shorter ones to the emptiest.
type autellix struct{}

func (autellix) place(o *inOrder, g *program, j *job) int {
	if g.at < 0 || j.Input < 2048 {
		return o.emptiest()
	}
	return g.at
}

func (autellix) key(o *inOrder, g *program, j *job) (class, arrival float64) {
	if o.Now-j.Arrival >= g.served {
		return 0, j.Arrival
	}
	return math.Floor(math.Log2(1 + g.served)), j.Arrival
}

func (autellix) ended(*inOrder, *program, *job) {}

// continuum is Continuum (arXiv 2511.02230): programs in order of their arrival, each at its engine, which keeps its KV
// while a tool runs, for a time to live: the one that gains most. It saves prefill and the usual wait, by the chance
// that the tool ends in time, and costs its share of the memory for as long. (The abstract does not say what either
// weighs; here it is 1.) An engine that could do nothing else gives up the KV of the latest programs.
type continuum struct {
	tools []float64 // times of tools, the latest
	wait  float64   // usual wait of a request, s
}

func (c *continuum) place(o *inOrder, g *program, _ *job) int {
	if g.at < 0 {
		return o.emptiest()
	}
	if g.running == 0 {
		c.tools = append(c.tools[max(len(c.tools)-256, 0):], o.Now-g.ended)
	}
	return g.at
}

func (c *continuum) key(_ *inOrder, g *program, j *job) (began, arrival float64) {
	return g.began, j.Arrival
}

func (c *continuum) ended(o *inOrder, g *program, j *job) {
	c.wait += (j.arrived - j.Arrival - c.wait) / 100
	live := c.live(o.prefillTime(j.Input, 0)+c.wait, float64(j.Input)/o.model.KVTokens)
	if g.last || g.running > 0 || live <= 0 {
		return
	}
	kept := j.Blocks
	g.kept = kept
	engine.Keep(o.decodes[g.at], kept)
	o.After(live, func() {
		if len(g.kept) > 0 && &g.kept[0] == &kept[0] {
			o.free(g)
			o.dispatch()
		}
	})
}

// live returns the time to live that gains most.
func (c *continuum) live(saves, share float64) (best float64) {
	tools, most, spent := slices.Sorted(slices.Values(c.tools)), 0.0, 0.0
	for i, t := range tools {
		n := float64(len(tools))
		spent += t
		kept := (spent + t*(n-float64(i+1))) / n // the time for which it is kept, on average
		if gain := float64(i+1)/n*saves - share*kept; gain > most {
			best, most = t, gain
		}
	}
	return best
}
