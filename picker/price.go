package picker

import (
	"cmp"
	"math"

	"tandem/kvstate"
)

// The weights of the price. They were chosen by replay (docs/decision.md has their effects and origin). They are
// not configurable, because the quantities that vary between fleets are observed.
const (
	othersWeight = 2.0 // of the delay that a second of prefill causes other requests ...
	othersSpread = 6.0 // ... at most this over the root of the number of endpoints: many endpoints share their queues
	maxLoad      = 0.9 // largest utilisation used: the price of a second is at most 9 times the weight
	maxFill      = 0.5 // a decode endpoint with a fuller KV cache computes no prompt
	tpotMargin   = 0.9 // nor does one whose answers would need more than this share of the target per token
	// With a target that was asked for, answers of this part of the mean length keep it too: long ones alone do not
	// make a p99.
	askedSpread = 1.0 / 3
	// For the jobs before it, a job counts as at most this many mean jobs. Without a limit the longest prompts wait for
	// too long.
	maxJobs = 2.0
	// Seconds per token that engines reach at the model's pace, beside a few prompts: no promise counts as shorter.
	reachable   = 0.030
	usualAnswer = 256. // expected tokens of an answer in a pool without observations
	// seconds after which KV in use is outdated: by then short answers have been replaced, long ones not.
	scrapeAge = 2.0
)

// terms are the values that all prices of one decision share.
type terms struct {
	m           *Model
	tokens      float64       // of the prompt
	most        float64       // the same if the estimate is too low
	perBlock    float64       // tokens of one block of a hit
	out         float64       // expected tokens of the answer
	mean        float64       // and of running answers
	steady      float64       // 0 to 1: how much of the reported KV usage is still valid
	others      float64       // delay of other requests by a second of prefill, s
	local       float64       // the same on decode endpoints that compute prompts
	fleet       float64       // learned speed of the fleet
	jobs        float64       // weight of a job that waits before it: 1, or 0 if only latency counts
	jobCap      float64       // largest price of such a job, s
	fullStep    float64       // of the model
	answer      float64       // worth of a second of answers relative to one before the first token
	moveToken   float64       // transfer time of a token's KV within a zone, as modelled, s
	loadBlock   LoadBandwidth // time to load the KV of a block of a hit, by tier, s
	always      bool          // split whenever possible: the price of decode alone does not matter
	latencyOnly bool          // the delay of others does not matter
	promise
	shared []sharedPart // parts of the prompt, first to last
}

// promise is what the answers should keep: the pool's promise, or the request's own targets.
type promise struct {
	tpot     float64 // s; 0: none
	asked    bool    // tpot is the request's own target, which holds without exception
	spread   float64 // tokens of a running answer over which a delay is spread
	promised float64 // time to the first token that the pool promises, s; 0: none
	inTime   float64 // s from now until it is due; 0 or less: it is too late, or nothing is promised
}

