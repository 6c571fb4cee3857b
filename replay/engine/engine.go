package engine

import (
	"math"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/picker"
)

// Engine is one engine. Each step gives every running answer a token, and computes chunks of prompts with the tokens
// that the answers leave of it. Requests get memory in order of arrival, while a step has tokens left for a prompt and
// there is memory for its KV and the beginning of its answer. If answers outgrow the memory, the youngest is preempted:
// its KV is discarded, and computed again when there is memory.
type Engine struct {
	*Clock
	model  picker.Model
	tokens int // of prompts and answers in one step (vLLM: max_num_batched_tokens)
	on     Events
	end    func()
	// prompts on their way or being computed that have a block
	pending map[uint64]int32

	waiting []*Job // for memory
	prompts []*Job // being computed
	chunks  []int  // tokens of the first of those in the running step
	batch   batch
	fresh   []*Job // joined since the last step began: their first token is due at its end
	joining []*Job // join at the next step
	fetched []*Job // whose KV came while a step ran, where the engine polls: the next step notices it
	polls   bool
	running bool

	host  hostMemory
	parts map[uint64]bool // beginnings of blocks that were computed
	kvMemory
	kv    int // tokens of KV that a step of the answers reads
	steps int
	joins int
	took  float64 // seconds that the running step takes
	Tally
}

// kvMemory is what the engine's KV memory is used for.
type kvMemory struct {
	cache    *Cache
	requests int // that have memory, fetching ones included; prompts that wait to be fetched do not count
	loose    int // tokens in memory beside the requests' blocks
	held     int // tokens of prompts that were computed for others and are not fetched yet
}

// hostMemory keeps a copy of what the engine computes, and loads what its KV memory has lost, one prompt after the
// other.
type hostMemory struct {
	cache *Cache // nil: there is none
	limit int    // blocks
	rate  float64
	free  float64 // when the last load ends
}

// hit returns the number of leading blocks that the memory holds.
func (h *hostMemory) hit(blocks []uint64) int {
	if h.cache == nil {
		return 0
	}
	whole, _ := h.cache.Hit(blocks)
	return whole
}

func (h *hostMemory) has(b uint64) bool { return h.cache != nil && h.cache.has(b) }

// Events are called as an engine works.
type Events struct {
	Started func(j *Job, cached, computes int) // a prompt is about to be computed, but for what is cached; may be nil
	// a prompt has been computed for another engine, whose Add must follow, now or later
	Prefilled func(*Job)
	First     func(*Job) // the first token of an answer
	Done      func(*Job) // the last one
}

// Tally is what an engine has done so far.
type Tally struct {
	Computed, Cached int // tokens of prompts
	Loaded           int // of the cached ones, those that came from host memory
	Preempted        int
	PromptTime       float64 // seconds that prompts took
	Alone            float64 // of those, seconds without answers beside them
	Lost             float64 // seconds that answers waited for prompts, summed over answers
	// as the engine's metrics report them
	Written kvstate.AnswerCounters
	Moved   kvstate.TransferCounters
}

// New returns an idle engine that processes so many tokens in a step.
func New(c *Clock, m picker.Model, tokens int, on Events) *Engine {
	e := &Engine{Clock: c, model: m, tokens: tokens, on: on, pending: map[uint64]int32{}, parts: map[uint64]bool{}}
	e.cache = NewCache(!math.IsInf(m.KVTokens, 1))
	e.end = e.endStep
	return e
}

// HostTokens returns the tokens of KV that the engine keeps in host memory. It has copies there of what it computes.
func (e *Engine) HostTokens() float64 { return float64(e.host.limit * BlockTokens) }

// Host gives the engine host memory for the KV of so many tokens, which it loads at a rate in tokens per second.
func Host(e *Engine, tokens, rate float64) {
	e.host = hostMemory{cache: NewCache(true), limit: int(tokens / BlockTokens), rate: rate}
}

// Poll makes the engine look whether KV has come from other engines when a step has begun, as vLLM does (0.32.0,
// v1/worker/kv_connector_model_runner_mixin.py): the answer joins the step after that one. Without, it joins the step
// after the one in which its KV came.
func Poll(e *Engine) { e.polls = true }

// Add brings a request's leg to this engine.
func (e *Engine) Add(j *Job, leg Leg) {
	j.leg = leg
	if leg != Decode {
		j.computed = 0
		for _, b := range j.Blocks {
			e.pending[b]++
		}
	}
	e.waiting = append(e.waiting, j)
	e.wake()
}

