package extproc

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/latebinding"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker"
)

// Explanation is a decision with the prices of all candidates, and the requests that wait.
type Explanation struct {
	picker.Explanation
	// why no request of this length is split, whatever it costs: no_kv_transfer, policy, min_prefill_tokens, no_prefill
	NotSplit string `json:"not_split,omitempty"`

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
		return Explanation{}, fmt.Errorf("there is no pool %q", poolName)
	}
	policy, _ := s.policy(pool.Spec.Name)
	k := picker.Picker{Policy: policy.Placement()}
	var v kvstate.View
	s.State.View(pool, nil, &v)
	e.NotSplit = policy.NotSplit(promptTokens)
	e.Explanation = k.Explain(&picker.Request{
		PromptTokens: promptTokens, Split: e.NotSplit == "", Rand: random(),
	}, &v)
	if e.NotSplit == "" && e.Refused == "" && e.Prefill == "" {
		if e.NotSplit, err = policy.Whole(pool, &v, promptTokens); err != nil {
			e.Refused, e.Decode = err.Error(), ""
		}
	}
	if policy.queue != nil {
		now := policy.queue.Status()
		e.Waiting, e.Remote, e.Longest = now.Waiting, now.Remote, now.Longest
	}
	return e, nil
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
		x.explanation = explanation(pool.Spec.Name, &x.waiter, &e)
	}
}

// maxExplanation bounds the explanation in a header, in bytes; Envoy accepts some 58 KiB of headers in all.
const maxExplanation = 8 << 10

// explanation renders a decision for a header: JSON, with as many endpoints as fit, the chosen ones first.
func explanation(pool string, w *latebinding.Waiter, e *picker.Explanation) []byte {
	chosen := func(w picker.Weighed) int {
		if w.Endpoint == e.Prefill || w.Endpoint == e.Decode {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(e.Candidates, func(a, b picker.Weighed) int { return chosen(a) - chosen(b) })
	for {
		text, err := json.Marshal(struct {
			Pool         string  `json:"pool"`
			Waited       float64 `json:"waited"` // s
			WaitedFor    string  `json:"waited_for,omitempty"`
			Behind       int     `json:"behind,omitempty"`
			BehindRemote int     `json:"behind_remote,omitempty"`
			*picker.Explanation
		}{pool, w.Took.Seconds(), w.BlockedOn.Endpoint, w.BlockedOn.Local, w.BlockedOn.Remote, e})
		switch {
		case err != nil: // a price that is not a number: there is no endpoint
			return []byte(`{"pool":` + strconv.Quote(pool) + `,"refused":` + strconv.Quote(e.Refused) + `}`)
		case len(text) <= maxExplanation || len(e.Candidates) == 0:
			return text
		}
		e.Candidates = e.Candidates[:len(e.Candidates)/2]
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
		Decode: decode.Addr, PromptTokens: tokens,
		BodyBytes: x.body.Len(), PromptBlocks: len(x.req.Hashes), Candidates: len(x.view.Endpoints),
		Foreseen: telemetry.Foreseen{ExpectedPrefill: x.req.Prefilled, ExpectedFirst: x.req.FirstToken},
		Waited:   x.waiter.Took, WaitedFor: x.waiter.BlockedOn.Endpoint,
		Behind: x.waiter.BlockedOn.Local, BehindRemote: x.waiter.BlockedOn.Remote,
	}
	if prefill != nil {
		p.Prefill = prefill.Addr
	}
	if x.s.DecisionMetadata {
		x.decision = x.decisionMetadata(&p)
	}
	two := prefill != nil || reason == "cheaper" || reason == "min_prefill_tokens" // then both ways were weighed
	if (two || route == "decode_alone") && x.WantsWeighed() {
		p.Weighed = telemetry.Weigh(x.picker.Explain(&picker.Request{
			PromptTokens: tokens, Blocks: len(x.req.Hashes), Model: x.req.Model(), Labels: x.req.Labels, Split: two,
		}, &x.view).Candidates, two)
	}
	x.Planned(x.stream.Context(), &p)
}
