package pass

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"

	"tandem/extproc/latebinding"
	"tandem/extproc/plan"
	"tandem/extproc/recorder"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/picker"
)

// Explanation is a decision with the prices of all candidates, and the requests that wait.
type Explanation struct {
	picker.Explanation
	// why no request of this length is split, whatever it costs: the reason that such requests have, not cheaper
	NotSplit string `json:"not_split,omitempty"`
	Always   bool   `json:"split_always,omitempty"` // the pool splits whatever it costs
	Paused   bool   `json:"paused,omitempty"`       // the pool, by order: its requests are refused
	// decode does not compute the prompt if prefill fails: the request gets an error
	NoFallback bool `json:"no_fallback,omitempty"`

	// requests that wait in this replica for endpoints of the pool
	Waiting int     `json:"waiting,omitempty"`
	Memory  int     `json:"waiting_for_memory,omitempty"` // of those, that wait for memory of engines
	Longest float64 `json:"longest,omitempty"`            // longest wait of one of them, s
	Remote  int     `json:"remote,omitempty"`             // requests known to wait in other replicas
}

// Explain returns where a request with that many uncached prompt tokens would be placed in a pool now: every endpoint
// with its price, or why it is excluded. It reserves nothing.
func (s *Shared) Explain(poolName string, promptTokens int64) (e Explanation, err error) {
	pool := s.State.Pool(poolName)
	if pool == nil && poolName == "" {
		pool = s.State.PoolFor("")
	}
	if pool == nil {
		return Explanation{}, noPool(s.State, poolName)
	}
	policy, _ := s.Policy(pool.Spec.Name)
	k := picker.Picker{Policy: policy.Placement()}
	var v kvstate.View
	s.State.View(pool, nil, &v)
	r := picker.Request{PromptTokens: promptTokens, Rand: rand.Uint64()}
	e.NotSplit, e.Always = policy.NotSplit(promptTokens), policy.Placement().Split == picker.SplitAlways
	r.Split = e.NotSplit == ""
	e.Explanation = k.Explain(&r, &v)
	if e.Prefill != "" && policy.strange(guard.With(context.Background(), s.Guard), pool.Endpoint(e.Prefill)) {
		e.NotSplit, r.Split = "unknown_peer", false
		e.Explanation = k.Explain(&r, &v)
	}
	e.NoFallback, e.Paused = e.Prefill != "" && policy.Refusal(pool, &v, "prefill_failed") != nil, pool.Paused()
	if e.NotSplit == "" && e.Refused == "" && e.Prefill == "" {
		if e.NotSplit, err = policy.Whole(pool, &v, promptTokens, e.Full); err != nil {
			e.Refused, e.Decode = err.Error(), ""
		}
	}
	if policy.queue != nil {
		now := policy.queue.Status()
		e.Waiting, e.Memory, e.Remote, e.Longest = now.Waiting, now.Memory, now.Remote, now.Longest
	}
	return e, nil
}

// Queued returns how many requests for a pool wait at this replica.
func (s *Shared) Queued(pool string) latebinding.Status {
	if policy, ok := s.Policy(pool); ok && policy.queue != nil {
		return policy.queue.Status()
	}
	return latebinding.Status{}
}

// noPool returns the error for a pool that does not exist, with those that do.
func noPool(state *kvstate.State, name string) error {
	var names []string
	for _, p := range state.Pools() {
		names = append(names, p.Spec.Name)
	}
	return fmt.Errorf("there is no pool %q; there are: %s", cmp.Or(name, "for any model"), strings.Join(names, ", "))
}

// strange reports whether requests cannot be split with a prefill endpoint because its engine is not known yet.
func (p *Policy) strange(ctx context.Context, prefill *kvstate.Endpoint) bool {
	if p.Peers == nil || p.Dialect.Prefill != nil || prefill == nil {
		return false
	}
	_, known := p.Peers.Lookup(ctx, prefill)
	return !known
}

