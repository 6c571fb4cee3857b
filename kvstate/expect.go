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

// IndexBlocks is how many blocks the pool's prefix index names now, and how many at most.
func (p *Pool) IndexBlocks() (blocks, limit int) {
	p.index.mu.RLock()
	defer p.index.mu.RUnlock()
	return len(p.index.now) + len(p.index.old), 2 * p.index.half
}
