package filter

import (
	"context"

	"tandem/extproc/journey"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
)

// encode is the leg of a request to an endpoint that makes the embeddings of its media, before all others. The pass's
// body stays the client's, so the media are in it too: a failed encode leg only costs time.
type encode struct {
	f    *Filter
	r    pass.Routed
	body []byte
}

// encode makes the leg's body, and has it sent.
func (p passing) encode(r *pass.Routed) onWorker {
	f, x := p.f, &p.f.m.pass
	if len(r.Edits) > 0 { // the leg's body also has what the operator has set
		f.m.edit(r.Edits)
		if err := x.Req.Client.Scan(openai.Chat, x.Body.Bytes(), openai.Limits{}); err != nil {
			return p.refusal(err)
		}
	}
	e := &encode{f, *r, x.Req.Client.AppendEncode(make([]byte, 0, len(x.Body.Bytes())+256))}
	if !f.s.hold(f.m, len(x.Body.Bytes())+len(e.body)) {
		return func() { f.refuse(openai.ServerBusy()) }
	}
	return e.send
}

func (e *encode) send() {
	f, to := e.f, e.r.Endpoint
	f.hop.encode, f.state = e, journey.Prefilling
	if f.unsure() {
		f.refuse(notStrict())
		return
	}
	f.reach(to, func() {
		sent := f.envoy.Call(legCall(f, to, e.r.Path, e.body, e.r.PerTry, to.RankName(), f.id))
		e.body = nil
		if !sent {
			e.called(notSent())
		}
	})
}

// called goes on with the second pass.
func (e *encode) called(a *prefilled) {
	f := e.f
	f.state = journey.Waiting
	f.offWorker("encode answer", true, func(p passing, ctx context.Context) onWorker {
		x := &f.m.pass
		f.s.hold(f.m, len(x.Body.Bytes()))
		startSpan(ctx, f, telemetry.SpanEncodeLeg)
		f.m.meter.SpanTicket(&f.hop.ticket)
		return p.again(ctx, f.m.legs.SettleEncode(&f.hop.ticket, &a.Answer).Clone())
	})
}