// wake begins a step if none runs and there is work.
func (e *Engine) wake() {
	if !e.running {
		e.step()
	}
}

// reserved is the number of answer tokens for which memory must be free before a request is admitted. (SGLang:
// num_reserved_decode_tokens. vLLM reserves nothing, and preempts sooner.)
const reserved = 512

// admit gives memory to waiting requests, in order.
func (e *Engine) admit() {
	budget := e.tokens - len(e.batch) - len(e.joining) - len(e.fetched)
	for _, j := range e.prompts {
		budget -= j.length() - j.computed
	}
	n := 0
	for _, j := range e.waiting {
		if budget <= 0 || !e.Fits(j) {
			break
		}
		n++
		e.requests++
		e.cache.pin(j.Blocks)
		e.loose += j.loose()
		if j.leg == Decode {
			e.fetch(j)
			continue
		}
		whole, tokens := e.cache.Hit(j.Blocks)
		if p := &j.Part; whole == p.Behind && e.parts[p.ID] {
			tokens = max(tokens, p.Tokens)
		}
		if more := e.host.hit(j.Blocks[whole:]); more > 0 {
			e.load(j, whole, whole+more)
			continue
		}
		e.start(j, whole, tokens)
		budget -= j.length() - j.computed
	}
	e.waiting = slices.Delete(e.waiting, 0, n)
}

// start begins to compute a prompt of which so many whole blocks, and tokens of the next one, are cached.
func (e *Engine) start(j *Job, whole, tokens int) {
	j.cached = j.cachedTokens(whole, tokens)
	j.computed = j.cached
	e.Cached += j.cached
	e.Computed += j.length() - j.cached
	e.prompts = append(e.prompts, j)
	if e.on.Started != nil {
		e.on.Started(j, j.cached, j.length()-j.cached)
	}
}

// load brings the blocks of a prompt between two positions from host memory, and starts it then.
func (e *Engine) load(j *Job, from, to int) {
	tokens := (to - from) * BlockTokens
	e.Loaded += tokens
	e.host.free = max(e.host.free, e.Now) + float64(tokens)/e.host.rate
	e.After(e.host.free-e.Now, func() {
		e.hold(j.Blocks[:to], BlockTokens)
		e.start(j, to, 0)
		e.wake()
	})
}

// Fits reports whether there is memory for a request. One that is larger than the memory gets it all.
func (e *Engine) Fits(j *Job) bool {
	if e.requests == 0 && e.held == 0 {
		return true
	}
	if float64(e.requests) >= e.model.MaxAnswers {
		return false
	}
	need := e.cache.unpinned(j.Blocks)*BlockTokens + j.loose() + reserved
	return float64(e.memory()+need) <= e.model.KVTokens
}

// memory returns the tokens of KV memory that requests take: a block that several of them have counts once.
func (e *Engine) memory() int { return len(e.cache.pins)*BlockTokens + e.loose }

// Usage returns the share of the KV memory that requests take, as the engine reports it.
func (e *Engine) Usage() float64 {
	if math.IsInf(e.model.KVTokens, 1) {
		return 0
	}
	return min(max(float64(e.memory())/e.model.KVTokens, 0), 1)
}

// fetch begins to transfer the part of a prompt's KV that is not here.
func (e *Engine) fetch(j *Job) {
	tokens := j.Input - j.cachedTokens(e.cache.Hit(j.Blocks))
	seconds := e.model.TransferLag + float64(tokens)*e.model.TokenBytes/e.model.Bandwidth
	e.After(seconds, func() {
		// counted as by vLLM's NIXL connector
		e.Moved.Transfers++
		e.Moved.Bytes += int64(float64(tokens) * e.model.TokenBytes)
		e.Moved.Tokens += int64(tokens)
		e.Moved.Time += kvstate.Seconds(seconds)
		if from := j.from; from != nil {
			from.Reclaim(j)
			from.wake()
		}
		e.hold(j.Blocks, j.ofLast(j.Blocks, j.Input))
		if e.polls && e.running {
			e.fetched = append(e.fetched, j)
			return
		}
		e.joining = append(e.joining, j)
		e.wake()
	})
}

// Reclaim frees the KV of a prompt that this engine computed for another one, which will not fetch it. It stays cached.
func (e *Engine) Reclaim(j *Job) {
	j.from = nil
	e.held -= j.Input
	free(e, j)
}

// free frees a request's memory.
func free(e *Engine, j *Job) {
	e.cache.unpin(j.Blocks)
	e.loose -= j.loose()
}

