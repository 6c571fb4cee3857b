package extproc

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"tandem/kvstate"
	"tandem/picker"
)

// Explain says how a request of so many prompt tokens, of which nobody holds any, would be placed in a pool now: every
// endpoint with what it would cost, or why it is left out. Nothing is booked.
func (s *Server) Explain(poolName string, promptTokens int64) (picker.Explanation, error) {
	pool := s.State.Pool(poolName)
	if pool == nil && poolName == "" {
		pool = s.State.PoolFor("")
	}
	if pool == nil {
		return picker.Explanation{}, fmt.Errorf("there is no pool %q", poolName)
	}
	policy, _ := s.policy(pool.Spec.Name)
	k := picker.Picker{Policy: policy.place()}
	var v kvstate.View
	s.State.View(pool, nil, &v)
	return k.Explain(&picker.Request{PromptTokens: promptTokens, Split: policy.Dialect != nil && policy.Split, Rand: random()}, &v), nil
}

// explain logs everything that was weighed for a decision, where debug logs are on.
func (x *exchange) explain(pool *kvstate.Pool, r *picker.Request) {
	if !x.s.Log.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	e, parts := x.picker.Explain(r, &x.view), strings.Builder{}
	e.Print(&parts)
	x.s.Log.Debug("decision", "request_id", x.requestID, "pool", pool.Spec.Name, "prefill", e.Prefill, "decode", e.Decode,
		"price", e.Price, "load", e.Load, "weighed", parts.String())
}
