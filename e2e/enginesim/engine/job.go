package engine

import (
	"context"
	"errors"
	"time"
)

// Transfer is a connector's part in the stages of a job.
type Transfer interface {
	// Queued is called when the job begins to wait for blocks; stop when that is over.
	Queued() (stop func())
	// Deferred reports whether the job waits for load before it counts as running.
	Deferred() bool
	Load(ctx context.Context) error
	// LookUp fetches KV that other engines may have.
	LookUp(ctx context.Context) error
	// Fill gets the prompts' KV: it computes it, for itself or for another engine, or fetches it from one.
	Fill(ctx context.Context) error
	// Computed makes the computed KV available to others.
	Computed()
	// Last is called before an answer's last event. It may keep the answer's blocks, and then sets kept.
	Last(q *Sequence)
	// Keep takes a finished sequence's blocks, or returns false.
	Keep(q *Sequence, blocks []int32) bool
	// Unscheduled is called for a job whose client left before it began, Abandoned for one that will not be answered.
	Unscheduled()
	Abandoned()
}

// Job is one request on its way through the engine.
type Job struct {
	E        *Engine
	Sampling *Sampling
	Transfer Transfer
	Xid      string // x-request-id, "" for none
	Seqs     []*Sequence

	counted int // steps whose tokens the metrics have
}

// Run takes the job through the engine: admission, KV load, prefill, decode. emit is called with each step's number
// when its tokens are there, from 0 to the longest answer's last; nil for an answer that is sent as one.
func (j *Job) Run(ctx context.Context, emit func(step int) error) error {
	e := j.E
	started := time.Now()
	// vLLM's API server drops such a request before its scheduler sees it, and does not notify P
	if err := ctx.Err(); err != nil {
		j.Transfer.Unscheduled()
		return j.abandon(err)
	}
	e.Core.Step()
	done := func() {}
	if !j.Transfer.Deferred() {
		var err error
		if done, err = e.schedule(ctx); err != nil {
			return j.abandon(err)
		}
		defer done()
	}
	if err := j.admit(ctx); err != nil {
		return j.abandon(err)
	}
	e.Core.Step()
	e.Metrics.Running.Add(1)
	running := true
	defer func() {
		if running {
			e.Metrics.Running.Add(-1)
		}
	}()
	if j.Transfer.Deferred() {
		e.Metrics.Running.Add(-1)
		running = false
		e.Metrics.WaitingDeferred.Add(1)
		err := e.stepBegins(ctx)
		if err == nil {
			err = j.Transfer.Load(ctx)
		}
		if err == nil { // that its KV has come is noticed when the next step has begun
			err = e.stepBegins(ctx)
		}
		e.Core.Step()
		e.Metrics.WaitingDeferred.Add(-1)
		if err != nil {
			return j.abandon(err)
		}
		e.Metrics.Running.Add(1)
		running = true
	}
	if err := j.Transfer.LookUp(ctx); err != nil {
		return j.abandon(err)
	}
	if err := j.Transfer.Fill(ctx); err != nil {
		return j.abandon(err)
	}
	done()
	if j.fetched() {
		if err := e.firstStep(ctx); err != nil {
			return j.abandon(err)
		}
	}
	j.Transfer.Computed()
	e.Metrics.firstToken.Observe(time.Since(started).Seconds())
	if err := j.decode(ctx, emit); err != nil {
		return j.abandon(err)
	}
	j.complete()
	e.Metrics.latency.Observe(time.Since(started).Seconds())
	return nil
}

// fetched reports whether another engine has computed all of the prompts.
func (j *Job) fetched() bool {
	for _, q := range j.Seqs {
		if q.External == 0 || q.Turn {
			return false
		}
	}
	return len(j.Seqs) > 0
}

