package kvstate

import "sync/atomic"

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
