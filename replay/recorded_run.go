package replay

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"

	"tandem/replay/engine"
	"tandem/replay/traces"
)

// RecordedResult is how a fleet did with what a recording asked, or how it really did.
type RecordedResult struct {
	Requests int     `json:"requests"`
	Kept     float64 `json:"kept"` // share of requests that got both targets; -1: unknown
	TTFT     Spread  `json:"ttft"`
	TPOT     Spread  `json:"tpot"`
	Waits    Spread  `json:"waits"`  // in the queue
	Cached   float64 `json:"cached"` // share of prompt tokens that were found in a cache; -1: unknown
	Again    float64 `json:"again"`  // share of prompt tokens that were computed although an engine had done it before
	Lost     float64 `json:"lost"`   // share of the time of answers in which prompts ran beside them
	Span     float64 `json:"span"`   // s until all had ended
	Stuck    int     `json:"stuck"`  // requests that had not ended long after the last arrival
	// for pictures: times to the first token at equal steps of the share that had theirs by then, and the share of KV
	// memory that requests take, the mean of all engines at equal steps of the recording's time
	FirstTokens []float64 `json:"-"`
	KV          []float64 `json:"-"`
}

// How many points pictures have.
const (
	firstPoints = 200
	kvPoints    = 240
)

// firstTokens returns a distribution's quantiles. Its argument is sorted.
func firstTokens(sorted []float64) []float64 {
	if len(sorted) == 0 {
		return nil
	}
	out := make([]float64, firstPoints+1)
	for i := range out {
		out[i] = quantile(sorted, float64(i)/firstPoints)
	}
	return out
}

// recordedWarm is the part of a recording whose requests do not count: caches are empty when the replay begins.
const recordedWarm = .1

// counts reports whether a request that came at a moment counts. If all came within a second, all do.
func (o *Recorded) counts(at float64) bool { return at >= recordedWarm*o.Seconds || o.Seconds <= 1 }

// Measured returns how the fleet really did.
func (o *Recorded) Measured(c *Config) *RecordedResult {
	r := &RecordedResult{Kept: -1, Cached: -1}
	var first, each, waits []float64
	prompt, cached, kept, judged := 0.0, 0.0, 0, 0
	for i := range o.Turns {
		t := &o.Turns[i]
		if !o.counts(t.At) {
			continue
		}
		r.Requests++
		q := t.Was
		waits = append(waits, q.Waited)
		if q.Cached >= 0 {
			prompt, cached = prompt+float64(q.Prompt), cached+float64(min(q.Cached, q.Prompt))
		}
		if q.First == 0 || q.Ended != "ok" {
			continue
		}
		first = append(first, q.First)
		if q.Answer > 1 {
			each = append(each, q.Each)
		}
		if judged++; q.First <= c.TTFT && q.Each <= c.TPOT {
			kept++
		}
	}
	r.TTFT, r.TPOT, r.Waits = spread(first), spread(each), spread(waits)
	r.FirstTokens = firstTokens(first)
	if judged > 0 {
		r.Kept = float64(kept) / float64(judged)
	}
	if prompt > 0 {
		r.Cached = cached / prompt
	}
	return r
}

// recordedPlay is a request as it is played.
type recordedPlay struct {
	turn, copy    int
	cached, again int
	started       bool
}

// recordedPlayer plays a recording.
type recordedPlayer struct {
	*fleet
	load     *Recorded
	config   Config
	children [][]int
	plays    []recordedPlay
	seen     map[uint64]bool
	kv       []float64
}

// RunRecorded plays a recording on a fleet whose engines have host memory for so many tokens. load is how many times
// as many conversations come.
func RunRecorded(ctx context.Context, name string, c Config, o *Recorded, host, load float64) (*RecordedResult,
	error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if !(load > 0) || load*float64(o.Sample) > 1000 {
		return nil, errors.New("so many times the load cannot be played")
	}
	p := &recordedPlayer{fleet: newFleet(c, nil, rand.New(rand.NewPCG(c.Seed, 3))), load: o, config: c,
		children: make([][]int, len(o.Turns)), seen: map[uint64]bool{}}
	p.fleet.answered, p.fleet.started = p.ended, p.starts
	for _, e := range p.engines() {
		engine.Poll(e)
		if host > 0 {
			engine.Host(e, host, hostSpeed/c.Engine.TokenBytes)
		}
	}
	var err error
	if p.policy, err = newPolicy(name, p.fleet, c); err != nil {
		return nil, err
	}
	last := p.arrivals(load * float64(o.Sample))
	p.After(0, p.look)
	for n := 0; p.Step(); n++ {
		if p.allEnded() && p.Now > last || p.Now > last+hangs {
			break
		}
		if n%8192 == 0 {
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			if c.Progress != nil {
				c.Progress(min(int(p.Now), int(last)), int(last)+1)
			}
		}
	}
	if c.Progress != nil {
		c.Progress(int(last)+1, int(last)+1)
	}
	r := p.result()
	if r.Requests == 0 {
		return nil, errors.New("no request was played in the time that counts, which is all but the first tenth")
	}
	return r, nil
}

// look notes how much of the KV memory is used.
func (p *recordedPlayer) look() {
	sum, all := 0.0, p.engines()
	for _, e := range all {
		sum += e.Usage()
	}
	p.kv = append(p.kv, sum/float64(len(all)))
	if len(p.kv) <= kvPoints {
		p.After(p.load.Seconds/kvPoints, p.look)
	}
}

