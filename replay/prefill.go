package replay

import (
	"math"

	"tandem/picker"
)

// prefiller is an engine that computes prompts: first come, first served, in steps of at most Model.StepTokens tokens.
type prefiller struct {
	*clock
	model picker.Model
	cache *cache
	done  func(*job)
	index *index
	end   func() // of a step; allocated once

	queue   []*job
	running bool
	chunks  []int // tokens of the first jobs of the queue in the running step

	computed, cached int     // tokens, in total
	worked           float64 // seconds
}

func newPrefiller(c *clock, m picker.Model, done func(*job)) *prefiller {
	p := &prefiller{clock: c, model: m, cache: newCache(capacity(m)), done: done}
	p.end, p.index = p.endStep, newIndex(p)
	return p
}

// capacity returns the number of blocks that a cache can hold.
func capacity(m picker.Model) int {
	if math.IsInf(m.KVTokens, 1) {
		return 0
	}
	return max(int(m.KVTokens)/BlockTokens, 1)
}

func (p *prefiller) add(j *job) {
	p.queue = append(p.queue, j)
	if !p.running {
		p.step()
	}
}

// step begins a step, if there is work.
func (p *prefiller) step() {
	p.running = len(p.queue) > 0
	if !p.running {
		return
	}
	p.chunks = p.chunks[:0]
	took, left := p.model.PrefillStep, int(p.model.StepTokens)
	for _, j := range p.queue {
		if left == 0 {
			break
		}
		if !j.started {
			j.begin(p.cache)
			p.cached += j.cached
			p.computed += j.Input - j.cached
		}
		n := min(left, j.Input-j.computed)
		left -= n
		took += chunkTime(&p.model, n, j.computed)
		p.chunks = append(p.chunks, n)
	}
	p.worked += took
	p.after(took, p.end)
}

// chunkTime returns the seconds that n tokens add to a step, when before tokens of the prompt are computed.
func chunkTime(m *picker.Model, n, before int) float64 {
	return m.PrefillToken*float64(n) + m.PrefillContext*float64(n)*(float64(before)+float64(n)/2)
}

func (p *prefiller) endStep() {
	ended := 0
	for i, n := range p.chunks {
		j := p.queue[i]
		j.computed += n
		p.cache.add(j.have(), p.cache.capacity)
		if j.computed == j.Input {
			ended++ // they end in order: only the last one of a step can be incomplete
		}
	}
	for _, j := range p.queue[:ended] {
		p.index.done(j.Blocks)
		p.done(j)
	}
	p.queue = append(p.queue[:0], p.queue[ended:]...)
	p.step()
}

// begin looks the prompt up in the cache when the engine admits it.
func (j *job) begin(c *cache) {
	j.started = true
	j.cached = min(c.hit(j.Blocks)*BlockTokens, j.Input-1)
	j.computed = j.cached
}

// length returns the number of tokens to compute: the prompt, and the written part of an answer that was preempted.
func (j *job) length() int { return j.Input + j.written }

// have returns the blocks that are computed.
func (j *job) have() []uint64 {
	if j.computed >= j.Input {
		return j.Blocks
	}
	return j.Blocks[:min(j.computed/BlockTokens, len(j.Blocks))]
}
