package picker

import (
	"math"

	"tandem/kvstate"
)

// The weights of the price. They were chosen in replay (docs/decision.md says what they are worth, and where they came
// from); they are not knobs, because the quantities that vary from fleet to fleet are observed.
const (
	othersWeight = 2.0  // of what a second of prefill keeps everybody else waiting ...
	othersSpread = 6.0  // ... but no more than this over the root of the number of endpoints: many pool their queues
	maxLoad      = 0.9  // utilisation is taken for no more: the price of a second ends at 9 times the weight
	answerWeight = 0.1  // of the whole answer's time beside the first token's
	maxFill      = 0.5  // a decode endpoint fuller than this computes no prompt
	tpotMargin   = 0.9  // nor does one whose answers would take more than this part of the target for each token
	usualAnswer  = 256. // tokens expected in an answer of a pool of which nothing is known
	// seconds after which KV in use is looked at again: of short answers others run by then, of long ones the same
	scrapeAge  = 2.0
	localSteps = 1.0 // how many decode steps each step of a local prefill is delayed by
)

// terms are what the prices of one decision have in common.
type terms struct {
	m           *Model
	tokens      float64      // of the prompt
	perBlock    float64      // tokens that one block of the hit stands for
	out         float64      // tokens expected in the answer
	mean        float64      // and in the answers that run
	steady      float64      // 0 to 1: how much of what an engine said of its KV holds until now
	others      float64      // what a second of prefill costs everybody else, in seconds
	local       float64      // the same among endpoints that prefill for themselves
	fleet       float64      // learned speed of the fleet
	jobs        float64      // weight of a job that waits before
	jobCap      float64      // seconds that one such job's price is capped at
	tpot        float64      // target, s
	fullStep    float64      // of the model
	answer      float64      // weight of the answer beside its first token
	moveToken   float64      // of a token's KV within a zone, as modelled, s
	always      bool         // split if it can be: what decode alone costs does not matter
	latencyOnly bool         // what others lose does not matter
	shared      []sharedPart // of the prompt, first to last
}

func (k *Picker) terms(r *Request, v *kvstate.View, prefills, decodes int) terms {
	t := terms{m: &k.Model, tokens: max(float64(r.PromptTokens), 1), mean: usualAnswer, fleet: v.Load.Speed, tpot: k.TPOT, fullStep: k.Model.FullStep()}
	if t.fleet <= 0 {
		t.fleet = 1
	}
	if r.Blocks > 0 {
		t.perBlock = t.tokens / float64(r.Blocks)
	}
	if v.Load.Answer > 0 {
		t.mean = v.Load.Answer
	}
	t.out = expected(r, t.mean)
	lasts := t.mean * t.m.DecodeStep
	t.steady = lasts / (lasts + scrapeAge)
	bytes := t.m.TokenBytes
	if v.Load.TokenBytes > 0 {
		bytes = v.Load.TokenBytes
	}
	t.moveToken = bytes / t.m.Bandwidth
	t.others = othersPrice(v.Load.Prefill, prefills)
	t.local = othersPrice(v.Load.Local, decodes)
	t.jobs, t.jobCap = 1, seconds(v.Load.Work)
	if k.Late {
		t.jobs, t.jobCap = 0.5, math.Inf(1)
	}
	if v.Load.Step > 0 {
		t.tpot *= v.Load.Step // nobody asked for a time that these engines never reach
	}
	if r.TPOT > 0 {
		t.tpot = r.TPOT
	}
	t.answer = answerWeight
	if t.latencyOnly = k.latencyOnly; t.latencyOnly { // what this request waits, whatever that costs others
		t.others, t.local, t.jobs, t.answer = 0, 0, 0, 0
		if r.TPOT > 0 {
			t.answer = 1
		}
	}
	return t
}

// expected is how many tokens the answer is taken to have: the pool's mean, within what the request allows.
func expected(r *Request, mean float64) float64 {
	if r.MaxAnswer > 0 {
		mean = min(mean, float64(r.MaxAnswer))
	}
	return max(mean, float64(r.MinAnswer))
}

// othersPrice is what a second of work costs everybody else where so many endpoints are at work that part of their
// time. In a queue at utilisation rho a second more of work lets rho/(1-rho) seconds more wait.
func othersPrice(rho float64, endpoints int) float64 {
	rho = min(max(rho, 0), maxLoad)
	return min(othersWeight, othersSpread/math.Sqrt(float64(max(endpoints, 1)))) * rho / (1 - rho)
}