func (k *Picker) terms(r *Request, v *kvstate.View, prefills, decodes int) terms {
	t := terms{m: &k.Model, tokens: max(float64(r.PromptTokens), 1), mean: usualAnswer, fleet: v.Load.Speed,
		promise: promise{tpot: k.Promise.TPOT, promised: k.Promise.TTFT}, fullStep: k.Model.FullStep()}
	if t.fleet <= 0 {
		t.fleet = 1
	}
	t.most = max(t.tokens, float64(r.Bytes)*v.Load.Densest+float64(r.Beside))
	if r.Blocks > 0 {
		t.perBlock = t.tokens / float64(r.Blocks)
	}
	if v.Load.Answer > 0 {
		t.mean = v.Load.Answer
	}
	t.out = expected(r, cmp.Or(r.MeanAnswer, t.mean))
	lasts := t.mean * t.m.DecodeStep
	t.steady = lasts / (lasts + scrapeAge)
	bytes := t.m.TokenBytes
	if v.Load.TokenBytes > 0 {
		bytes = v.Load.TokenBytes
	}
	t.moveToken = bytes / t.m.Bandwidth
	for tier, rate := range t.m.LoadBandwidth {
		t.loadBlock[tier] = t.perBlock * bytes / rate
	}
	if v.Load.LoadBandwidth > 0 {
		t.loadBlock[0] = t.perBlock * bytes / v.Load.LoadBandwidth
	}
	t.others = othersPrice(v.Load.Prefill, prefills)
	t.local = othersPrice(v.Load.Local, decodes)
	t.jobs, t.jobCap = 1, maxJobs*seconds(v.Load.Work)
	if k.Late { // few wait at endpoints
		t.jobCap = math.Inf(1)
	}
	if t.tpot > 0 && v.Load.Step > 0 {
		t.tpot = max(t.tpot, reachable*v.Load.Step) // engines cannot keep a promise that they cannot reach
	}
	t.spread = t.mean
	if r.TPOT > 0 {
		t.tpot, t.spread, t.asked = r.TPOT, t.mean*askedSpread, true
	}
	t.inTime = t.promised - r.Waited
	t.answer = k.AnswerWeight
	if t.latencyOnly = k.latencyOnly; t.latencyOnly { // only this request's time counts, whatever that costs others
		t.others, t.local, t.jobs, t.answer, t.inTime = 0, 0, 0, 0, 0
		if r.TPOT > 0 {
			t.answer = 1
		}
	}
	return t
}

// expected returns the expected tokens of the answer: a mean, within the request's limits.
func expected(r *Request, mean float64) float64 {
	if r.MaxAnswer > 0 {
		mean = min(mean, float64(r.MaxAnswer))
	}
	return max(mean, float64(r.MinAnswer))
}

// othersPrice returns by how much a second of work delays other requests, on a number of endpoints at a utilisation
// rho. In a queue, an additional second of work adds rho/(1-rho) seconds of waiting.
func othersPrice(rho float64, endpoints int) float64 {
	rho = min(max(rho, 0), maxLoad)
	return min(othersWeight, othersSpread/math.Sqrt(float64(max(endpoints, 1)))) * rho / (1 - rho)
}

// split returns the tokens of the prompt that an endpoint must compute and those that it holds. The last token is
// always computed.
func (t *terms) split(c *kvstate.Candidate) (uncached, cached float64) {
	cached = min(t.perBlock*float64(c.Hit), t.tokens-1)
	return t.tokens - cached, cached
}

// load returns the time to load what the endpoint holds outside GPU memory.
func (t *terms) load(c *kvstate.Candidate) float64 {
	if c.Loads == (kvstate.Loads{}) {
		return 0
	}
	sum := 0.0
	for tier, blocks := range c.Loads {
		sum += float64(blocks) * t.loadBlock[tier]
	}
	return sum
}

// PrefillPrice is the price of prefill on an endpoint, in seconds.
type PrefillPrice struct {
	Queue  float64 `json:"queue"`          // work before it
	Work   float64 `json:"work"`           // its own, at the endpoint's speed
	Load   float64 `json:"load,omitempty"` // until the KV that it keeps outside GPU memory is there
	Others float64 `json:"others"`         // delay of other requests, by the fleet's utilisation
	// delay of the requests that wait on this endpoint: long prompts go where few wait
	Jobs float64 `json:"jobs"`
	// delay of the answers that run there, at the pool's weight of answers
	Answers float64 `json:"answers,omitempty"`
	Late    float64 `json:"late,omitempty"` // the first token would miss the pool's promise
	Room    float64 `json:"room,omitempty"` // it only prefills, and its KV memory is full: until there is room
	// to compute again what it discards to make room, where that is asked for
	Evicts  float64 `json:"evicts,omitempty"`
	Returns float64 `json:"returns,omitempty"` // conversations that come back meanwhile wait

	Session float64 `json:"session,omitempty"` // below 0: it served the request's session last
}

func (p *PrefillPrice) sum() float64 {
	return p.Queue + p.Work + p.Load + p.Others + p.Jobs + p.Answers + p.Late + p.Room + p.Evicts + p.Returns +
		p.Session
}