// queued returns how the request waited.
func (x *Pass) queued() telemetry.Queued {
	on := &x.waiter.BlockedOn
	return telemetry.Queued{
		Waited: x.waiter.Took, WaitedFor: on.Endpoint, ForMemory: on.Memory, Behind: on.Local, BehindRemote: on.Remote,
	}
}

// explain writes all prices of a decision to the debug log, and to an operator who asks for them.
func (x *Pass) explain(r *picker.Request) {
	s, pool := x.shared, x.Req.Pool.Spec.Name
	asked := len(x.Head.Explain) > 0 && s.Operator != nil && s.Operator(x.Head.Explain)
	debug := s.Log.Enabled(context.Background(), slog.LevelDebug)
	if !asked && !debug {
		return
	}
	e := x.picker.Explain(r, &x.view)
	if debug {
		parts := strings.Builder{}
		e.Print(&parts)
		s.Log.Debug("decision", "request_id", x.ID, "pool", pool, "prefill", e.Prefill, "decode", e.Decode,
			"price", e.Price, "load", e.Load, "waited", x.waiter.Took, "waited_for", x.waiter.BlockedOn.Endpoint,
			"behind", x.waiter.BlockedOn.Local, "behind_remote", x.waiter.BlockedOn.Remote, "weighed", parts.String())
	}
	if asked {
		x.Explanation = telemetry.Explanation(pool, x.queued(), &e)
	}
}

// report reports a decision.
func (x *Pass) report(ctx context.Context, d *plan.Decision) {
	r, how, t := &x.Req, &d.Report, &d.Ticket
	p := &x.Planned
	*p = telemetry.Planned{
		RequestID: x.ID, Started: t.Started, Pass: t.Redirects, Pool: d.Pool.Spec.Name,
		Route: how.Route, Reason: how.Reason, BodyBytes: x.size(), Candidates: len(x.view.Endpoints),
		Foreseen: telemetry.Foreseen{ExpectedPrefill: r.Foreseen.Prefilled, ExpectedFirst: r.Foreseen.FirstToken,
			ExpectedToken: r.Foreseen.Token, PromptBlocks: len(r.Hashes), Had: int64(x.recomputed.Had),
			Evicted: int64(x.recomputed.Evicted), Elsewhere: int64(x.recomputed.Elsewhere)},
		Queued: x.queued(), Streamed: r.Streams(), Decode: how.Decode.Addr, PromptTokens: t.PromptTokens,
	}
	p.Cheaper, p.NotAlone = telemetry.MarginOf(r.Foreseen.Price, r.Foreseen.Other, how.Prefill != nil)
	if how.Prefill != nil {
		p.Prefill, p.Always = how.Prefill.Addr, x.picker.Split == picker.SplitAlways
	}
	// then both ways were weighed
	two := how.Prefill != nil || how.Reason == "cheaper" || how.Reason == "min_prefill_tokens"
	if (two || how.Route == "decode_alone") && x.Meter.WantsWeighed() {
		policy, _ := x.shared.Policy(d.Pool.Spec.Name)
		asked := r.Ask(&policy.Policy, t.PromptTokens, two)
		e := x.picker.Explain(&asked, &x.view)
		p.Weighed, p.PrefillBusy = telemetry.Weigh(e.Candidates, two), e.Load
	}
	x.Meter.Planned(ctx, p)
	x.record(p)
}

// record has what was known at the choice recorded.
func (x *Pass) record(p *telemetry.Planned) {
	to, r := x.Meter.Observer.Recorder, &x.Req
	if !to.On() {
		return
	}
	model := cmp.Or(r.Client.Model(), x.want.model)
	x.chosen = recorder.Choice{
		ID: p.RequestID, Started: p.Started, Again: p.Pass > 0, Pool: p.Pool, Model: model,
		Listed: r.Pool.Serves(model), Blocks: r.Hashes, Text: r.Client.PromptText(), Bytes: r.Client.PromptBytes(),
		Tokens: p.PromptTokens, Route: p.Route, Prefill: p.Prefill, Decode: p.Decode, Priority: r.Priority,
		Stream: p.Streamed, Waited: p.Waited,
	}
	to.Chosen(&x.chosen)
	x.chosen = recorder.Choice{}
}