// split is what of the prompt an endpoint has to compute and what it holds. The last token is always computed.
func (t *terms) split(c *kvstate.Candidate) (uncached, cached float64) {
	cached = min(t.perBlock*float64(c.Hit), t.tokens-1)
	return t.tokens - cached, cached
}

// PrefillPrice is what it costs to prefill on an endpoint, in seconds.
type PrefillPrice struct {
	Queue  float64 `json:"queue"`  // work before it
	Work   float64 `json:"work"`   // its own, at the endpoint's speed
	Others float64 `json:"others"` // what that keeps everybody else waiting, by the fleet's utilisation
	Jobs   float64 `json:"jobs"`   // the same for those that wait on this endpoint already: long work goes where few do

	Session float64 `json:"session,omitempty"` // below 0: it served the request's session last
}

func (p *PrefillPrice) sum() float64 { return p.Queue + p.Work + p.Others + p.Jobs + p.Session }

// sessionTokens is how much more work an endpoint may have than another, and yet be taken because it served the
// session last. It is less than a prompt of a few pages: what a session really has there, its prefix, has a price
// already.
const sessionTokens = 512

// session is what it is worth that an endpoint served that part of the session last, in seconds, below 0.
func (t *terms) session(c *kvstate.Candidate, part kvstate.Role) float64 {
	if c.Session&part == 0 || t.latencyOnly {
		return 0
	}
	return -t.m.prefill(sessionTokens, 0) * t.fleet
}

// prefill prices prefill on one endpoint. Like the other prices it is filled in and not returned, for a copy of
// what was just written waits until all of it is.
func (t *terms) prefill(c *kvstate.Candidate, p *PrefillPrice) {
	uncached, cached := t.split(c)
	work := t.m.prefill(uncached, cached)
	slow := slowness(c)
	usual := work * t.fleet // what others lose goes by the fleet's speed: by its own, slow endpoints would idle
	p.Queue = seconds(c.Queue) * slow
	p.Work = work * speed(c, t.fleet) * slow
	p.Others = t.others * (usual - t.paid(cached)*t.fleet)
	p.Jobs = t.jobs * float64(c.Jobs) * min(usual, t.jobCap) * slow
	p.Session = t.session(c, kvstate.RolePrefill)
}

// slowness is how slow an endpoint is taken to be beside what was learned of it, one over its weight; 1 is neutral.
// To multiply by it is exact where it is 1, and takes a tenth of the time of dividing by the weight.
func slowness(c *kvstate.Candidate) float64 {
	if c.Weight <= 0 || c.Weight == 100 {
		return 1
	}
	return 100 / float64(c.Weight)
}

// seconds is a time.Duration as seconds; its own method divides integers, which costs more than all else here.
func seconds[D ~int64](d D) float64 { return float64(d) * 1e-9 }

func speed(c *kvstate.Candidate, fleet float64) float64 {
	if c.Speed > 0 {
		return c.Speed
	}
	return fleet
}

// DecodePrice is what it costs to decode on an endpoint, in seconds, the transfer aside.
type DecodePrice struct {
	Step     float64 `json:"step"`     // until the first token
	Answer   float64 `json:"answer"`   // the rest of it, weighed
	Overflow float64 `json:"overflow"` // what waits or is thrown out where KV does not fit

	Session float64 `json:"session,omitempty"` // as PrefillPrice
}

func (p *DecodePrice) sum() float64 { return p.Step + p.Answer + p.Overflow + p.Session }

// batch is what runs on an endpoint that decodes, once the request has joined it.
type batch struct {
	answers float64 // without the request's
	// tokens: of KV, with the part of the answers that is written already; and that there is room for
	kv, freeKV     float64
	step, overflow float64 // s, as in DecodePrice
}

// batch fills in b.
func (t *terms) batch(c *kvstate.Candidate, b *batch) {
	b.answers, b.freeKV = float64(c.Requests-c.Jobs), t.freeKV(c)
	kv := float64(c.PromptTokens) + b.answers*t.mean/2
	if c.Trust > 0 && c.KVTokens > 0 && c.Signals.KVUsage >= 0 {
		kv = max(kv+c.Trust*t.steady*(c.Signals.KVUsage*float64(c.KVTokens)-kv), float64(c.PromptTokens))
	}
	b.kv = kv + t.tokens + t.out/2
	b.step = t.step(c, b.answers, b.kv)
	b.overflow = t.overflow(b.kv, b.freeKV, b.step)
}

// step is how long the endpoint's decode steps are once the request has joined them. One of half the weight is
// taken to have twice as much in each, so that where there is much it gets half as much.
func (t *terms) step(c *kvstate.Candidate, answers, kv float64) float64 {
	slow := slowness(c)
	step := t.m.decode((answers+1)*slow, kv*slow)
	if c.Step > 0 {
		step *= c.Step
	}
	return step
}