// sessionTokens is how much more work an endpoint may have than another and still be preferred, because it served
// the session last. It is less than a prompt of a few pages: the session's cached prefix has a price of its own.
const sessionTokens = 512

// session returns the value of having served that leg of the session last, in seconds, below 0.
func (t *terms) session(c *kvstate.Candidate, part kvstate.Role) float64 {
	if c.Session&part == 0 || t.latencyOnly {
		return 0
	}
	return -t.m.prefill(sessionTokens, 0) * t.fleet
}

// prefill prices prefill on one endpoint. Like the other prices it is filled in, not returned, because copying a
// struct that was just written is slow.
// b is set by batch for an endpoint that may write answers, and by atEndpoint for others.
func (t *terms) prefill(c *kvstate.Candidate, b *batch, p *PrefillPrice) {
	slow := slowness(c)
	usual := b.work * t.fleet // the delay of others uses the fleet's speed: with their own, slow endpoints would idle
	p.Queue = seconds(c.Queue) * slow
	p.Work = b.work * speed(c, t.fleet) * slow
	p.Load = b.load
	p.Others = t.others * (usual - b.paid*t.fleet)
	p.Jobs = t.jobs * float64(c.Jobs) * min(usual, t.jobCap) * slow
	p.Session = t.session(c, kvstate.RolePrefill)
	if c.Endpoint.Role == kvstate.RoleBoth {
		t.prefillBeside(b, p)
	}
	p.Late = t.late(p.Queue + p.Work + p.Load)
	p.Evicts, p.Returns = t.evicts(c, b.uncached), t.returns(c, p.Work)
	if c.Room.Held > 0 && onlyPrefills(c) && t.isFull(c) {
		p.Room = roomWait
	}
}

// late returns what it costs that a first token comes later than promised: the promised time once more.
func (t *terms) late(after float64) float64 {
	if t.inTime > 0 && after > t.inTime {
		return t.promised
	}
	return 0
}

// slowness returns the factor on an endpoint's learned times: one over its weight; 1 is neutral. Multiplying by it
// is exact at 1, and takes a tenth of the time of dividing by the weight.
func slowness(c *kvstate.Candidate) float64 {
	if c.Weight <= 0 || c.Weight == 100 {
		return 1
	}
	return 100 / float64(c.Weight)
}

// seconds converts a time.Duration; its own method divides integers, which would cost more than everything else
// here.
func seconds[D ~int64](d D) float64 { return float64(d) * 1e-9 }

func speed(c *kvstate.Candidate, fleet float64) float64 {
	if c.Speed > 0 {
		return c.Speed
	}
	return fleet
}

// DecodePrice is the price of decode on an endpoint, in seconds, without the transfer.
type DecodePrice struct {
	Step     float64 `json:"step"`             // until the first token
	Answer   float64 `json:"answer"`           // the rest of it, at the pool's weight of answers
	Overflow float64 `json:"overflow"`         // time that requests wait or repeat where KV does not fit
	Evicts   float64 `json:"evicts,omitempty"` // as in PrefillPrice

	Session float64 `json:"session,omitempty"` // as in PrefillPrice
}

func (p *DecodePrice) sum() float64 { return p.Step + p.Answer + p.Overflow + p.Evicts + p.Session }

// atEndpoint is what the prices of all legs on an endpoint have in common: the prompt there.
type atEndpoint struct {
	uncached, cached float64 // tokens, as split returns them
	work, load       float64 // s: of the prefill, as modelled, and to load what it holds outside GPU memory
	paid             float64 // s of the work that other uses of the copy pay for
}

// atEndpoint sets out.
func (t *terms) atEndpoint(c *kvstate.Candidate, out *atEndpoint) {
	out.uncached, out.cached = t.split(c)
	out.work, out.load, out.paid = t.m.prefill(out.uncached, out.cached), t.load(c), t.paid(out.cached)
}

// batch is the batch of a decode endpoint after the request has joined it.
type batch struct {
	atEndpoint
	answers float64 // without the request's
	// tokens of KV, including the generated part of answers; and the capacity
	kv, freeKV     float64
	step, overflow float64 // s, as in DecodePrice
	prompt         beside
	// s, set by decode: as tokenTime returns it; and of what makes room for the prompt and its answer
	token, evicts float64
}