func (j *Job) admit(ctx context.Context) error {
	prompts := make([]*Prompt, len(j.Seqs))
	lens := make([]int, len(j.Seqs))
	for i, q := range j.Seqs {
		prompts[i], lens[i] = q.P, q.Computed()
	}
	e := j.E
	if err := ctx.Err(); err != nil { // the client left while the core stood
		return err
	}
	if !e.Pool.fits(lens) {
		return BadRequest("The request needs more KV cache blocks than the engine has (%d of %d tokens): raise -blocks",
			e.Cfg.Blocks-1, e.Cfg.BlockSize)
	}
	stop := func() {}
	grants, err := e.Pool.Admit(ctx, prompts, lens, func(d int64) {
		e.Core.Step()
		e.Metrics.waitingCapacity.Add(d)
		if d > 0 {
			stop = j.Transfer.Queued()
		}
	})
	stop()
	if err != nil {
		return err
	}
	for i, q := range j.Seqs {
		q.Grant = grants[i]
		e.Metrics.prefixQueries.Add(int64(q.P.N))
		e.Metrics.prefixHits.Add(int64(q.Local(e.Cfg.BlockSize)))
		if e.External {
			e.Metrics.externalQueries.Add(int64(q.P.N - q.Local(e.Cfg.BlockSize)))
		}
	}
	return nil
}

// Prefill computes the tokens that neither cache had, one job after another at the configured speed.
func (j *Job) Prefill(ctx context.Context) error {
	e := j.E
	e.Core.Step()
	compute := 0
	for _, q := range j.Seqs {
		e.Metrics.LocalHit.Add(int64(q.Local(e.Cfg.BlockSize)))
		switch {
		case q.External == 0:
			compute += q.P.N - q.Local(e.Cfg.BlockSize)
		case q.Turn:
			compute += q.P.N - q.Local(e.Cfg.BlockSize) - q.External
		}
	}
	e.Metrics.LocalCompute.Add(int64(compute))
	if err := j.load(ctx); err != nil {
		return err
	}
	if e.Cfg.PrefillSpeed > 0 && compute > 0 {
		if err := e.compute(ctx, time.Duration(float64(compute)/e.Cfg.PrefillSpeed*float64(time.Second))); err != nil {
			return err
		}
	}
	for _, q := range j.Seqs {
		if q.External == 0 || q.Turn {
			e.Pool.Write(&q.Grant, q.P, q.Grant.Hits, nil)
		}
		if e.Cfg.Faithful && !q.wrong {
			j.readHits(q)
		}
	}
	return nil
}

// load waits for KV from CPU memory. Other jobs run meanwhile.
func (j *Job) load(ctx context.Context) error {
	e, bytes := j.E, 0
	for _, q := range j.Seqs {
		bytes += q.Grant.Loaded * e.Cfg.BlockSize * KVBytesPerToken
	}
	if bytes == 0 {
		return nil
	}
	took := 0.0
	if e.Cfg.LoadRate > 0 {
		took = float64(bytes) / e.Cfg.LoadRate
	}
	e.Metrics.loadedBytes.Add(int64(bytes))
	e.Metrics.loadedMicros.Add(int64(took * 1e6))
	return Sleep(ctx, time.Duration(took*float64(time.Second)))
}

// readHits checks the real content of the prefix cache: wrong KV that a faithful engine accepted once stays in its
// cache under the right name.
func (j *Job) readHits(q *Sequence) {
	held := j.E.Pool.Read(q.Grant.Blocks[:q.Grant.Hits], func(i int) uint64 { return q.P.Full[i] })
	q.Corrupt(j.Sampling, 0, held, j.E.Cfg.MaxModelLen)
}

