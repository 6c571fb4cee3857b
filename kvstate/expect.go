package kvstate

import "time"

// ExpectedPrefill is how long the pool's prefill endpoints have lately taken for so many tokens, queue included; 0 until
// enough was seen. It is the mean, where [Pool.PrefillTime] is a limit.
func (p *Pool) ExpectedPrefill(tokens int64) time.Duration {
	seen := p.pace.tokens.Load()
	if seen < paceTokens {
		return 0
	}
	return time.Duration(float64(max(tokens, 0)) * float64(p.pace.nanos.Load()) / float64(seen))
}
