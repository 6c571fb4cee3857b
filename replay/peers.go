package replay

import (
	"math"

	"tandem/picker"
	"tandem/replay/engine"
)

// peer is a router that chooses prefill and decode one after the other. It sees every cache and every load without
// delay, prompts on their way included: a better view than it would have in a real fleet.
type peer struct {
	*fleet
	choose  chooser
	booked  []int // requests at each prefill endpoint
	tokens  []int // tokens that these requests have to compute, as estimated when they were sent
	work    []float64
	answers []int // requests at each decode endpoint, those on their way included
	kv      []int // their prompt tokens
}

// chooser is a policy's formula.
type chooser interface {
	prefill(j *job) int
	decode(j *job) int
	late() bool // decode is chosen when prefill has ended
}

// ready makes the counts.
func ready(p *peer) {
	if p.booked == nil {
		n, m := len(p.prefills), len(p.decodes)
		p.booked, p.tokens, p.work = make([]int, n), make([]int, n), make([]float64, n)
		p.answers, p.kv = make([]int, m), make([]int, m)
	}
}

// whole sends both legs of a request to one endpoint.
func whole(p *peer, j *job, at int) {
	p.answers[at]++
	p.kv[at] += j.Input
	p.bind(j, -1, at)
}

func (p *peer) arrive(j *job) {
	ready(p)
	if b, ok := p.choose.(interface{ alone(*job) (int, bool) }); ok {
		if d, alone := b.alone(j); alone {
			whole(p, j, d)
			return
		}
	}
	at := p.choose.prefill(j)
	j.uncached = j.Input - j.CachedTokens(p.hit(at, j))
	j.decode = -1
	d := -1
	if !p.choose.late() {
		d = p.choose.decode(j)
		p.answers[d]++
		p.kv[d] += j.Input
	}
	p.booked[at]++
	p.tokens[at] += j.uncached
	p.work[at] += p.prefillTime(j.uncached, j.Input-j.uncached)
	p.bind(j, at, d)
}

func (p *peer) prefilled(j *job) int {
	p.booked[j.prefill]--
	p.tokens[j.prefill] -= j.uncached
	p.work[j.prefill] -= p.prefillTime(j.uncached, j.Input-j.uncached)
	if j.decode < 0 {
		j.decode = p.choose.decode(j)
		p.answers[j.decode]++
		p.kv[j.decode] += j.Input
	}
	return j.decode
}

func (p *peer) done(j *job) {
	p.answers[j.decode]--
	p.kv[j.decode] -= j.Input
}

// hit returns the number of leading blocks of the prompt that a prefill endpoint holds, or will hold when the prompts
// on their way are computed.
func (p *peer) hit(at int, j *job) int { return p.prefills[at].Held(j.Blocks) }

// decodeMatch returns the share of the prompt that a decode endpoint holds.
func (p *peer) decodeMatch(at int, j *job) float64 {
	return float64(p.decodes[at].Held(j.Blocks)) / float64(max(len(j.Blocks), 1))
}

// match returns hit as a share of the prompt.
func (p *peer) match(at int, j *job) float64 {
	return float64(p.hit(at, j)) / float64(max(len(j.Blocks), 1))
}

func (p *peer) prefillTime(uncached, cached int) float64 {
	return prefillTime(&p.model, uncached, cached)
}

func prefillTime(m *picker.Model, uncached, cached int) float64 {
	return m.PrefillStep*math.Ceil(float64(uncached)/m.StepTokens) + engine.ChunkTime(m, uncached, cached)
}

// argmin returns the index below n of the least cost; ties are broken at random.
func (p *peer) argmin(n int, cost func(i int) float64) int {
	best, at, equals := math.Inf(1), 0, 0
	for i := range n {
		switch c := cost(i); {
		case c < best:
			best, at, equals = c, i, 1
		case c == best:
			equals++
			if p.random.IntN(equals) == 0 {
				at = i
			}
		}
	}
	return at
}

func (p *peer) leastBooked() int {
	return p.argmin(len(p.prefills), func(i int) float64 { return float64(p.booked[i]) })
}

func (p *peer) leastAnswers() int {
	return p.argmin(len(p.decodes), func(i int) float64 { return float64(p.answers[i]) })
}

// twoChoices draws two decode endpoints and returns the less loaded one.
func (p *peer) twoChoices() int {
	a, b := p.random.IntN(len(p.decodes)), p.random.IntN(len(p.decodes))
	if p.answers[b] < p.answers[a] {
		return b
	}
	return a
}

type randomly struct{ *peer }

func (r *randomly) prefill(*job) int { return r.random.IntN(len(r.prefills)) }
func (r *randomly) decode(*job) int  { return r.random.IntN(len(r.decodes)) }
func (r *randomly) late() bool       { return false }

// roundRobin has two counters, one for each leg (production-stack's disaggregated_prefill_orchestrated).
type roundRobin struct {
	*peer
	p, d int
}

func (r *roundRobin) prefill(*job) int { r.p++; return (r.p - 1) % len(r.prefills) }
func (r *roundRobin) decode(*job) int  { r.d++; return (r.d - 1) % len(r.decodes) }
func (r *roundRobin) late() bool       { return false }

type leastRequests struct{ *peer }

func (l *leastRequests) prefill(*job) int { return l.leastBooked() }
func (l *leastRequests) decode(*job) int  { return l.leastAnswers() }
func (l *leastRequests) late() bool       { return false }

// longestPrefix chooses the endpoint that holds most of the prompt, whatever the load.
type longestPrefix struct{ *peer }

func (l *longestPrefix) prefill(j *job) int {
	return l.argmin(len(l.prefills), func(i int) float64 { return -float64(l.hit(i, j)) })
}
func (l *longestPrefix) decode(*job) int { return l.leastAnswers() }
func (l *longestPrefix) late() bool      { return false }