// batch sets b, for an endpoint that may write answers.
func (t *terms) batch(c *kvstate.Candidate, b *batch) {
	t.atEndpoint(c, &b.atEndpoint)
	b.answers, b.freeKV = float64(max(c.Requests-c.Jobs, 0)), t.freeKV(c)
	kv := float64(c.PromptTokens) + b.answers*t.mean/2
	if c.Trust > 0 && c.KVTokens > 0 && c.Signals.KVUsage >= 0 {
		kv = max(kv+c.Trust*t.steady*(c.Signals.KVUsage*float64(c.KVTokens)-kv), float64(c.PromptTokens))
	}
	b.kv = kv + t.tokens + t.out/2
	b.step = t.step(c, b.answers, b.kv)
	b.overflow = t.overflow(b)
	t.beside(c, b)
}

// step returns the time of the endpoint's decode steps after the request has joined. An endpoint of half the weight
// counts as if it had twice as much in each step, so that under load it gets half as much.
func (t *terms) step(c *kvstate.Candidate, answers, kv float64) float64 {
	slow := slowness(c)
	step := t.m.decode((answers+1)*slow, kv*slow)
	if c.Step > 0 {
		step *= c.Step
	}
	return step
}

func (t *terms) decode(c *kvstate.Candidate, b *batch, p *DecodePrice) {
	b.token, b.evicts = t.tokenTime(c, b.step), t.evicts(c, b.uncached+t.out)
	p.Step = b.step
	p.Answer = t.answer * t.out * b.step
	p.Overflow = b.overflow
	p.Session = t.session(c, kvstate.RoleDecode)
	p.Evicts = b.evicts
	if c.Share > 0 || c.Endpoint.Role == kvstate.RoleBoth {
		t.decodeBeside(c, b, p)
	}
}

// freeKV returns the capacity of the endpoint's KV cache in tokens: as reported, or the model's.
func (t *terms) freeKV(c *kvstate.Candidate) float64 {
	if c.KVTokens > 0 {
		return float64(c.KVTokens)
	}
	return t.m.KVTokens
}

// overflow returns the time that requests wait, or repeat, because KV does not fit. The lengths of the answers are not
// known. Each varies by about the mean length, so n of them vary by that times the root of n. No distribution with this
// mean and deviation is above the capacity by more than the bound used here, on average (Scarf 1958).
func (t *terms) overflow(b *batch) float64 {
	over, variance := b.kv-b.freeKV, t.mean*t.mean*(max(b.answers, 0)+1)
	if over < 0 && over*over > 64*variance { // the limit, without a root, which most endpoints would have to take
		return variance * t.out * b.step / (-2 * over * b.kv)
	}
	return (over + math.Sqrt(over*over+variance)) / b.kv * t.out * b.step
}

// transfer returns the time to bring d the part of the prompt that it does not hold in GPU memory, within a zone (near)
// or between zones.
func (t *terms) transfer(d *kvstate.Candidate, near bool) float64 {
	if near {
		return t.moves(d, 1)
	}
	return t.moves(d, t.m.ZoneGap)
}

// transferWithin returns transfer within a node.
func (t *terms) transferWithin(d *kvstate.Candidate) float64 { return t.moves(d, 1/t.m.NodeGain) }

// moves returns the time of a transfer to d, far times that within a zone, with the learned factor of transfers to
// it.
func (t *terms) moves(d *kvstate.Candidate, far float64) float64 {
	missing := t.tokens - min(t.perBlock*float64(d.Hit-d.Loads.Blocks()), t.tokens-1)
	seconds := t.m.TransferLag + missing*t.moveToken*far
	if d.Transfer > 0 {
		seconds *= d.Transfer
	}
	return seconds
}

