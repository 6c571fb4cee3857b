package replay

import (
	"math"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/picker"
)

// decoder is an engine that writes answers: each step gives every answer of the batch one token. Prompts that no other
// engine computes are computed in chunks, one in each step. If the answers outgrow the memory, the youngest is
// preempted: its KV is discarded, and computed again when there is memory.
type decoder struct {
	*clock
	model picker.Model
	cache *cache
	local int        // prompt and answer tokens in one step of its own
	first func(*job) // called at the first token of an answer
	done  func(*job)
	end   func()

	arrived []*job // no memory for them yet
	prompts []*job // to compute here
	chunk   int    // tokens of the first of those in the running step
	batch   []*job // a heap: the one that ends first is first
	fresh   []*job // joined since the last step began: their first token is due at its end
	joining []*job // join at the next step
	held    int    // answers that have memory, running transfers included
	kv      int    // tokens of all answers in held
	steps   int
	running bool

	joins int
	took  float64 // seconds that the running step takes
	tally
}

// tally is what a decode engine has done so far.
type tally struct {
	computed, cached, tokens int
	preempted                int
	// as the engine's metrics report them
	written kvstate.AnswerCounters
	moved   kvstate.TransferCounters
}

func newDecoder(c *clock, m picker.Model, local int, first, done func(*job)) *decoder {
	d := &decoder{clock: c, model: m, cache: newCache(capacity(m)), local: local, first: first, done: done}
	d.end = d.endStep
	return d
}

// add brings a request to this engine: its KV is fetched from another endpoint, or (alone) its prompt is computed
// here.
func (d *decoder) add(j *job) {
	d.arrived = append(d.arrived, j)
	d.admit()
}

// reserved is the number of answer tokens for which memory must be free before a request is admitted. (SGLang:
// num_reserved_decode_tokens. vLLM reserves nothing, and preempts sooner.)
const reserved = 512

// admit admits waiting requests, in order, while there is memory for their KV and the beginning of their answer.
func (d *decoder) admit() {
	n := 0
	for _, j := range d.arrived {
		if float64(d.held) >= d.model.MaxAnswers || d.held > 0 && float64(d.kv+j.length()+reserved) > d.model.KVTokens {
			break
		}
		n++
		d.held++
		d.kv += j.length()
		if j.alone || j.written > 0 {
			d.prompts = append(d.prompts, j)
			d.wake()
			continue
		}
		missing := j.Input - min(d.cache.hit(j.Blocks)*BlockTokens, j.Input-1)
		transfer := d.model.TransferLag + float64(missing)*d.model.TokenBytes/d.model.Bandwidth
		d.after(transfer, func() { d.fetched(j, missing, transfer) })
	}
	d.arrived = append(d.arrived[:0], d.arrived[n:]...)
}

// fetched counts a transfer that has ended after so many seconds, as vLLM's NIXL connector does, and joins its answer.
func (d *decoder) fetched(j *job, tokens int, seconds float64) {
	d.moved.Transfers++
	d.moved.Bytes += int64(float64(tokens) * d.model.TokenBytes)
	d.moved.Tokens += int64(tokens)
	d.moved.Time += kvstate.Seconds(seconds)
	d.join(j)
}

// join adds an answer to the batch. Its KV is complete.
func (d *decoder) join(j *job) {
	d.hold(j.Blocks)
	d.joining = append(d.joining, j)
	d.wake()
}

// hold caches blocks as prefixes, in the memory that the answers leave free.
func (d *decoder) hold(blocks []uint64) {
	limit := 0
	if d.cache.capacity > 0 {
		limit = int((d.model.KVTokens - float64(d.kv)) / BlockTokens)
	}
	d.cache.add(blocks, limit)
}

func (d *decoder) wake() {
	if !d.running {
		d.step()
	}
}

func (d *decoder) step() {
	for _, j := range d.joining {
		j.ends = d.steps + j.Output
		d.push(j)
		d.fresh = append(d.fresh, j)
	}
	d.joining = d.joining[:0]
	d.running = len(d.batch)+len(d.prompts) > 0
	if !d.running {
		return
	}
	took := 0.0
	if len(d.batch) > 0 {
		took += d.model.DecodeStep + d.model.DecodeAnswer*float64(len(d.batch)) + d.model.DecodeToken*float64(d.kv)
	}
	if len(d.prompts) > 0 {
		j := d.prompts[0]
		if !j.started {
			j.begin(d.cache)
			d.cached += j.cached
			d.computed += j.length() - j.cached
		}
		d.chunk = min(j.length()-j.computed, max(d.local-len(d.batch), 1)) // answers take their part of the step
		if len(d.batch) == 0 {
			took += d.model.PrefillStep // otherwise the chunk is computed in the step that the answers need anyway
		}
		took += chunkTime(&d.model, d.chunk, j.computed)
	}
	d.took = took
	d.after(took, d.end)
}

