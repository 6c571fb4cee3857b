package extproc

import (
	"log/slog"
	"time"

	"tandem/kvstate"
	"tandem/picker"
)

// Weighed is one endpoint in a decision, with what its price was made of (picker.PriceUnit).
type Weighed struct {
	Endpoint string        `json:"endpoint"`
	Role     string        `json:"role"`
	Out      bool          `json:"out,omitempty"` // left out: it failed
	Hit      int           `json:"hit_blocks"`    // leading blocks of the prompt that it holds
	Prefill  []picker.Part `json:"prefill,omitempty"`
	Decode   []picker.Part `json:"decode,omitempty"`
}

// planned tells all who watch what a pass was planned as: metrics, the latest requests, the trace, the log. prefill is nil
// where one endpoint does both, reason "" where nothing else could have been wanted.
func (x *exchange) planned(pool *kvstate.Pool, route, reason string, prefill, decode *kvstate.Endpoint, tokens int64) {
	x.s.metrics.decided(pool, route, reason)
	p := ""
	if prefill != nil {
		p = prefill.Addr
	}
	var weighed []Weighed
	if two := prefill != nil; (two || route == "decode_alone") && (x.span != nil || x.s.recent.wantsWeighed(time.Now())) {
		weighed = x.weigh(two, tokens)
	}
	x.s.recent.planned(x.requestID, pool.Spec.Name, route, reason, p, decode.Addr, tokens, weighed)
	x.spanPlanned(pool, route, reason, prefill, decode, tokens, weighed)
	if ctx := x.stream.Context(); x.s.Log.Enabled(ctx, slog.LevelDebug) {
		x.s.Log.DebugContext(ctx, "planned", "request_id", x.requestID, "pool", pool.Spec.Name, "route", route, "reason", reason,
			"prefill", p, "decode", decode.Addr, "prompt_tokens", tokens, "body_bytes", x.body.len())
	}
}

// weigh shows the view's endpoints as the picker priced them, at most maxWeighed.
func (x *exchange) weigh(split bool, tokens int64) []Weighed {
	r := picker.Request{PromptTokens: tokens, Blocks: len(x.hashes)}
	out := make([]Weighed, 0, min(len(x.view.Endpoints), maxWeighed))
	for i := range x.view.Endpoints[:cap(out)] {
		c := &x.view.Endpoints[i]
		w := Weighed{Endpoint: c.Endpoint.Addr, Role: c.Endpoint.Role.String(), Out: !c.Usable, Hit: c.Hit}
		if split && c.Endpoint.Role&kvstate.RolePrefill != 0 {
			w.Prefill = picker.PrefillParts(&r, c)
		}
		if c.Endpoint.Role&kvstate.RoleDecode != 0 {
			if w.Decode = picker.DecodeParts(&r, c); !split {
				w.Decode = picker.AloneParts(&r, c)
			}
		}
		out = append(out, w)
	}
	return out
}

// maxWeighed bounds what is shown of a large fleet.
const maxWeighed = 64
