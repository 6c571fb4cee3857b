package picker

import "tandem/kvstate"

// Prompts and answers on one engine delay each other: a prompt's chunks make the steps of the answers longer, and the
// answers' part of each step makes the prompt take longer. The terms here are added to the price of a leg on an
// endpoint that runs the other kind (docs/decision.md, Prompts beside answers).

// beside is a prompt that an endpoint computes while its answers go on.
type beside struct {
	queue  float64 // s: prompts before it, in steps that the answers share
	takes  float64 // s, for its own tokens
	longer float64 // s: by which it makes the answers' steps longer, in all
	fill   float64 // 0 to 1: how full the endpoint is, of answers or of KV
}

// beside sets the times of the prompt on an endpoint in b, whose other fields are set.
func (t *terms) beside(c *kvstate.Candidate, b *batch) {
	slow := slowness(c)
	pace, steps := speed(c, t.fleet)*slow, t.m.steps(b.uncached)
	p := &b.prompt
	p.queue, p.takes, p.longer = seconds(c.Queue+c.Local)*slow, b.work*pace, (b.work-t.m.PrefillStep*steps)*pace
	p.fill = max(b.answers/t.m.MaxAnswers, b.kv/b.freeKV)
	if b.answers > 0 { // chunks share the steps of answers; without answers they need steps of their own
		p.takes = p.longer + steps*b.step
	}
}

// delayed returns the price of the time that a number of answers lose. It grows with how full the endpoint is: answers
// that wait for room there lose time, too.
func (p *beside) delayed(t *terms, answers float64) float64 {
	return t.answer * answers * p.longer / max(1-p.fill, 1-maxFill)
}

// prefillBeside completes the price of prefill on an endpoint that may write answers, too.
func (t *terms) prefillBeside(b *batch, p *PrefillPrice) {
	p.Queue = b.prompt.queue
	if b.answers <= 0 {
		return
	}
	p.Queue *= 1 + b.step/t.fullStep
	p.Work = b.prompt.takes
	p.Answers = b.prompt.delayed(t, b.answers)
}

// decodeBeside completes the price of decode on an endpoint that computes prompts, too: the first token waits for the
// prompts that are there, and later tokens for prompts that come.
func (t *terms) decodeBeside(c *kvstate.Candidate, b *batch, p *DecodePrice) {
	p.Step += seconds(c.Queue+c.Local) * slowness(c)
	p.Answer = t.answer * t.out * b.token
}

// tokenTime returns the time from one token to the next with such steps. Prompts take their share of the endpoint's
// time, but no more than the promise leaves: from there on prompts go to another endpoint.
func (t *terms) tokenTime(c *kvstate.Candidate, step float64) float64 {
	with := step / max(1-c.Share, minLeft)
	if t.tpot > 0 {
		with = min(with, max(step, tpotMargin*t.tpot))
	}
	return with
}
