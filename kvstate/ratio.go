package kvstate

import (
	"sync/atomic"
	"time"
)

// tokenRatio learns how many bytes of a body make a token, as a ratio of decayed sums: large prompts count for what they
// are, and small ones do not distort it.
type tokenRatio struct {
	bytes, tokens atomic.Int64
}

// The start: 4 bytes a token, with the weight of a medium prompt. Beyond ratioCap tokens both sums are halved.
const (
	priorTokens = 1000
	ratioCap    = 1 << 22
)

func newTokenRatio() *tokenRatio {
	r := &tokenRatio{}
	r.bytes.Store(4 * priorTokens)
	r.tokens.Store(priorTokens)
	return r
}

// ObservePrompt tells the pool how many tokens an engine counted for a body of that many bytes.
func (p *Pool) ObservePrompt(bytes, tokens int64) {
	if bytes <= 0 || tokens <= 0 || tokens > bytes*4 {
		return
	}
	p.ratio.bytes.Add(bytes)
	if p.ratio.tokens.Add(tokens) > ratioCap { // two who race here halve twice, which the ratio survives
		p.ratio.bytes.Store(p.ratio.bytes.Load() / 2)
		p.ratio.tokens.Store(p.ratio.tokens.Load() / 2)
	}
}

// PromptTokens estimates the tokens of a body of that many bytes: between 1 and 16 bytes make one.
func (p *Pool) PromptTokens(bytes int) int64 {
	b, t := p.ratio.bytes.Load(), p.ratio.tokens.Load()
	n := int64(float64(bytes) * float64(t) / float64(b))
	return max(min(n, int64(bytes)), int64(bytes)/16, 1)
}

// prefillPace learns how long the pool's prefill endpoints take for a token, queue included, as a ratio of decayed sums.
type prefillPace struct {
	nanos, tokens atomic.Int64
}

// paceTokens is how many tokens are seen before the pace counts, and paceCap where both sums are halved.
const (
	paceTokens = 1 << 14
	paceCap    = 1 << 20
	paceMargin = 4 // times the mean: a limit that cuts off a healthy endpoint costs more than one that waits for a dead one
)

// ObservePrefill tells the pool how long a prefill hop over that many tokens took.
func (p *Pool) ObservePrefill(tokens int64, took time.Duration) {
	if tokens <= 0 || took <= 0 {
		return
	}
	p.pace.nanos.Add(int64(took))
	if p.pace.tokens.Add(tokens) > paceCap {
		p.pace.tokens.Store(p.pace.tokens.Load() / 2)
		p.pace.nanos.Store(p.pace.nanos.Load() / 2)
	}
}

// PrefillTime is the longest that computing so many tokens should take: perToken for each of them, until what was seen
// says otherwise, but then no less than a quarter of it and no more than sixteen times.
func (p *Pool) PrefillTime(tokens int64, perToken time.Duration) time.Duration {
	pace := perToken
	if seen := p.pace.tokens.Load(); seen >= paceTokens {
		pace = time.Duration(paceMargin * p.pace.nanos.Load() / seen)
		pace = max(min(pace, 16*perToken), perToken/4)
	}
	return time.Duration(max(tokens, 0)) * pace
}
