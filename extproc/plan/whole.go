package plan

import (
	"slices"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// NotSplit returns why no request with so many uncached tokens is split, whatever it costs; "" if it may be.
func (p *Policy) NotSplit(tokens int64) string {
	switch {
	case p.Dialect.Prefill == nil && p.Dialect.Concurrent == nil:
		return "no_kv_transfer"
	case !p.Split:
		return "policy"
	case p.short(tokens):
		return "min_prefill_tokens"
	}
	return ""
}

// Whole is about a request with so many uncached tokens that may be split, and for which the picker chose no pair; full
// is whether an engine of both roles answers because there was no room. It returns no_room then, no_prefill if there is
// no pair, "" if decode alone is cheaper, and the client's answer as an error if it must not be decoded alone.
func (p *Policy) Whole(pool *kvstate.Pool, v *kvstate.View, tokens int64, full bool) (why string, refusal error) {
	if full {
		return NoRoom, nil
	}
	why = p.Unpaired(v, tokens)
	refusal = p.Refusal(pool, v, why)
	if why == "cheaper" {
		why = ""
	}
	return why, refusal
}

// Refusal returns the client's answer if a request that may be split, and for this reason is not, must not be decoded
// alone; nil if it may.
func (p *Policy) Refusal(pool *kvstate.Pool, v *kvstate.View, why string) error {
	if err := p.RefuseAlone(pool, why); err != nil {
		return err
	}
	both := func(c kvstate.Candidate) bool { return c.Usable && c.Endpoint.Role == kvstate.RoleBoth }
	if p.Dialect.PairsOnly() && !slices.ContainsFunc(v.Endpoints, both) {
		message := p.noPair(pool) + ", and the dialect's decode endpoints do not decode alone"
		return openai.Unavailable("no_endpoint", message, time.Second)
	}
	return nil
}
