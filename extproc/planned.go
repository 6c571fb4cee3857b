package extproc

import (
	"log/slog"
	"slices"
	"time"

	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/picker"
)

// planned reports the plan of a pass to metrics, recent requests, the trace and the log. prefill is nil if one
// endpoint does both; reason is "" if there was no alternative.
func (x *planning) planned(
	pool *kvstate.Pool, route, reason string, prefill, decode *kvstate.Endpoint, tokens int64, started time.Time, pass int,
) {
	x.s.metrics.Decided(pool, route, reason)
	p := telemetry.Planned{
		RequestID: x.requestID, Started: started, Pass: pass, Pool: pool.Spec.Name, Route: route, Reason: reason, Decode: decode.Addr, PromptTokens: tokens,
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
	two := prefill != nil
	if (two || route == "decode_alone") && (x.Recording() || x.s.recent.WantsWeighed(time.Now())) {
		p.Weighed = x.weigh(two, tokens)
	}
	x.s.recent.Planned(&p)
	x.SpanPlanned(&p)
	if ctx := x.stream.Context(); x.s.Log.Enabled(ctx, slog.LevelDebug) {
		x.s.Log.DebugContext(ctx, "planned", "request_id", p.RequestID, "pool", p.Pool, "route", route, "reason", reason,
			"prefill", p.Prefill, "decode", p.Decode, "prompt_tokens", tokens, "body_bytes", p.BodyBytes, "waited", p.Waited)
	}
}

// weigh returns the view's endpoints with their prices, at most maxWeighed.
func (x *planning) weigh(split bool, tokens int64) []telemetry.Weighed {
	all := x.picker.Explain(&picker.Request{PromptTokens: tokens, Blocks: len(x.req.Hashes), Model: x.req.Model(), Labels: x.req.Labels, Split: split}, &x.view).Candidates
	out := make([]telemetry.Weighed, 0, min(len(all), maxWeighed))
	for _, c := range all[:cap(out)] {
		w := telemetry.Weighed{Endpoint: c.Endpoint, Role: c.Role, Out: c.Out != "", Hit: c.Hit}
		if p := c.Prefill; p != nil && split {
			w.Prefill = parts([]telemetry.Part{
				{Name: "queue", Value: p.Queue}, {Name: "work", Value: p.Work}, {Name: "load", Value: p.Load},
				{Name: "others", Value: p.Others}, {Name: "jobs", Value: p.Jobs}, {Name: "session", Value: p.Session},
			})
		}
		if d := c.Decode; d != nil && split {
			w.Decode = parts([]telemetry.Part{
				{Name: "transfer", Value: c.Transfer}, {Name: "step", Value: d.Step}, {Name: "answer", Value: d.Answer},
				{Name: "overflow", Value: d.Overflow}, {Name: "session", Value: d.Session},
			})
		}
		if a := c.Alone; a != nil {
			alone := parts([]telemetry.Part{
				{Name: "queue", Value: a.Queue}, {Name: "work", Value: a.Work}, {Name: "load", Value: a.Load},
				{Name: "others", Value: a.Others}, {Name: "answers", Value: a.Answers},
				{Name: "decode", Value: a.Decode}, {Name: "overflow", Value: a.Overflow},
				{Name: "session", Value: a.Session},
			})
			if w.Alone = alone; !split {
				w.Alone, w.Decode = nil, alone
			}
		}
		out = append(out, w)
	}
	return out
}

// parts removes the parts that are zero.
func parts(all []telemetry.Part) []telemetry.Part {
	return slices.DeleteFunc(all, func(p telemetry.Part) bool { return p.Value == 0 })
}

// maxWeighed bounds what is reported of a large fleet.
const maxWeighed = 64
