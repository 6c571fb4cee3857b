package extproc

import (
	"log/slog"
	"slices"
	"time"

	"tandem/kvstate"
	"tandem/picker"
)

// Part is one summand of a price, in PriceUnit.
type Part struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// PriceUnit is what prices and their parts are counted in.
const PriceUnit = "s"

// Weighed is one endpoint in a decision, with what its price was made of (PriceUnit).
type Weighed struct {
	Endpoint string `json:"endpoint"`
	Role     string `json:"role"`
	Out      bool   `json:"out,omitempty"` // left out: it failed
	Hit      int    `json:"hit_blocks"`    // leading blocks of the prompt that it holds
	Prefill  []Part `json:"prefill,omitempty"`
	Decode   []Part `json:"decode,omitempty"`
}

// planned tells all who watch what a pass was planned as: metrics, the latest requests, the trace, the log. prefill is nil
// where one endpoint does both, reason "" where nothing else could have been wanted.
func (x *exchange) planned(pool *kvstate.Pool, route, reason string, prefill, decode *kvstate.Endpoint, tokens int64) {
	x.s.metrics.decided(pool, route, reason)
	p := ""
	if prefill != nil {
		p = prefill.Addr
	}
	if x.s.DecisionMetadata {
		x.decision = x.decisionMetadata(pool.Spec.Name, route, reason, p, decode.Addr, tokens)
	}
	var weighed []Weighed
	if two := prefill != nil; (two || route == "decode_alone") && (x.span != nil || x.s.recent.wantsWeighed(time.Now())) {
		weighed = x.weigh(two, tokens)
	}
	x.s.recent.planned(x.requestID, pool.Spec.Name, route, reason, p, decode.Addr, tokens, weighed)
	if x.waited > 0 {
		x.s.recent.change(x.requestID, func(trace *Trace) {
			trace.Waited, trace.WaitedFor = x.waited, x.stoodBy.endpoint
			trace.Behind, trace.Elsewhere = x.stoodBy.here, x.stoodBy.elsewhere
		})
	}
	x.spanPlanned(pool, route, reason, prefill, decode, tokens, weighed)
	if ctx := x.stream.Context(); x.s.Log.Enabled(ctx, slog.LevelDebug) {
		x.s.Log.DebugContext(ctx, "planned", "request_id", x.requestID, "pool", pool.Spec.Name, "route", route, "reason", reason,
			"prefill", p, "decode", decode.Addr, "prompt_tokens", tokens, "body_bytes", x.body.len(), "waited", x.waited)
	}
}

// weigh shows the view's endpoints as the picker priced them, at most maxWeighed.
func (x *exchange) weigh(split bool, tokens int64) []Weighed {
	all := x.picker.Explain(&picker.Request{PromptTokens: tokens, Blocks: len(x.hashes), Model: x.req.Model(), Labels: x.wanted, Split: split}, &x.view).Candidates
	out := make([]Weighed, 0, min(len(all), maxWeighed))
	for _, c := range all[:cap(out)] {
		w := Weighed{Endpoint: c.Endpoint, Role: c.Role, Out: c.Out != "", Hit: c.Hit}
		if p := c.Prefill; p != nil && split {
			w.Prefill = parts(Part{"queue", p.Queue}, Part{"work", p.Work}, Part{"others", p.Others}, Part{"jobs", p.Jobs}, Part{"session", p.Session})
		}
		if d := c.Decode; d != nil && split {
			w.Decode = parts(Part{"transfer", c.Transfer}, Part{"step", d.Step}, Part{"answer", d.Answer}, Part{"overflow", d.Overflow}, Part{"session", d.Session})
		}
		if a := c.Alone; a != nil && !split {
			w.Decode = parts(Part{"queue", a.Queue}, Part{"work", a.Work}, Part{"others", a.Others}, Part{"answers", a.Answers},
				Part{"decode", a.Decode}, Part{"overflow", a.Overflow}, Part{"session", a.Session})
		}
		out = append(out, w)
	}
	return out
}

// parts leaves out what is nothing.
func parts(all ...Part) []Part {
	return slices.DeleteFunc(all, func(p Part) bool { return p.Value == 0 })
}

// expectedPrefill is how long the prefill leg should take: what is before it on P, and its own work at P's speed.
func expectedPrefill(c picker.Choice, p *kvstate.Candidate) time.Duration {
	speed := p.Speed
	if speed <= 0 {
		speed = 1
	}
	return p.Queue + time.Duration(c.Work*speed*float64(time.Second))
}

// maxWeighed bounds what is shown of a large fleet.
const maxWeighed = 64