func (j *Job) decode(ctx context.Context, emit func(step int) error) error {
	steps := 0
	for _, q := range j.Seqs {
		steps = max(steps, q.Out.N)
	}
	pace := j.E.Cfg.DecodeStep
	if emit == nil {
		if pace > 0 {
			return j.decodeWhole(ctx, steps, pace)
		}
		j.countTokens(steps)
		return ctx.Err()
	}
	last := time.Now()
	j.E.writing.Add(1)
	defer j.E.writing.Add(-1)
	for step := range steps {
		if pace > 0 && step > 0 {
			if err := Sleep(ctx, j.E.untilStep()); err != nil {
				return err
			}
			j.E.Core.Step()
			now := time.Now()
			j.E.Metrics.gaps.Observe(now.Sub(last).Seconds())
			last = now
		}
		if step == steps-1 { // the last event names the kept blocks
			for _, q := range j.Seqs {
				j.Transfer.Last(q)
			}
		}
		j.countTokens(step + 1)
		if err := emit(step); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// decodeWhole generates an answer that is sent as one. It wakes a few times a second, and not for each step.
func (j *Job) decodeWhole(ctx context.Context, steps int, pace time.Duration) error {
	began := time.Now()
	j.countTokens(1) // the prefill's
	for atOnce := max(1, int(250*time.Millisecond/pace)); j.counted < steps; {
		n := min(atOnce, steps-j.counted)
		end := began.Add(pace * time.Duration(j.counted+n-1))
		if err := Sleep(ctx, time.Until(end)); err != nil {
			return err
		}
		j.E.Core.Step()
		for range n {
			j.E.Metrics.gaps.Observe(pace.Seconds())
		}
		j.countTokens(j.counted + n)
	}
	return ctx.Err()
}

// countTokens counts the tokens of the first steps as generated, as vLLM does when a step ends and not with the answer.
func (j *Job) countTokens(steps int) {
	for _, q := range j.Seqs {
		j.E.Metrics.generated.Add(int64(max(0, min(steps, q.Out.N)-j.counted)))
	}
	j.counted = steps
}

// complete puts a finished answer's KV into the prefix cache, and gives its blocks to the connector or back to the
// pool.
func (j *Job) complete() {
	e := j.E
	for _, q := range j.Seqs {
		if j.Transfer.Last(q); !q.Kept {
			j.WriteAnswer(q, false)
		}
		e.Metrics.promptTokens.Observe(float64(q.P.N))
		e.Metrics.genTokens.Observe(float64(q.Out.N))
		reason := q.Out.Finish
		if reason == "tool_calls" {
			reason = "stop"
		}
		e.Metrics.finished.Add(reason, 1)
		if q.Kept {
			continue
		}
		if blocks := j.trim(q); !j.Transfer.Keep(q, blocks) {
			e.Pool.Free(blocks)
		}
	}
}

// trim frees the blocks that an answer shorter than planned did not need, and returns the others.
func (j *Job) trim(q *Sequence) []int32 {
	used := BlocksFor(q.Computed(), j.E.Cfg.BlockSize)
	j.E.Pool.Free(q.Grant.Blocks[used:])
	return q.Grant.Blocks[:used]
}

// WriteAnswer caches the blocks that the generated tokens filled, and, if the answer is kept, records the content of
// the last one.
func (j *Job) WriteAnswer(q *Sequence, kept bool) {
	if q.Out.N < 2 || q.wrong {
		return
	}
	blockSize := j.E.Cfg.BlockSize
	if q.Computed()/blockSize == len(q.P.Full) && !kept {
		return
	}
	t := resume(q.P, blockSize)
	for i := range q.Out.N - 1 {
		t.token(TokenID([]byte(q.Out.Token(i))))
	}
	t.p.tail = 0
	if kept {
		t.Finish("")
	}
	j.E.Pool.Write(&q.Grant, &t.p, len(q.P.Full), nil)
}

// abandon frees the blocks of a job that will not be answered, on this engine and on the one that it meant to read
// from.
func (j *Job) abandon(err error) error {
	e := j.E
	e.Core.Step()
	for _, q := range j.Seqs {
		e.Pool.Free(q.Grant.Blocks)
		q.Grant.Blocks = nil
	}
	j.Transfer.Abandoned()
	reason := "error"
	if Aborted(err) {
		reason = "abort"
		e.Metrics.Aborted.Add(1)
	}
	e.Metrics.finished.Add(reason, 1)
	if v, ok := errors.AsType[*Violation](err); ok {
		e.Violate(v, j.Xid)
	}
	return err
}

// Aborted reports whether err means that the client has gone.
func Aborted(err error) bool { return errors.Is(err, context.Canceled) || errors.Is(err, ErrAborted) }

// Wait counts a request as waiting for KV that never comes, until ctx ends.
func (e *Engine) Wait(ctx context.Context) {
	e.Core.Step()
	e.Metrics.WaitingDeferred.Add(1)
	<-ctx.Done()
	e.Core.Step()
	e.Metrics.WaitingDeferred.Add(-1)
}