// AlonePrice is the price of doing both on one endpoint, in seconds.
type AlonePrice struct {
	Queue  float64 `json:"queue"`          // prompts that it is computing already, in steps shared with its answers
	Work   float64 `json:"work"`           // the same of this prompt
	Load   float64 `json:"load,omitempty"` // as in PrefillPrice
	Others float64 `json:"others"`         // delay of other prompts
	// delay of the answers that run there, at least one, at the pool's weight of answers
	Answers  float64 `json:"answers"`
	Decode   float64 `json:"decode"`            // as in DecodePrice, without its step
	Overflow float64 `json:"overflow"`          // likewise
	Late     float64 `json:"late,omitempty"`    // as in PrefillPrice
	Evicts   float64 `json:"evicts,omitempty"`  // likewise
	Returns  float64 `json:"returns,omitempty"` // likewise

	Session float64 `json:"session,omitempty"` // as in PrefillPrice
}

func (p *AlonePrice) sum() float64 {
	return p.Queue + p.Work + p.Load + p.Others + p.Answers + p.Decode + p.Overflow + p.Late + p.Evicts + p.Returns +
		p.Session
}

// alone prices both on one endpoint, after decode. allowed is false if its running answers would be delayed more than
// allowed.
func (t *terms) alone(c *kvstate.Candidate, b *batch, p *AlonePrice) (allowed bool) {
	p.Queue = b.prompt.queue * (1 + b.step/t.fullStep)
	p.Work = b.prompt.takes
	p.Load = b.load
	p.Others = t.local * b.work * t.fleet
	if c.Endpoint.Role == kvstate.RoleBoth { // prefill gains from the copy, too
		p.Others -= t.local * b.paid * t.fleet
	}
	// share of the endpoint's time that is left for answers: with less of it more answers run, and more are delayed
	least := minLeft
	if c.Used() == kvstate.RoleBoth {
		least = leastLeft
	}
	left := max(1-c.Share, least)
	p.Answers = b.prompt.delayed(t, max(b.answers, 1)) / left
	p.Decode = t.answer * t.out * b.token
	p.Overflow = b.overflow
	p.Session = t.session(c, kvstate.RoleBoth)
	p.Evicts, p.Returns = b.evicts, t.returns(c, p.Work)
	p.Late = t.late(p.Queue + p.Work + p.Load)
	if t.latencyOnly {
		p.Answers, p.Decode = 0, p.Decode+b.step
	}
	return t.appends(b.uncached) || t.room(c, b.step, b.prompt.fill, b.prompt.longer)
}

// mostNew is the part of a prompt that an endpoint may lack and still append the rest, however full it is.
const mostNew = 0.1

// appends reports whether a prompt only adds a little to what an endpoint holds, a tenth and a step of it at most. Even
// a full endpoint has the prompt in its memory then, and another one would compute far more.
func (t *terms) appends(uncached float64) bool {
	return !t.asked && uncached <= min(t.m.StepTokens, mostNew*t.tokens)
}

// room reports whether answers keep their pace on an endpoint with such steps, filled so far (0 to 1), if its steps get
// longer by so many seconds in all.
func (t *terms) room(c *kvstate.Candidate, step, fill, longer float64) bool {
	return fill <= maxFill && (t.tpot <= 0 || step/max(1-c.Share, minLeft)+longer/t.spread <= tpotMargin*t.tpot)
}

// minLeft is the least share of a decode endpoint's time that counts as left for answers.
const minLeft = 0.01

// leastLeft is minLeft for what answers lose on an endpoint that serves both legs. There the share of the last ten
// seconds predicts little: one long prompt makes it 1, and would make the endpoint a hundred times as expensive.
const leastLeft = 0.5

// Work returns the time to prefill a request, in seconds, on the endpoint where it is least: the key of an
// admission queue.
func (k *Picker) Work(r *Request, v *kvstate.View) float64 {
	t := k.terms(r, v, 0, 0)
	least := math.Inf(1)
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Usable && c.Used()&kvstate.RolePrefill != 0 {
			uncached, cached := t.split(c)
			least = min(least, t.m.prefill(uncached, cached)*speed(c, t.fleet))
		}
	}
	if math.IsInf(least, 1) {
		return 0
	}
	return least
}