// allEnded reports whether all that was asked has been answered.
func (p *recordedPlayer) allEnded() bool { return p.fleet.ended == len(p.jobs) }

// arrivals has the first requests of conversations come, so many times as many, and returns when the last one does.
// A conversation more than once comes about when it came, so that the day keeps its shape, and shares what
// conversations share.
func (p *recordedPlayer) arrivals(copies float64) (last float64) {
	random := rand.New(rand.NewPCG(p.config.Seed, 21))
	for i := range p.load.Turns {
		t := &p.load.Turns[i]
		if t.On >= 0 {
			p.children[t.On] = append(p.children[t.On], i)
			continue
		}
		n := int(copies)
		if random.Float64() < copies-float64(n) {
			n++
		}
		for c := range n {
			at := t.At
			if c > 0 {
				at = p.load.near(at, random.Float64())
			}
			last = max(last, at)
			p.After(at, func() { p.ask(i, c) })
		}
	}
	return max(last, p.load.Seconds)
}

// near returns a moment within a twentieth of the recording before or after another one, by a random number from 0 to
// 1.
func (o *Recorded) near(at, random float64) float64 {
	at = math.Abs(at + (2*random-1)*o.Seconds/20)
	if at > o.Seconds {
		return 2*o.Seconds - at
	}
	return at
}

// ask makes a request.
func (p *recordedPlayer) ask(turn, number int) {
	t := &p.load.Turns[turn]
	if p.Now > p.load.Seconds*1.01 && t.On >= 0 && !p.load.whole { // the recording ended before
		return
	}
	kept := p.blocks(t.Kept, number)
	q := &traces.Request{Arrival: p.Now, Input: t.Input, Output: t.Output,
		Program: uint64(t.root+1)<<10 | uint64(number&1023),
		Last:    len(p.children[turn]) == 0, Blocks: kept[:len(t.Blocks)]}
	j := newJob(len(p.jobs), q)
	j.Kept, j.Part = kept, t.Part
	p.jobs = append(p.jobs, j)
	p.plays = append(p.plays, recordedPlay{turn: turn, copy: number})
	for _, child := range p.children[turn] {
		if gap := p.load.Turns[child].Gap; gap < 0 {
			p.After(-gap, func() { p.ask(child, number) })
		}
	}
	p.policy.arrive(j)
}

// blocks returns those of a copy of a conversation.
func (p *recordedPlayer) blocks(all []uint64, number int) []uint64 {
	if number == 0 {
		return all
	}
	out := make([]uint64, len(all))
	for i, b := range all {
		if out[i] = b; !p.load.shared[b] {
			out[i] = b ^ uint64(number)<<48 ^ 1<<61
		}
	}
	return out
}

// starts counts what is computed of a prompt although it had been computed before.
func (p *recordedPlayer) starts(j *job, cached, _ int) {
	x := &p.plays[j.ID]
	if x.started {
		return
	}
	x.started, x.cached = true, cached
	had := 0
	for _, b := range j.Blocks {
		if !p.seen[b] {
			break
		}
		had += engine.BlockTokens
	}
	x.again = max(min(had, j.Input-1)-cached, 0)
	for _, b := range j.Kept {
		p.seen[b] = true
	}
}

// ended goes on with a conversation whose request has ended.
func (p *recordedPlayer) ended(j *job) {
	x := p.plays[j.ID]
	for _, child := range p.children[x.turn] {
		if gap := p.load.Turns[child].Gap; gap >= 0 {
			p.After(gap, func() { p.ask(child, x.copy) })
		}
	}
	j.Blocks, j.Kept, j.hits, j.asked.Blocks = nil, nil, nil, nil
}

func (p *recordedPlayer) result() *RecordedResult {
	r := &RecordedResult{Span: p.Now}
	var first, each, waits []float64
	good, prompt, cached, again, answers := 0, 0, 0, 0, 0.
	for _, j := range p.jobs {
		if !p.load.counts(j.Arrival) {
			continue
		}
		r.Requests++
		x := &p.plays[j.ID]
		if j.endAt == 0 {
			r.Stuck++
			first = append(first, p.Now-j.Arrival)
			continue
		}
		ttft, tpot := j.firstAt-j.Arrival, 0.0
		first = append(first, ttft)
		if j.Output > 1 && !j.refused() {
			tpot = (j.endAt - j.firstAt) / float64(j.Output-1)
			each = append(each, tpot)
		}
		answers += j.endAt - j.firstAt
		waits = append(waits, max(j.boundAt-j.Arrival, 0))
		prompt, cached, again = prompt+j.Input, cached+x.cached, again+x.again
		fits := float64(j.Input+j.Output) <= p.config.Engine.KVTokens // else an engine refuses it
		if ttft <= p.config.TTFT && tpot <= p.config.TPOT && !j.refused() && fits {
			good++
		}
	}
	for _, e := range p.engines() {
		r.Lost += e.Lost / max(answers, 1e-9)
	}
	r.TTFT, r.TPOT, r.Waits = spread(first), spread(each), spread(waits)
	r.FirstTokens, r.KV = firstTokens(first), p.kv
	r.Kept = float64(good) / float64(max(r.Requests, 1))
	r.Cached, r.Again = float64(cached)/float64(max(prompt, 1)), float64(again)/float64(max(prompt, 1))
	return r
}
