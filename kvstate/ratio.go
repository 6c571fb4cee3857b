package kvstate

import (
	"sync/atomic"
	"time"

	"tandem/kvstate/media"
)

// PromptSize is what the tokens of a prompt are estimated from.
type PromptSize struct {
	Text    int         // bytes of text
	Counted int64       // tokens that need no estimate
	Media   media.Count // whose bytes say nothing
}

// EstimateTokens estimates the number of tokens of a prompt for a model.
func (p *Pool) EstimateTokens(model string, s *PromptSize) int64 {
	return p.PromptTokens(s.Text) + p.TokensBeside(model, s)
}

// TokensBeside is the part of [Pool.EstimateTokens] that does not come from text.
func (p *Pool) TokensBeside(model string, s *PromptSize) int64 {
	return s.Counted + p.media.Estimate(model, s.Media)
}

// LearnPrompt learns from a prompt in which an engine has counted some tokens: from one of text how many bytes a token
// has, from one with media how many tokens a medium has.
func (p *Pool) LearnPrompt(model string, s *PromptSize, tokens int64) {
	switch {
	case s.Counted > 0 || tokens <= 0:
	case s.Media.Any():
		p.media.Observe(model, s.Media, tokens, p.PromptTokens(s.Text))
	default:
		p.ObservePrompt(int64(s.Text), tokens)
	}
}

// fadingRatio is a ratio of two sums in which old samples fade. Large samples weigh more than small ones.
type fadingRatio struct {
	above, below atomic.Int64
	fresh        atomic.Bool // it had a sample lately; see forget
}

// add adds a sample. When the lower sum exceeds limit, both are halved. Two concurrent callers may halve twice,
// which changes the ratio little.
func (d *fadingRatio) add(above, below, limit int64) {
	d.above.Add(above)
	if !d.fresh.Load() {
		d.fresh.Store(true)
	}
	if d.below.Add(below) > limit {
		d.above.Store(d.above.Load() / 2)
		d.below.Store(d.below.Load() / 2)
	}
}

// Initial bytes per token: 4, weighted like a medium prompt; and the number of tokens at which old samples are
// halved.
const (
	priorTokens = 1000
	ratioCap    = 1 << 22
)

func newTokenRatio() *fadingRatio {
	r := &fadingRatio{}
	r.add(4*priorTokens, priorTokens, ratioCap)
	return r
}

// bytesPerToken returns the ratio over the prompts observed so far.
func (d *fadingRatio) bytesPerToken() float64 {
	return float64(d.above.Load()) / float64(d.below.Load())
}

// ObservePrompt records the number of tokens that an engine counted in some bytes of text.
func (p *Pool) ObservePrompt(bytes, tokens int64) {
	if bytes > 0 && tokens > 0 && tokens <= bytes*4 {
		p.ratio.add(bytes, tokens, ratioCap)
		p.density.Observe(bytes, tokens)
	}
}

// PromptTokens estimates the number of tokens of a text: one token has between 1 and 16 bytes.
func (p *Pool) PromptTokens(bytes int) int64 {
	n := int64(float64(bytes) * float64(p.ratio.below.Load()) / float64(p.ratio.above.Load()))
	return max(min(n, int64(bytes)), int64(bytes)/16, 1)
}

// paceTokens is the number of tokens before the observed pace of prefill is used, paceCap the number at which old
// samples are halved.
const (
	paceTokens = 1 << 14
	paceCap    = 1 << 20
	paceMargin = 4 // times the mean: cutting off a healthy endpoint costs more than waiting for a dead one
)

// ObservePrefill records how long a prefill hop of some tokens took, queueing included.
func (p *Pool) ObservePrefill(tokens int64, took time.Duration) {
	if tokens > 0 && took > 0 {
		p.pace.add(int64(took), tokens, paceCap)
	}
}

// PrefillTime returns the longest time that a prefill of some tokens should take: perToken for each token at first,
// then a multiple of the observed pace, between a quarter and 16 times of that.
func (p *Pool) PrefillTime(tokens int64, perToken time.Duration) time.Duration {
	pace := perToken
	if seen := p.pace.below.Load(); seen >= paceTokens {
		pace = time.Duration(paceMargin * p.pace.above.Load() / seen)
		pace = max(min(pace, 16*perToken), perToken/4)
	}
	return time.Duration(max(tokens, 0)) * pace
}
