package engine

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Engine is the engine: KV blocks, a prefill that computes one prompt after another, decode steps that all answers
// share, and the counts of all of it.
type Engine struct {
	Cfg         *Config
	log         io.Writer
	logMu       sync.Mutex
	Started     time.Time
	clock       time.Duration // of Clock, when it started
	Pool        *Pool
	Events      *Events // nil: none
	Metrics     *metrics
	Core        Core
	prefillTurn chan struct{}
	scheduled   chan struct{} // the one job that has memory or waits for it, of those that compute prompts in chunks
	stepEnds    atomic.Int64  // when the step with a chunk of a prompt ends, ns since 1970; 0: none runs
	writing     atomic.Int64  // streams that get tokens
	External    bool          // a connector asks other engines for KV
}

// New returns an idle engine, and opens the sockets of its KV events.
func New(cfg *Config, log io.Writer) (*Engine, error) {
	e := &Engine{
		Cfg: cfg, log: log, Started: time.Now(), Pool: NewPool(cfg.Blocks, cfg.BlockSize),
		Metrics: newMetrics(cfg.Models[0], cfg.Rank), prefillTurn: make(chan struct{}, 1),
		scheduled: make(chan struct{}, 1), clock: newClock(),
	}
	var err error
	if e.Events, err = startKVEvents(cfg); err != nil {
		return nil, err
	}
	e.Pool.events, e.Pool.host = e.Events, newHostTier(cfg.HostBlocks)
	return e, nil
}

// CloseEvents closes the sockets of the KV events.
func (e *Engine) CloseEvents() { e.Events.close() }

// CountFetched counts tokens of a sequence that came from another engine.
func (e *Engine) CountFetched(q *Sequence, tokens int) {
	q.External = tokens
	e.Metrics.External.Add(int64(tokens))
	e.Metrics.externalHits.Add(int64(tokens))
}

// Violate counts and logs a violation.
func (e *Engine) Violate(v *Violation, xid string) {
	e.Metrics.Violations.Add(v.Kind, 1)
	e.Logf("%v (x-request-id %q)", v, xid)
}

// Logf writes a line of the log.
func (e *Engine) Logf(format string, args ...any) {
	e.logMu.Lock()
	defer e.logMu.Unlock()
	fmt.Fprintf(e.log, "enginesim "+e.Cfg.name()+": "+format+"\n", args...)
}

// schedule waits until the jobs before it have computed their prompts, where steps have chunks: only then is a job
// given memory (vLLM 0.32.0, v1/core/sched/scheduler.py: schedule allocates blocks while the step has tokens left).
func (e *Engine) schedule(ctx context.Context) (done func(), err error) {
	if e.Cfg.Chunk == 0 {
		return func() {}, nil
	}
	e.Metrics.waitingCapacity.Add(1)
	defer e.Metrics.waitingCapacity.Add(-1)
	select {
	case e.scheduled <- struct{}{}:
		return sync.OnceFunc(func() { <-e.scheduled }), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// compute occupies the engine's prefill, for which requests queue.
func (e *Engine) compute(ctx context.Context, d time.Duration) error {
	select {
	case e.prefillTurn <- struct{}{}:
	default:
		e.Metrics.waitingCapacity.Add(1)
		e.Metrics.Running.Add(-1)
		var err error
		select {
		case e.prefillTurn <- struct{}{}:
		case <-ctx.Done():
			err = ctx.Err()
		}
		e.Core.Step()
		e.Metrics.waitingCapacity.Add(-1)
		e.Metrics.Running.Add(1)
		if err != nil {
			return err
		}
	}
	defer func() { <-e.prefillTurn }()
	defer e.Core.Step()
	if e.Cfg.Chunk == 0 {
		return Sleep(ctx, d)
	}
	return e.computeChunks(ctx, d)
}

// computeChunks computes a prompt in steps which the answers that run take part in: each of them gets its token at the
// step's end, and the step takes the time of the chunk and of their own. It begins with a step, not in the middle of
// one (vLLM 0.32.0, v1/engine/core.py: step schedules, executes, and schedules again).
func (e *Engine) computeChunks(ctx context.Context, d time.Duration) error {
	defer e.stepEnds.Store(0)
	if err := e.runningStep(ctx); err != nil {
		return err
	}
	chunk := time.Duration(float64(e.Cfg.Chunk) / e.Cfg.PrefillSpeed * float64(time.Second))
	for d > 0 {
		step := min(chunk, d)
		d -= step
		if e.writing.Load() > 0 {
			step += e.Cfg.DecodeStep
		}
		e.stepEnds.Store(time.Now().Add(step).UnixNano())
		if err := Sleep(ctx, step); err != nil {
			return err
		}
	}
	return nil
}

// runningStep waits for the end of the step that runs, if there is one: with a chunk of a prompt, or with answers.
func (e *Engine) runningStep(ctx context.Context) error {
	if left := e.chunkLeft(); left > 0 {
		return Sleep(ctx, left)
	}
	if e.writing.Load() == 0 || e.Cfg.DecodeStep == 0 {
		return nil
	}
	return Sleep(ctx, e.untilStep())
}

// stepBegins waits for the beginning of a step, where the parts of steps are modelled (-chunk): a request is scheduled
// then, and the connector begins to fetch its KV (vLLM 0.32.0, v1/core/sched/scheduler.py: schedule makes it
// WAITING_FOR_REMOTE_KVS; v1/worker/kv_connector_model_runner_mixin.py: start_load_kv when the step is launched).
func (e *Engine) stepBegins(ctx context.Context) error {
	if e.Cfg.Chunk == 0 {
		return nil
	}
	return e.runningStep(ctx)
}

// firstStep takes the time in which the first token of a prompt is computed whose KV was fetched: that of all tokens
// but its last. Where the parts of a step are not modelled (no -chunk) it takes none.
func (e *Engine) firstStep(ctx context.Context) error {
	if e.Cfg.Chunk == 0 || e.Cfg.DecodeStep == 0 {
		return nil
	}
	if err := e.runningStep(ctx); err != nil {
		return err
	}
	if e.writing.Load() == 0 {
		return Sleep(ctx, e.Cfg.DecodeStep)
	}
	return Sleep(ctx, e.untilStep())
}

// Clock returns the time of the engine's own clock, Python's perf_counter: it begins at an arbitrary time, and no other
// engine's agrees with it.
func (e *Engine) Clock() time.Duration { return e.clock + time.Since(e.Started) }

// newClock returns the time at which an engine's clock begins.
func newClock() time.Duration { return time.Duration(1+rand.IntN(1e6)) * time.Second }

// untilStep returns the time until the engine's next decode step. Continuous batching gives every running sequence its
// token in the same step, so the tokens of different answers arrive together, whenever their requests came.
func (e *Engine) untilStep() time.Duration {
	if left := e.chunkLeft(); left > 0 {
		return left
	}
	pace := e.Cfg.DecodeStep
	return pace - time.Since(e.Started)%pace
}

// chunkLeft returns the time until the step ends that computes a chunk of a prompt; 0: none runs.
func (e *Engine) chunkLeft() time.Duration {
	if left := time.Until(time.Unix(0, e.stepEnds.Load())); left > 0 {
		return left + time.Microsecond
	}
	return 0
}

// Sleep waits for d, or until ctx ends, and returns the error of ctx.
func Sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
