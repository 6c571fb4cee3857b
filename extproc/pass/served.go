package pass

import (
	"context"
	"time"

	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// Models and adapters come and go while engines run. Engines are asked for their lists from time to time, and at once
// when no engine is known to serve the model of a request, or when one answers 404.

// How old an engine's list of models may be for a request that depends on it: one that no pool takes; one that another
// engine has answered with 404; and one for a pool that takes any model, whose engines may serve more than they list.
const (
	askAgain     = time.Second
	askAfter404  = 100 * time.Millisecond
	askAgainAny  = 5 * time.Second
	askPatiently = 1500 * time.Millisecond // in all, longer than an engine's answer may take
)

// ModelAsker asks engines for the models that they serve.
type ModelAsker interface {
	// Ask asks endpoints whose list is older than a time, and waits for their answers until ctx ends.
	Ask(ctx context.Context, endpoints []*kvstate.Endpoint, older time.Duration)
}

// poolOf returns the pool that serves a model; nil: none does. rest continues the pass where it could not wait. hops: a
// 404 would be planned again, so engines need not be asked before.
func (x *Pass) poolOf(ctx context.Context, model string, hops bool) (pool *kvstate.Pool, waits bool) {
	state := x.shared.State
	pool = state.PoolFor(model)
	switch {
	case model == "" || x.shared.Models == nil:
		return pool, false
	case pool == nil:
		if waits = latebinding.IsAtOnce(ctx); !waits {
			for _, p := range state.Pools() {
				x.askModels(ctx, p.Endpoints(), askAgain)
			}
			pool = state.PoolFor(model)
		}
	case !hops && pool.Unlisted(model):
		if waits = latebinding.IsAtOnce(ctx); !waits {
			x.askModels(ctx, pool.Endpoints(), askAgainAny)
		}
	}
	return pool, waits
}

// served returns the error for a request that an endpoint has answered with 404, if no endpoint has its model: the
// engines are asked before.
func (x *Pass) served(ctx context.Context, pool *kvstate.Pool, a *plan.Attempt, model string) error {
	if !a.LacksModel || x.shared.Models == nil || model == "" {
		return nil
	}
	if latebinding.IsAtOnce(ctx) {
		return latebinding.ErrWaits
	}
	// The model may have moved a moment ago, so the lists of the others may be outdated, too.
	if n := len(a.Excluded); n > 0 {
		if e := pool.Endpoint(a.Excluded[n-1]); e != nil {
			x.AskAgain(ctx, e)
		}
	}
	x.askModels(ctx, pool.Endpoints(), askAfter404)
	if pool.MayServe(model) {
		return nil
	}
	return openai.ModelNotFound(model)
}

// AskAgain asks an endpoint that has answered 404 for its models: its list is outdated, however young it is.
func (x *Pass) AskAgain(ctx context.Context, e *kvstate.Endpoint) {
	if x.shared.Models != nil {
		x.askModels(ctx, []*kvstate.Endpoint{e}, 0)
	}
}

func (x *Pass) askModels(ctx context.Context, endpoints []*kvstate.Endpoint, older time.Duration) {
	ctx, stop := context.WithTimeout(ctx, askPatiently)
	defer stop()
	began := time.Now()
	x.shared.Models.Ask(ctx, endpoints, older)
	x.Meter.LeaveOut(time.Since(began)) // waiting is no part of deciding
}
