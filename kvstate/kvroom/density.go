package kvroom

import (
	"math"
	"sync/atomic"
)

// Density is how many tokens a byte of a pool's prompts may have. An estimate of a prompt's length that is right on the
// average is too low for half of them, and may be for all until the first ones have been counted; engines whose memory
// was given away by such estimates wait for each other. The zero value has seen no prompt. It is safe for concurrent
// use.
type Density struct {
	most  atomic.Uint64 // tokens in a byte, the bits of a float64; 0: none seen
	fresh atomic.Bool   // it had a sample lately; see Forget
}

const (
	leastSample = 64 // tokens: the template is most of a shorter prompt
	fading      = 1. / 64
	margin      = 1.25 // over the densest prompt of late
)

// Observe records the number of tokens that an engine counted in a body of some bytes.
func (d *Density) Observe(bytes, tokens int64) {
	if bytes <= 0 || tokens < leastSample {
		return
	}
	seen := float64(tokens) / float64(bytes)
	most := math.Float64frombits(d.most.Load())
	d.most.Store(math.Float64bits(max(seen, most+(seen-most)*fading)))
	d.fresh.Store(true)
}

// Forget lowers the trust in what was seen, if nothing was seen since the last call: the estimate goes three quarters
// of the way to the given mean, in tokens per byte. A prompt that was far denser than others would keep others out for
// ever.
func (d *Density) Forget(mean float64) {
	most := math.Float64frombits(d.most.Load())
	if !d.fresh.Swap(false) && most > mean {
		d.most.Store(math.Float64bits(mean + (most-mean)/4))
	}
}

// Most returns how many tokens a byte may have. Until prompts have been counted, it assumes that a token has at least
// one byte.
func (d *Density) Most() float64 {
	if seen := math.Float64frombits(d.most.Load()); seen > 0 {
		return margin * seen
	}
	return 1
}