func (d *decoder) endStep() {
	if len(d.batch) > 0 {
		d.steps++
		d.kv += len(d.batch)
		d.tokens += len(d.batch)
		gaps := len(d.batch) - len(d.fresh)
		d.written.Gaps += int64(gaps)
		d.written.GapTime += time.Duration(float64(gaps) * d.took * float64(time.Second))
	}
	for _, j := range d.fresh {
		d.first(j)
	}
	d.fresh = d.fresh[:0]
	for len(d.batch) > 0 && d.batch[0].ends <= d.steps {
		j := d.pop()
		d.held--
		d.finish(j)
	}
	if d.chunk > 0 {
		j := d.prompts[0]
		j.computed += d.chunk
		d.chunk = 0
		d.hold(j.have())
		if j.computed == j.length() {
			d.prompts = append(d.prompts[:0], d.prompts[1:]...)
			d.joinComputed(j)
		}
	}
	d.preempt()
	d.admit()
	d.step()
}

// finish frees the memory of an answer that is written.
func (d *decoder) finish(j *job) {
	d.kv -= j.Input + j.Output
	d.written.Answers++
	d.written.Tokens += int64(j.Output)
	d.done(j)
}

// preempt removes the youngest answers as long as the KV of all does not fit.
func (d *decoder) preempt() {
	for float64(d.kv) > d.model.KVTokens && len(d.batch) > 1 {
		at := 0
		for i, j := range d.batch {
			if j.joined > d.batch[at].joined {
				at = i
			}
		}
		j := d.batch[at]
		d.batch = slices.Delete(d.batch, at, at+1)
		all := d.batch
		d.batch = d.batch[:0]
		for _, other := range all {
			d.push(other)
		}
		j.written = j.Output - (j.ends - d.steps)
		d.kv -= j.length()
		d.held--
		d.preempted++
		j.started, j.computed = false, 0
		d.arrived = slices.Insert(d.arrived, 0, j)
	}
}

// joinComputed adds a prompt that was computed here to the batch. Computing it has produced the first token already.
func (d *decoder) joinComputed(j *job) {
	if j.written == 0 {
		d.first(j)
	}
	d.kv++
	left := j.Output - j.written - 1
	if left == 0 {
		d.held--
		d.finish(j)
		return
	}
	j.ends = d.steps + left
	d.push(j)
}

func (d *decoder) push(j *job) {
	if j.joined == 0 {
		d.joins++
		j.joined = d.joins
	}
	d.batch = append(d.batch, j)
	for i := len(d.batch) - 1; i > 0; {
		up := (i - 1) / 2
		if d.batch[up].ends <= d.batch[i].ends {
			break
		}
		d.batch[up], d.batch[i] = d.batch[i], d.batch[up]
		i = up
	}
}

func (d *decoder) pop() *job {
	top, last := d.batch[0], len(d.batch)-1
	d.batch[0] = d.batch[last]
	d.batch = d.batch[:last]
	for i := 0; ; {
		least := i
		for down := 2*i + 1; down <= 2*i+2 && down < last; down++ {
			if d.batch[down].ends < d.batch[least].ends {
				least = down
			}
		}
		if least == i {
			break
		}
		d.batch[i], d.batch[least] = d.batch[least], d.batch[i]
		i = least
	}
	return top
}

// throughput returns the tokens per second that the batch gets now.
func (d *decoder) throughput() float64 {
	if len(d.batch) == 0 {
		return 0
	}
	n := float64(len(d.batch))
	return n / (d.model.DecodeStep + d.model.DecodeAnswer*n + d.model.DecodeToken*float64(d.kv))
}

// usage returns the share of the KV memory that answers take.
func (d *decoder) usage() float64 {
	if math.IsInf(d.model.KVTokens, 1) {
		return 0
	}
	return min(float64(d.kv)/d.model.KVTokens, 1)
}