// Keep keeps the cached ones of blocks in memory, as if a request had them, until Release.
func Keep(e *Engine, blocks []uint64) { e.cache.pin(blocks) }

// Release reverses Keep.
func Release(e *Engine, blocks []uint64) { e.cache.unpin(blocks); e.wake() }

// Forget empties the cache of an engine that does nothing.
func Forget(e *Engine) { e.cache = NewCache(e.cache.limited) }

// hold caches computed or fetched blocks as prefixes, the last of which has so many tokens, in the memory that requests
// leave free.
func (e *Engine) hold(blocks []uint64, last int) {
	limit := 0
	if e.cache.limited {
		limit = int((e.model.KVTokens - float64(e.loose)) / BlockTokens)
	}
	e.cache.Add(blocks, last, limit)
	if e.host.cache != nil {
		e.host.cache.Add(blocks, last, e.host.limit)
	}
}

// step begins a step, if there is work.
func (e *Engine) step() {
	e.admit()
	e.joinAll()
	e.joining, e.fetched = append(e.joining, e.fetched...), e.fetched[:0]
	if len(e.batch)+len(e.prompts) == 0 {
		e.joinAll() // a step without anything to compute takes no time
	}
	e.running = len(e.batch)+len(e.prompts) > 0
	if !e.running {
		return
	}
	answers, left, prompts := len(e.batch), max(e.tokens-len(e.batch), 1), 0.0
	if len(e.prompts) > 0 && answers == 0 {
		prompts = e.model.PrefillStep // else prompts share the step that answers need anyway
	}
	e.chunks = e.chunks[:0]
	for _, j := range e.prompts {
		if left <= 0 {
			break
		}
		n := min(j.length()-j.computed, left)
		left -= n
		prompts += ChunkTime(&e.model, n, j.computed)
		e.chunks = append(e.chunks, n)
	}
	e.took = prompts
	e.PromptTime += prompts
	e.Lost += prompts * float64(answers)
	if answers > 0 {
		e.took += e.answerStep()
	} else {
		e.Alone += prompts
	}
	e.After(e.took, e.end)
}

// joinAll lets those begin to write whose KV is here.
func (e *Engine) joinAll() {
	for _, j := range e.joining {
		e.fresh = append(e.fresh, j)
		e.join(j, j.Output)
	}
	e.joining = e.joining[:0]
}

// answerStep returns the time of a step without prompts.
func (e *Engine) answerStep() float64 {
	return e.model.DecodeStep + e.model.DecodeAnswer*float64(len(e.batch)) + e.model.DecodeToken*float64(e.kv)
}

// ChunkTime returns the seconds that n tokens add to a step, when before tokens of the prompt are computed.
func ChunkTime(m *picker.Model, n, before int) float64 {
	return m.PrefillToken*float64(n) + m.PrefillContext*float64(n)*(float64(before)+float64(n)/2)
}

// join adds an answer to the batch, with so many tokens left to write.
func (e *Engine) join(j *Job, left int) {
	if j.joined == 0 {
		e.joins++
		j.joined = e.joins
	}
	j.ends = e.steps + left
	e.kv += j.Input + j.Output - left
	e.batch.push(j)
}

func (e *Engine) endStep() {
	if n := len(e.batch); n > 0 {
		e.steps++
		e.kv += n
		e.loose += n
		gaps := n - len(e.fresh)
		e.Written.Gaps += int64(gaps)
		e.Written.GapTime += time.Duration(float64(gaps) * e.took * float64(time.Second))
	}
	for _, j := range e.fresh {
		e.on.First(j)
	}
	e.fresh = e.fresh[:0]
	for len(e.batch) > 0 && e.batch[0].ends <= e.steps {
		e.finish(e.batch.pop())
	}
	ended := 0
	for i, n := range e.chunks {
		j := e.prompts[i]
		j.computed += n
		e.hold(j.have())
		if j.computed == j.length() {
			ended++ // in order: only the last one of a step can be incomplete
		}
	}
	e.chunks = e.chunks[:0]
	complete := slices.Clone(e.prompts[:ended])
	e.prompts = slices.Delete(e.prompts, 0, ended)
	for _, j := range complete {
		e.complete(j)
	}
	e.preempt()
	e.step()
}

// complete ends the computation of a prompt. It has produced the first token.
func (e *Engine) complete(j *Job) {
	if j.Part.Tokens > 0 {
		e.parts[j.Part.ID] = true // it is there as long as the block before it
	}
	if j.written == 0 {
		e.arrived(j)
	}
	if j.leg == Prefill {
		j.from = e
		e.requests--
		e.held += j.Input
		e.on.Prefilled(j)
		return
	}
	if j.written == 0 {
		e.on.First(j)
	}
	e.loose++
	left := j.Output - j.written - 1
	if left == 0 {
		e.kv += j.Input + j.Output // finish subtracts it
		e.finish(j)
		return
	}
	e.join(j, left)
}

