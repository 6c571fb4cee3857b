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
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker"
)

// Explanation is a decision with all that was weighed, and what waits beside it.
type Explanation struct {
	picker.Explanation
	Waiting   int     `json:"waiting,omitempty"`   // requests that wait in this replica for endpoints of the pool
	Longest   float64 `json:"longest,omitempty"`   // s that one of them has waited
	Elsewhere int     `json:"elsewhere,omitempty"` // requests that wait in other replicas, as far as this one knows
}

// Explain says how a request of so many prompt tokens, of which nobody holds any, would be placed in a pool now: every
// endpoint with what it would cost, or why it is left out. Nothing is booked.
func (s *Server) Explain(poolName string, promptTokens int64) (Explanation, error) {
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
	e := Explanation{Explanation: k.Explain(&picker.Request{PromptTokens: promptTokens, Split: policy.Dialect.Prefill != nil && policy.Split, Rand: random()}, &v)}
	if policy.room != nil {
		e.Waiting, e.Elsewhere, e.Longest = policy.room.waits(time.Now())
	}
	return e, nil
}

// explain says all that was weighed for a decision: in the log where debug logs are on, and to an operator who asks for it.
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
			"price", e.Price, "load", e.Load, "waited", x.waited, "waited_for", x.stoodBy.endpoint, "behind", x.stoodBy.here, "behind_elsewhere", x.stoodBy.elsewhere, "weighed", parts.String())
	}
	if asked {
		x.explanation = explanation(pool.Spec.Name, x.waited, x.stoodBy, &e)
	}
}

// maxExplanation bounds the explanation of a header, in bytes; Envoy takes some 58 KiB of headers in all.
const maxExplanation = 8 << 10

// explanation is a decision as a header shows it: JSON, with as many of the endpoints as there is room for, those chosen first.
func explanation(pool string, waited time.Duration, by stoodBy, e *picker.Explanation) []byte {
	chosen := func(w picker.Weighed) int {
		if w.Endpoint == e.Prefill || w.Endpoint == e.Decode {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(e.Candidates, func(a, b picker.Weighed) int { return chosen(a) - chosen(b) })
	for {
		text, err := json.Marshal(struct {
			Pool            string  `json:"pool"`
			Waited          float64 `json:"waited"` // s
			WaitedFor       string  `json:"waited_for,omitempty"`
			Behind          int     `json:"behind,omitempty"`
			BehindElsewhere int     `json:"behind_elsewhere,omitempty"`
			*picker.Explanation
		}{pool, waited.Seconds(), by.endpoint, by.here, by.elsewhere, e})
		switch {
		case err != nil: // a price that is no number: there is no endpoint
			return []byte(`{"pool":` + strconv.Quote(pool) + `,"refused":` + strconv.Quote(e.Refused) + `}`)
		case len(text) <= maxExplanation || len(e.Candidates) == 0:
			return text
		}
		e.Candidates = e.Candidates[:len(e.Candidates)/2]
	}
}

// namespaceDecision is the namespace of the dynamic metadata that decisions are said in, for Envoy's access logs.
const namespaceDecision = "tandem"

// decisionMetadata is a decision as dynamic metadata: {"tandem": {"pool": ..., ...}}. Empty fields are left out.
func (x *planning) decisionMetadata(p *telemetry.Planned) []byte {
	return envoywire.Metadata(namespaceDecision,
		envoywire.MetadataField{Name: "pool", Text: p.Pool}, envoywire.MetadataField{Name: "route", Text: p.Route},
		envoywire.MetadataField{Name: "reason", Text: p.Reason}, envoywire.MetadataField{Name: "prefill", Text: p.Prefill},
		envoywire.MetadataField{Name: "decode", Text: p.Decode},
		envoywire.MetadataField{Name: "prompt_tokens", Number: float64(p.PromptTokens)},
		envoywire.MetadataField{Name: "price", Number: x.price}, envoywire.MetadataField{Name: "waited", Number: p.Waited.Seconds()})
}
