package kvstate

import "time"

// forgetEvery is how long a pool may plan requests while no engine counts a prompt's tokens, until what was learned of
// them is doubted: mostly P counts them, and who splits nothing for a wrong estimate would not learn a better one.
const forgetEvery = 10 * time.Minute

// forget lowers the trust in learned numbers of tokens, of text and of media, if none were counted since its last call.
// A pool without requests forgets nothing.
func (p *Pool) forget(now int64) {
	last := p.forgot.Load()
	if now-last < int64(forgetEvery) || !p.forgot.CompareAndSwap(last, now) || last == 0 {
		return
	}
	if !p.ratio.fresh.Swap(false) {
		p.ratio.forget()
	}
	p.density.Forget(1 / p.ratio.bytesPerToken())
	p.media.Forget()
}

// keptTokens is how much is left of a ratio's weight, at most, before it is doubted for the first time: old samples
// must not take hours to fade.
const keptTokens = 16 * priorTokens

// forget moves a ratio of tokens three quarters of the way to where it began.
func (d *fadingRatio) forget() {
	above, below := float64(d.above.Load()), float64(d.below.Load())
	part := min(keptTokens/below, 1)
	d.above.Store(int64(4*priorTokens + (above*part-4*priorTokens)/4))
	d.below.Store(int64(priorTokens + (below*part-priorTokens)/4))
}
