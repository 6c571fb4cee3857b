package extproc

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
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

	Waiting int     `json:"waiting,omitempty"` // requests that wait in this replica for endpoints of the pool
	Longest float64 `json:"longest,omitempty"` // longest wait of one of them, s
	Remote  int     `json:"remote,omitempty"`  // requests known to wait in other replicas
}

// Explain returns where a request with so many uncached prompt tokens would be placed in a pool now: every endpoint
// with its price, or why it is excluded. It reserves nothing.
func (s *Server) Explain(poolName string, promptTokens int64) (e Explanation, err error) {
	pool := s.State.Pool(poolName)
	if pool == nil && poolName == "" {
		pool = s.State.PoolFor("")
	}
	if pool == nil {
		return Explanation{}, noPool(s.State, poolName)
	}
	policy, _ := s.policy(pool.Spec.Name)
	k := picker.Picker{Policy: policy.Placement()}
	var v kvstate.View
	s.State.View(pool, nil, &v)
	r := picker.Request{PromptTokens: promptTokens, Rand: random()}
	e.NotSplit, e.Always = policy.NotSplit(promptTokens), policy.Placement().Split == picker.SplitAlways
	r.Split = e.NotSplit == ""
	e.Explanation = k.Explain(&r, &v)
	if e.Prefill != "" && policy.strange(guard.With(context.Background(), s.guard), pool.Endpoint(e.Prefill)) {
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
		e.Waiting, e.Remote, e.Longest = now.Waiting, now.Remote, now.Longest
	}
	return e, nil
}

// noPool returns the error for a pool that does not exist, with those that do.
func noPool(state *kvstate.State, name string) error {
	var names []string
	for _, p := range state.Pools() {
		names = append(names, p.Spec.Name)
	}
	return fmt.Errorf("there is no pool %q; there are: %s", cmp.Or(name, "for any model"), strings.Join(names, ", "))
}

// strange reports whether requests cannot be split with a prefill endpoint because nobody knows yet who its engine is.
func (p *Policy) strange(ctx context.Context, prefill *kvstate.Endpoint) bool {
	if p.Peers == nil || p.Dialect.Prefill != nil || prefill == nil {
		return false
	}
	_, known := p.Peers.Lookup(ctx, prefill)
	return !known
}

// queued returns how the request waited.
func (x *planning) queued() telemetry.Queued {
	on := &x.waiter.BlockedOn
	return telemetry.Queued{Waited: x.waiter.Took, WaitedFor: on.Endpoint, Behind: on.Local, BehindRemote: on.Remote}
}

// explain writes all prices of a decision to the debug log, and to an operator who asks for them.
func (x *planning) explain(pool *kvstate.Pool, r *picker.Request) {
	asked := len(x.msg.Headers.Explain) > 0 && x.s.Operator != nil && x.s.Operator(x.msg.Headers.Explain)
	debug := x.s.Log.Enabled(context.Background(), slog.LevelDebug)
	if !asked && !debug {
		return
	}
	e := x.picker.Explain(r, &x.view)
	if debug {
		parts := strings.Builder{}
		e.Print(&parts)
		x.s.Log.Debug("decision", "request_id", x.requestID, "pool", pool.Spec.Name, "prefill", e.Prefill, "decode", e.Decode,
			"price", e.Price, "load", e.Load, "waited", x.waiter.Took, "waited_for", x.waiter.BlockedOn.Endpoint,
			"behind", x.waiter.BlockedOn.Local, "behind_remote", x.waiter.BlockedOn.Remote, "weighed", parts.String())
	}
	if asked {
		x.explanation = telemetry.Explanation(pool.Spec.Name, x.queued(), &e)
	}
}

// namespaceDecision is the namespace of the dynamic metadata with decisions, for Envoy's access logs.
const namespaceDecision = "tandem"

// decisionMetadata returns a decision as dynamic metadata: {"tandem": {"pool": ..., ...}}. Empty fields are
// omitted.
func (x *planning) decisionMetadata(p *telemetry.Planned) []byte {
	return envoywire.Metadata(namespaceDecision,
		envoywire.MetadataField{Name: "pool", Text: p.Pool}, envoywire.MetadataField{Name: "route", Text: p.Route},
		envoywire.MetadataField{Name: "reason", Text: p.Reason}, envoywire.MetadataField{Name: "prefill", Text: p.Prefill},
		envoywire.MetadataField{Name: "decode", Text: p.Decode},
		envoywire.MetadataField{Name: "prompt_tokens", Number: float64(p.PromptTokens)},
		envoywire.MetadataField{Name: "price", Number: x.req.Price}, envoywire.MetadataField{Name: "waited", Number: p.Waited.Seconds()})
}

// planned reports the plan of a pass. prefill is nil if one endpoint does both; reason is "" if there was no alternative.
func (x *planning) planned(
	pool *kvstate.Pool, route, reason string, prefill, decode *kvstate.Endpoint, tokens int64, started time.Time, pass int,
) {
	p := telemetry.Planned{
		RequestID: x.requestID, Started: started, Pass: pass, Pool: pool.Spec.Name, Route: route, Reason: reason,
		BodyBytes: x.body.Len(), Candidates: len(x.view.Endpoints),
		Foreseen: telemetry.Foreseen{ExpectedPrefill: x.req.Prefilled, ExpectedFirst: x.req.FirstToken,
			PromptBlocks: len(x.req.Hashes), Margin: telemetry.MarginOf(x.req.Price, x.req.Other, prefill != nil)},
		Queued: x.queued(), Streamed: x.req.True(openai.FieldStream), Decode: decode.Addr, PromptTokens: tokens,
	}
	if prefill != nil {
		p.Prefill, p.Always = prefill.Addr, x.picker.Split == picker.SplitAlways
	}
	if x.s.DecisionMetadata {
		x.decision = x.decisionMetadata(&p)
	}
	two := prefill != nil || reason == "cheaper" || reason == "min_prefill_tokens" // then both ways were weighed
	if (two || route == "decode_alone") && x.WantsWeighed() {
		policy, _ := x.s.policy(pool.Spec.Name)
		asked := x.req.Ask(&policy.Policy, tokens, two)
		e := x.picker.Explain(&asked, &x.view)
		p.Weighed, p.PrefillBusy = telemetry.Weigh(e.Candidates, two), e.Load
	}
	x.Planned(x.stream.Context(), &p)
}
