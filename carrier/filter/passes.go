package filter

import (
	"context"
	"errors"
	"io"
	"strconv"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/models"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
)

// maxLegMore is how much longer than the client's a leg's body may be, in bytes.
const maxLegMore = kvtransfer.MaxUndoBytes + plan.MaxDecodeMember

// maxAnswer bounds the part of P's answer that is read, in bytes: one token, and the KV parameters.
const maxAnswer = 16 << 20

// decide decides about a request whose body, if it is read, is there: in its first pass, or after a failed hop to D.
func (p passing) decide(ctx context.Context) onWorker {
	f, x := p.f, &p.f.m.pass
	f.m.meter.EndPhase(telemetry.PhaseReceive)
	startSpan(ctx, f, telemetry.SpanDecide)
	if f.resumed != nil {
		t := f.resumed.ticket
		d, err := f.m.legs.Resume(ctx, x, &t, nil)
		return p.commit(ctx, d, err)
	}
	var d *plan.Decision
	var err error
	switch api := f.s.Passes.API(&x.Head); api {
	case openai.Models:
		if list := models.Answer(f.s.Passes.State, string(x.Head.Path), f.s.Started); list != nil {
			return func() { f.answerList(list) }
		}
		if !f.s.Passes.Serves(string(x.Head.Method), string(x.Head.Path)) {
			return func() { f.refuse(openai.NotServed()) }
		}
		d, err = x.Other(ctx)
	case openai.PassThrough:
		d, err = x.Other(ctx)
	default:
		if d, err = x.First(ctx, api, plan.Attempt{Started: f.s.Passes.Now()}); err == nil {
			p.insure(d)
		}
	}
	return p.commit(ctx, d, err)
}

// commit carries a decision out, and returns how the request goes on. err is why there is none.
func (p passing) commit(ctx context.Context, d *plan.Decision, err error) onWorker {
	f, x := p.f, &p.f.m.pass
	if errors.Is(err, latebinding.ErrWaits) {
		return func() { f.offWorker("decide", true, passing.rest) }
	}
	var r pass.Routed
	if err == nil {
		p.unlearn(d)
		r, err = x.Commit(ctx, d)
	}
	if err != nil {
		return p.refusal(err)
	}
	if x.Explanation != nil {
		f.got.explained = string(x.Explanation)
	}
	f.hop.ticket = r.Ticket.Clone()
	f.hop.pair, f.hop.encode = nil, nil
	f.m.meter.EndPhase(telemetry.PhaseDecide)
	f.m.meter.EndSpan("")
	then := onWorker(func() { f.sendOn(&r) })
	switch r.Leg {
	case plan.LegPrefill:
		f.m.edit(r.Edits)
		body := p.toPrefill(x.Body.Bytes())
		then = func() { f.callPrefill(&r, body) }
	case plan.LegPair:
		then = p.pair(&r)
	case plan.LegEncode:
		then = p.encode(&r)
	case plan.LegDecode, plan.LegPass:
		if in := InsuredOf(f); in != nil {
			then = p.toDecode(in, &r)
		}
	}
	if f.s.Decisions {
		then = tellDecision(f.envoy, x, then)
	}
	return then
}

// rest is the part of a pass that waits.
func (p passing) rest(ctx context.Context) onWorker {
	d, err := p.f.m.pass.Rest(ctx)
	if err == nil && p.f.hop.ticket.Stage == 0 { // the first pass
		p.insure(d)
	}
	return p.commit(ctx, d, err)
}

// refusal has a request answered with an error.
func (p passing) refusal(err error) onWorker {
	f := p.f
	e, ok := errors.AsType[*openai.Error](err)
	if !ok {
		if !errors.Is(err, context.Canceled) && !errors.Is(err, io.EOF) { // else the client has left
			f.s.Passes.Log.Error("request failed", "role", "inside", "request_id", f.m.pass.ID, "err", err)
		}
		e = openai.Internal()
	}
	f.m.meter.EndSpan(e.Code)
	return func() { f.refuse(e) }
}

// prefilled is what P answered, in the filter's memory.
type prefilled struct {
	pass.Answer
	headers []Header // that the client gets of a refusal
}

// settle settles P's leg by its answer, and goes on with the second pass.
func (p passing) settle(ctx context.Context, a *prefilled) onWorker {
	f, t := p.f, &p.f.hop.ticket
	startSpan(ctx, f, telemetry.SpanPrefillAnswer)
	f.m.meter.SpanTicket(t)
	settled := f.m.legs.Settle(ctx, t, &a.Answer)
	next := settled.Next
	if next == nil {
		stream := t.Stream && !settled.Refused
		return func() { f.answerSettled(a, &settled, stream) }
	}
	f.hop.ticket = settled.Ends()
	if ctx.Err() != nil {
		return nil // nobody is there to fetch it for
	}
	return p.again(ctx, next.Clone())
}

// again makes the next pass of a request, which goes on with a ticket.
func (p passing) again(ctx context.Context, t kvtransfer.Ticket) onWorker {
	f, x := p.f, &p.f.m.pass
	head, id, reserved, continues := x.Head, x.ID, x.ReservedAs, x.Continues
	x.Reset()
	x.Head, x.ID, x.ReservedAs, x.Prefilled.ID, x.Continues = head, id, reserved, id, continues
	f.m.meter.EndSpan("")
	f.m.meter.Begin("", f.s.Tracer)
	startSpan(ctx, f, telemetry.SpanDecide)
	d, err := f.m.legs.Resume(ctx, x, &t, nil)
	return p.commit(ctx, d, err)
}

// traceContext is a W3C trace context; "": none.
type traceContext struct{ parent, state string }

// headers are those of a hop.
func (t traceContext) headers() []Header {
	switch {
	case t.parent == "":
		return nil
	case t.state == "":
		return []Header{{names.HeaderTraceparent, t.parent}}
	}
	return []Header{{names.HeaderTraceparent, t.parent}, {names.HeaderTracestate, t.state}}
}

// startSpan starts the span of a pass, below which the hops after it are.
func startSpan(ctx context.Context, f *Filter, name string) {
	m, t := &f.m.meter, &f.hop.trace
	m.StartSpanBelow(ctx, name, t.parent, t.state, f.id)
	if parent, state := m.Trace(); parent != "" {
		*t = traceContext{parent, state}
	}
}

// read reads the headers of an answer to a call, and reports whether an endpoint gave it: Envoy answers calls itself,
// too, and marks the others with the time that they took.
func (a *prefilled) read(headers func(do func(name, value []byte))) (status int, engine bool) {
	headers(func(name, value []byte) {
		switch string(name) {
		case ":status":
			status, _ = strconv.Atoi(string(value))
		case "x-envoy-upstream-service-time":
			engine = true
		case "retry-after":
			a.RetryAfter = append([]byte(nil), value...)
		case names.HeaderLoad:
			a.Load = append([]byte(nil), value...)
			return // Tandem has asked for it, not the client
		}
		if !hopByHop(name) {
			a.headers = append(a.headers, Header{string(name), string(value)})
		}
	})
	return status, engine
}
