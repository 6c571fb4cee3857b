package filter

import (
	"tandem/extproc/kvtransfer"
	"tandem/extproc/migration"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
)

// The part of an insured answer that belongs to the passes of its request, and runs in its goroutine.

// insure decides in a request's first pass whether it is insured.
func (p passing) insure(d *plan.Decision) {
	f := p.f
	policy, _ := f.s.Passes.Policy(d.Pool.Spec.Name)
	streams, r := policy.Streams, &f.m.pass.Req.Client
	if !streams.On || f.resumed != nil || streams.Header != "" && f.head.Extra(streams.Header) == nil {
		return
	}
	reason := migration.Refusal(r, streams)
	switch dialect := &policy.Dialect; { // D's leg may be another than the one that is made here
	case f.unsure():
		reason = "not_strict"
	case dialect.Concurrent != nil:
		reason = "legs_at_once"
	case dialect.Continue != nil:
		reason = "rewritten"
	}
	if reason != "" {
		f.s.Passes.Observer.Streams.Insured(d.Pool.Spec.Name, string(reason))
		return
	}
	f.s.Passes.Observer.Streams.Insured(d.Pool.Spec.Name, "insured")
	f.insured.Store(&Insured{f: f, api: r.API(), journey: f.s.journeys.NewInsured(r, streams, &f.hop.ticket, f.id)})
}

// unlearn keeps a pass from learning the ids of a prompt that has a part of the answer in it.
func (p passing) unlearn(d *plan.Decision) {
	if in := InsuredOf(p.f); in != nil && in.journey.Stream.Continues() {
		d.Ticket.Learn = kvtransfer.Learn{}
	}
}

// toPrefill returns the body of P's leg with the ids of the answer that is continued, if one is.
func (p passing) toPrefill(body []byte) []byte {
	in := InsuredOf(p.f)
	if in == nil || !in.journey.Stream.Continues() {
		return body
	}
	p.f.m.pass.Prefilled.Asked = in.journey.Stream.PromptTokens()
	return p.rewrite(in, body, false)
}

// rewrite returns a leg's body with what its engine needs. d: it is D's.
func (passing) rewrite(in *Insured, body []byte, d bool) []byte {
	var r openai.Request
	var p openai.Patch
	if r.Scan(in.api, body, openai.Limits{}) != nil {
		return body // a dialect's leg is JSON
	}
	p.Reset(&r)
	if d {
		in.journey.Stream.Ask(&r, &p)
	} else {
		in.journey.Stream.AskPrompt(&r, &p)
	}
	return p.Edits().Apply(nil, body)
}

// toDecode returns how an insured request goes on to D.
func (p passing) toDecode(in *Insured, r *pass.Routed) onWorker {
	x := &p.f.m.pass
	body := p.rewrite(in, r.Edits.Apply(nil, x.Body.Bytes()), true)
	return func() { in.f.reach(r.Endpoint, func() { in.start(r, body) }) }
}
