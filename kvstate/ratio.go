package kvstate

import (
	"sync/atomic"
	"time"
)

// fadingRatio is a ratio of sums in which what was seen long ago counts little: large samples count for what they are, and small
// ones do not distort it.
type fadingRatio struct{ above, below atomic.Int64 }

// add takes a sample. Where the lower sum is beyond limit both are halved; two who race there halve twice, which the ratio
// survives.
func (d *fadingRatio) add(above, below, limit int64) {
	d.above.Add(above)
	if d.below.Add(below) > limit {
		d.above.Store(d.above.Load() / 2)
		d.below.Store(d.below.Load() / 2)
	}
}

// The start of bytes per token: 4, with the weight of a medium prompt; and the tokens beyond which old ones are forgotten.
const (
	priorTokens = 1000
	ratioCap    = 1 << 22
)

func newTokenRatio() *fadingRatio {
	r := &fadingRatio{}
	r.add(4*priorTokens, priorTokens, ratioCap)
	return r
}

// bytesPerToken is that of the prompts seen so far.
func (d *fadingRatio) bytesPerToken() float64 {
	return float64(d.above.Load()) / float64(d.below.Load())
}

// ObservePrompt tells the pool how many tokens an engine counted for a body of that many bytes.
func (p *Pool) ObservePrompt(bytes, tokens int64) {
	if bytes > 0 && tokens > 0 && tokens <= bytes*4 {
		p.ratio.add(bytes, tokens, ratioCap)
	}
}

// PromptTokens estimates the tokens of a body of that many bytes: between 1 and 16 bytes make one.
func (p *Pool) PromptTokens(bytes int) int64 {
	n := int64(float64(bytes) * float64(p.ratio.below.Load()) / float64(p.ratio.above.Load()))
	return max(min(n, int64(bytes)), int64(bytes)/16, 1)
}

// paceTokens is how many tokens are seen before the pace of prefill counts, and paceCap where old ones are forgotten.
const (
	paceTokens = 1 << 14
	paceCap    = 1 << 20
	paceMargin = 4 // times the mean: a limit that cuts off a healthy endpoint costs more than one that waits for a dead one
)

// ObservePrefill tells the pool how long a prefill hop over that many tokens took, queue included.
func (p *Pool) ObservePrefill(tokens int64, took time.Duration) {
	if tokens > 0 && took > 0 {
		p.pace.add(int64(took), tokens, paceCap)
	}
}

// PrefillTime is the longest that computing so many tokens should take: perToken for each of them, until what was seen
// says otherwise, but then no less than a quarter of it and no more than sixteen times.
func (p *Pool) PrefillTime(tokens int64, perToken time.Duration) time.Duration {
	pace := perToken
	if seen := p.pace.below.Load(); seen >= paceTokens {
		pace = time.Duration(paceMargin * p.pace.above.Load() / seen)
		pace = max(min(pace, 16*perToken), perToken/4)
	}
	return time.Duration(max(tokens, 0)) * pace
}
