package plan

import (
	"slices"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// NotSplit returns why no request with so many uncached tokens is split, whatever it costs; "" if it may be.
func (p *Policy) NotSplit(tokens int64) string {
	place := p.Placement()
	switch {
	case p.Dialect.Prefill == nil && p.Dialect.Concurrent == nil:
		return "no_kv_transfer"
	case !p.Split:
		return "policy"
	case place.Split == picker.SplitAuto && tokens < place.MinPrefillTokens:
		return "min_prefill_tokens"
	}
	return ""
}

// Whole is about a request that may be split, and for which the picker chose no pair. It returns no_prefill if there
// is none, "" if decode alone is cheaper, and the client's answer as an error if it must not be decoded alone.
func (p *Policy) Whole(pool *kvstate.Pool, v *kvstate.View) (why string, refusal error) {
	if why = Unpaired(v); why == "cheaper" {
		why = ""
	}
	if err := p.RefuseAlone(pool, Unpaired(v)); err != nil {
		return why, err
	}
	both := func(c kvstate.Candidate) bool { return c.Usable && c.Endpoint.Role == kvstate.RoleBoth }
	if p.Dialect.PairsOnly() && !slices.ContainsFunc(v.Endpoints, both) {
		message := p.noPair(pool) + ", and the dialect's decode endpoints do not decode alone"
		return why, openai.Unavailable("no_endpoint", message, time.Second)
	}
	return why, nil
}