// finish frees the memory of an answer that is written.
func (e *Engine) finish(j *Job) {
	e.kv -= j.Input + j.Output
	e.requests--
	j.written = j.Output
	free(e, j)
	if j.Kept != nil {
		e.hold(j.Kept, j.ofLast(j.Kept, j.length()))
	}
	if j.Output > 1 { // answers of one token are not counted (kvstate.AnswerCounters)
		e.Written.Answers++
		e.Written.Tokens += int64(j.Output)
	}
	e.on.Done(j)
}

// preempt removes the youngest answers as long as the KV of all does not fit.
func (e *Engine) preempt() {
	for float64(e.memory()) > e.model.KVTokens && len(e.batch) > 1 {
		j := e.batch.popYoungest()
		j.written = j.Output - (j.ends - e.steps)
		e.kv -= j.length()
		e.requests--
		free(e, j)
		e.Preempted++
		j.leg, j.computed = Both, 0
		e.waiting = slices.Insert(e.waiting, 0, j)
	}
}

// Held returns the number of leading blocks of a prompt that the engine holds, as far as it publishes every block, or
// will hold when the prompts on their way have been computed.
func (e *Engine) Held(blocks []uint64) int {
	for i, b := range blocks {
		if !e.inMemory(b) && !e.host.has(b) {
			return i
		}
	}
	return len(blocks)
}

// Loads returns how many of the leading blocks that it holds come from host memory.
func (e *Engine) Loads(blocks []uint64) (n int) {
	if e.host.cache == nil {
		return 0
	}
	for _, b := range blocks[:e.Held(blocks)] {
		if !e.inMemory(b) {
			n++
		}
	}
	return n
}

func (e *Engine) inMemory(b uint64) bool { return e.cache.has(b) || e.pending[b] > 0 }

// Cancel ends a request whose client has gone away, if it waits here or its prompt is being computed; else it returns
// false. What is computed stays cached.
func (e *Engine) Cancel(j *Job) bool {
	if i := slices.Index(e.waiting, j); i >= 0 {
		e.waiting = slices.Delete(e.waiting, i, i+1)
		if from := j.from; from != nil {
			from.Reclaim(j)
			from.wake()
		}
	} else if i := slices.Index(e.prompts, j); i >= 0 {
		e.prompts = slices.Delete(e.prompts, i, i+1)
		if i < len(e.chunks) { // the running step takes its time
			e.chunks = slices.Delete(e.chunks, i, i+1)
		}
		e.requests--
		free(e, j)
	} else {
		return false
	}
	if j.leg != Decode && j.written == 0 {
		e.arrived(j)
	}
	e.wake()
	return true
}

// arrived ends the time in which a prompt is on its way.
func (e *Engine) arrived(j *Job) {
	for _, b := range j.Blocks {
		if e.pending[b]--; e.pending[b] <= 0 {
			delete(e.pending, b)
		}
	}
}

// Requests returns the answers that run or wait here, and the prompts that are computed or wait.
func (e *Engine) Requests() (answers, prompts int) {
	answers = len(e.batch) + len(e.joining) + len(e.fetched)
	fetching := e.requests - answers - len(e.prompts)
	for _, j := range e.waiting {
		if j.leg == Decode {
			fetching++
		} else {
			prompts++
		}
	}
	return answers + fetching, prompts + len(e.prompts)
}

// Waiting returns the requests that have no memory yet, as the engine reports them.
func (e *Engine) Waiting() int { return len(e.waiting) }

// Uncomputed returns the prompt tokens that the engine has still to compute.
func (e *Engine) Uncomputed() (tokens int) {
	for _, j := range e.prompts {
		tokens += j.length() - j.computed
	}
	for _, j := range e.waiting {
		if j.leg != Decode {
			tokens += j.length() - j.cachedTokens(e.cache.peek(j.Blocks))
		}
	}
	return tokens
}

// Unfetched returns the tokens of KV held by prompts that were computed for other engines.
func (e *Engine) Unfetched() int { return e.held }

// Throughput returns the tokens per second that running answers get now.
func (e *Engine) Throughput() float64 {
	if len(e.batch) == 0 {
		return 0
	}
	return float64(len(e.batch)) / e.answerStep()
}
