package pass

import "tandem/extproc/names"

// Told returns the last decision in the form for access logs; nil: there was none to report.
func (x *Pass) Told() []names.Metadata {
	p := &x.Planned
	if p.Route == "" {
		return nil
	}
	return []names.Metadata{
		{Name: "pool", Text: p.Pool}, {Name: "route", Text: p.Route}, {Name: "reason", Text: p.Reason},
		{Name: "prefill", Text: p.Prefill}, {Name: "decode", Text: p.Decode},
		{Name: "prompt_tokens", Number: float64(p.PromptTokens)}, {Name: "price", Number: x.Req.Foreseen.Price},
		{Name: "waited", Number: p.Waited.Seconds()},
	}
}