func (t *terms) decode(c *kvstate.Candidate, b *batch, p *DecodePrice) {
	p.Step = b.step
	p.Answer = t.answer * t.out * b.step
	p.Overflow = b.overflow
	p.Session = t.session(c, kvstate.RoleDecode)
}

// room is how many tokens' KV the endpoint has room for: as its engine says, or as the model has it.
func (t *terms) freeKV(c *kvstate.Candidate) float64 {
	if c.KVTokens > 0 {
		return float64(c.KVTokens)
	}
	return t.m.KVTokens
}

// overflow is what waits, or is thrown out, where so much KV does not fit.
func (t *terms) overflow(kv, room, step float64) float64 {
	over := kv - room
	if over <= 0 {
		return 0
	}
	return over / kv * t.out * step * 2
}

// transfer is the time to bring to d what it does not hold, from near or from another zone.
func (t *terms) transfer(d *kvstate.Candidate, near bool) float64 {
	if near {
		return t.moves(d, 1)
	}
	return t.moves(d, t.m.ZoneGap)
}

// transferWithin is transfer where both endpoints run on one machine.
func (t *terms) transferWithin(d *kvstate.Candidate) float64 { return t.moves(d, 1/t.m.NodeGain) }

// moves is the time of a transfer to d that is so many times as far as within a zone, with what was learned of
// those to it.
func (t *terms) moves(d *kvstate.Candidate, far float64) float64 {
	uncached, _ := t.split(d)
	seconds := t.m.TransferLag + uncached*t.moveToken*far
	if d.Transfer > 0 {
		seconds *= d.Transfer
	}
	return seconds
}

// AlonePrice is what it costs to do both on one endpoint, in seconds.
type AlonePrice struct {
	Queue  float64 `json:"queue"`  // prompts it is already computing, in steps that its answers share
	Work   float64 `json:"work"`   // of this prompt, in the same way
	Others float64 `json:"others"` // what that keeps other prompts waiting
	// what the answers that run there lose meanwhile, second for second; one may always join
	Answers  float64 `json:"answers"`
	Decode   float64 `json:"decode"`   // as DecodePrice, its step aside
	Overflow float64 `json:"overflow"` // likewise

	Session float64 `json:"session,omitempty"` // as PrefillPrice
}

func (p *AlonePrice) sum() float64 {
	return p.Queue + p.Work + p.Others + p.Answers + p.Decode + p.Overflow + p.Session
}

// alone prices both on one endpoint. allowed is false where its running answers would suffer more than they may.
func (t *terms) alone(c *kvstate.Candidate, b *batch, p *AlonePrice) (allowed bool) {
	uncached, cached := t.split(c)
	answers, step, slow := b.answers, b.step, slowness(c)
	work, pace, steps := t.m.prefill(uncached, cached), speed(c, t.fleet)*slow, t.m.steps(uncached)
	// Its chunks ride in the steps that decode makes anyway; without any they make their own.
	longer := (work - t.m.PrefillStep*steps) * pace
	own := work * pace
	if answers > 0 {
		own = longer + steps*step
	}
	fill := max(answers/t.m.MaxAnswers, b.kv/b.freeKV)
	queue := (seconds(c.Local) + seconds(c.Queue)) * slow
	p.Queue = queue * (1 + localSteps*step/t.fullStep)
	p.Work = own
	p.Others = t.local * work * t.fleet
	// of the endpoint's time, for answers: what keeps them there lets more run, so more lose
	left := max(1-c.Share, 0.01)
	p.Answers = max(answers, 1) * longer / max(1-fill, 1-maxFill) / left
	p.Decode = t.answer * t.out * step
	p.Overflow = b.overflow
	p.Session = t.session(c, kvstate.RoleBoth)
	if t.latencyOnly {
		p.Answers, p.Decode = 0, p.Decode+step
	}
	return fill <= maxFill && (t.tpot <= 0 || step/left <= tpotMargin*t.tpot)
}

// Work returns the time to prefill a request, in seconds, on the endpoint where it is least: the key of an
// admission queue.
func (k *Picker) Work(r *Request, v *kvstate.View) float64 {
	t := k.terms(r, v, 0, 0)
	least := math.Inf(1)
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Usable && c.Endpoint.Role&kvstate.RolePrefill != 0 {
			uncached, cached := t.split(c)
			least = min(least, t.m.prefill(uncached, cached)*speed(c, t.fleet))
		}
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return least
}
