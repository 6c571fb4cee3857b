package filter

import (
	"cmp"
	"context"
	"crypto/rand"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
)

// pair is a request both of whose legs are under way: P's is a call, D's the request itself. What follows from what
// happens to them is [journey.Pair]'s; here it is carried out. D's good answer waits for P in a filter behind Envoy's
// router ([Answers]): if it waited in front of the router and broke off, the client would get an error. All of it runs
// on the worker, except where a comment says otherwise.
type pair struct {
	f          *Filter
	journey    *journey.Pair
	trace      traceContext
	ticket     kvtransfer.Ticket // of P's body; never changed, so any goroutine may read it
	routed     pass.Routed
	edits      openai.Edits // make D's body of P's
	undo       openai.Edits // make the client's body of D's
	keeps      bool         // P's leg goes on without the request: D frees its blocks only when P has sent
	keptBytes  int64        // of the budget, for P's body, whether the request sends it or a detached call
	abandoned  atomic.Bool  // nobody waits for P any more
	ended      bool         // P's leg has
	joined     []byte       // the part of P's answer that belongs into the client's; nil: none
	key        string       // of its waiting answer
	upstream   Continuer    // D's answer, which waits for P behind Envoy's router; nil: it does not
	late, over *time.Timer  // nil: not set
}

// pair makes the bodies of both legs, and has them sent.
func (p passing) pair(r *pass.Routed) onWorker {
	f := p.f
	f.m.edit(r.Edits)
	body := f.m.body.data
	legs := &pair{f: f, trace: f.hop.trace, ticket: r.Ticket.Clone(), routed: *r, keeps: !r.Pair.Cancel}
	t := legs.ticket.Clone()
	legs.undo = concurrent.DecodeUndo(&legs.ticket)
	var err error
	if legs.edits, err = concurrent.DecodeEdits(&t, len(body)); err != nil {
		return p.refusal(err)
	}
	return func() { f.reach(r.Pair.Prefill, legs.begin) }
}

// begin sends both legs.
func (p *pair) begin() {
	f, how := p.f, &p.routed.Pair.Plan
	if f.unsure() {
		f.refuse(notStrict())
		return
	}
	f.hop.pair, f.state = p, journey.Prefilling
	limit := f.s.journeys.PairLimit(&p.ticket)
	id := cmp.Or(how.RequestID, f.id)
	p.journey = f.s.journeys.NewPair(&p.ticket, journey.PairRules{})
	c := prefillCall(f, p.routed.Pair.Prefill, p.routed.Path, f.m.body.data, limit, how.PrefillRank, id)
	switch {
	case p.keeps:
		c.Timeout = f.s.Passes.Limits.TicketTTL
		if !p.keep(c) {
			f.refuse(openai.ServerBusy())
			return
		}
		p.late = time.AfterFunc(limit, func() { f.worker.wake(p.overdue) })
	case !f.envoy.Call(c):
		p.settle(notSent()) // D would wait in vain
		return
	}
	p.carryOut(p.journey.Begin())
}

// carryOut does what follows from an event.
func (p *pair) carryOut(a journey.PairAction) {
	if a.Abandon {
		p.abandoned.Store(true)
	}
	if a.After > 0 {
		p.over = time.AfterFunc(a.After, func() { p.f.worker.wake(p.elapsed) })
	}
	switch a.Do {
	case journey.SendDecode:
		p.send()
	case journey.LetGo:
		if waits := p.upstream; waits != nil {
			p.upstream = nil
			waits.ContinueAnswer()
		}
	case journey.PlanAgain:
		p.planAgain(a.Leg, a.Failure)
	case journey.Refuse:
		p.refuse(a.Refusal)
	case journey.Await, journey.Hold:
	}
}

// send sends D's leg: the request goes on.
func (p *pair) send() {
	f, r := p.f, &p.routed
	if f.route == nil || f.route.Holds {
		p.key = rand.Text()
		f.envoy.SetHeader(headerPair, p.key)
		waiting.Store(p.key, p)
	}
	r.Edits = p.edits
	t := &f.hop.ticket
	t.Undo, t.BodyBytes = p.undo, p.edits.Len(len(f.m.body.data))
	sent := *r
	p.routed, p.edits = pass.Routed{}, nil // they refer to memory of the pass, which is given back
	f.sendOn(&sent)
}

// called is called when P's call has ended.
func (p *pair) called(a *prefilled) {
	if a.Overdue {
		p.overdue()
		return
	}
	p.settle(a)
}

// settle settles P's leg by its answer, in a goroutine. Any thread may call it.
func (p *pair) settle(a *prefilled) {
	f := p.f
	go func() {
		ctx := guard.With(context.Background(), f.s.Passes.Guard)
		type settled struct {
			concurrent.Outcome
			joined []byte
		}
		v, _ := guard.Try(ctx, "envoy filter pair", func() (v settled, _ error) { // after a panic it has failed
			m := f.s.scratch.Get().(*scratch)
			m.meter.Begin("", f.s.Tracer)
			m.meter.StartSpanBelow(ctx, telemetry.SpanPrefillAnswer, p.trace.parent, p.trace.state, f.id)
			m.meter.SpanTicket(&p.ticket)
			m.meter.SpanPair(&p.ticket)
			m.pass.Prefilled.ID = f.id
			v.Outcome, v.joined = m.legs.SettlePair(&p.ticket, &a.Answer)
			m.meter.EndSpan("")
			f.s.release(m)
			return v, nil
		})
		if f.worker.wake(func() { p.prefilled(&v.Outcome, v.joined) }) && v.OK && !p.abandoned.Load() {
			f.s.journeys.PairHolds(&p.ticket)
		}
	}()
}

// isCurrent reports whether the request still depends on this pair.
func (p *pair) isCurrent() bool {
	s := p.f.state
	return p.f.hop.pair == p && (s == journey.Prefilling || s == journey.BothLegs)
}

// prefilled goes on after P's leg has ended.
func (p *pair) prefilled(v *concurrent.Outcome, joined []byte) {
	if p.ended || !p.isCurrent() {
		return
	}
	p.ended, p.joined = true, joined
	p.carryOut(p.journey.PrefillEnded(v))
}

// overdue plans the request again because P has exceeded its time.
func (p *pair) overdue() {
	if p.ended || !p.isCurrent() {
		return
	}
	if p.ended = !p.keeps; p.ended { // Envoy has cut it
		o, took := p.f.s.Passes.Observer, p.f.s.Passes.Since(&p.ticket)
		o.HopEnded(p.ticket.Pool, "prefill", p.ticket.Prefill, "failed", took, nil)
	}
	p.carryOut(p.journey.PrefillOverdue())
}

func (p *pair) elapsed() {
	if p.isCurrent() {
		p.carryOut(p.journey.Elapsed())
	}
}

// named gives the request its client's id again, which Envoy puts into the answer: D's leg may have had another.
func (p *pair) named() { p.f.envoy.SetHeader(names.HeaderRequestID, p.f.id) }

// answers is called when D's answer begins, while it may still be planned again.
func (p *pair) answers(o *Outcome, end bool) Status {
	p.named()
	a := p.journey.DecodeAnswers(&journey.DecodeHead{Status: o.Status, Failure: *failure(p.f, o)})
	p.carryOut(a)
	switch a.Do {
	case journey.LetGo, journey.Hold: // a good one would have been held behind the router
		return answers(p.f, o, end)
	case journey.PlanAgain, journey.Refuse:
		return Stop
	default:
		return Pause
	}
}

// planAgain plans the request again after P or, if the cause says so, D has failed. If D's leg was sent, it begins
// again with the body that D got, else with P's, which is here.
func (p *pair) planAgain(leg faults.Leg, how *faults.Failure) {
	f := p.f
	if !f.state.IsSent() {
		f.state = journey.Waiting
		f.offWorker("plan again", true, func(x passing, ctx context.Context) onWorker {
			return x.again(ctx, f.s.journeys.PairFailed(&p.ticket, f.id, leg, how))
		})
		return
	}
	again := func() kvtransfer.Ticket { return f.s.journeys.PairFailed(&f.hop.ticket, f.id, leg, how) }
	if !f.planAgain(again) {
		p.named()
		f.takeBack()
		f.refuse(openai.Unavailable("endpoint_failed", "the endpoints failed and there is no other way to answer",
			time.Second))
	}
}

// refuse answers with P's refusal of the request.
func (p *pair) refuse(v *concurrent.Outcome) {
	f := p.f
	f.begun()
	p.named()
	f.state = journey.Answered
	f.envoy.Respond(v.Status, f.withID([]Header{{"content-type", names.ContentTypeJSON}}),
		journey.Refusal(v, f.head.Extra(":path")), names.DetailsPrefix+"_prefill_refused")
}

// headerPair names the pair of D's request, for the filter behind Envoy's router, which takes it away.
const headerPair = "x-tandem-pair"

// waiting are the pairs whose D was asked while P works, by their keys: until their requests end.
var waiting sync.Map

// Continuer is an answer that waits.
type Continuer interface{ ContinueAnswer() }

// Answers is called behind Envoy's router when the D of a pair answers. A good answer waits there for P. If it breaks
// off meanwhile, the router has not seen it, so the request is planned again.
func Answers(key string, status int, answer Continuer) Status {
	p, ok := waiting.Load(key)
	if !ok || status != http.StatusOK && status != http.StatusPartialContent {
		return Continue
	}
	return p.(*pair).hold(answer)
}

func (p *pair) hold(answer Continuer) Status {
	if p.ended || !p.isCurrent() {
		return Continue
	}
	if a := p.journey.DecodeAnswers(&journey.DecodeHead{Status: http.StatusOK}); a.Do != journey.Hold {
		return Continue
	}
	p.upstream = answer
	return Pause
}

// AnswerGone is called when an answer has ended, or will not come.
func AnswerGone(key string) {
	if p, ok := waiting.Load(key); ok {
		p.(*pair).upstream = nil
	}
}

// close ends the pair with its request.
func (p *pair) close() {
	p.abandoned.Store(true)
	waiting.Delete(p.key)
	for _, t := range []*time.Timer{p.late, p.over} {
		if t != nil {
			t.Stop()
		}
	}
	if !p.ended && !p.keeps { // Envoy cuts it with the request
		p.ended = true
		passes := p.f.s.Passes
		took := passes.Since(&p.ticket)
		passes.Observer.HopEnded(p.ticket.Pool, "prefill", p.ticket.Prefill, "client_gone", took, nil)
	}
}

// How often P's leg is sent if it goes on without the request, and the pause after a failed try. D waits for these very
// blocks.
const (
	keptTries = 3
	keptPause = 50 * time.Millisecond
)

// keep sends P's leg so that it goes on without the request. false: there is no memory for its body.
func (p *pair) keep(c *Call) bool {
	if !p.f.s.Memory.Replace(&p.keptBytes, int64(len(c.Body))) {
		return false
	}
	leg := p.f.envoy.Detach(c)
	var try func(n int)
	try = func(n int) {
		leg.Send(func(answer *Answer) {
			a, _ := readAnswer(answer, nil)
			if (a.Cut || a.Code >= 500) && !a.Overdue && n < keptTries {
				time.AfterFunc(keptPause, func() { try(n + 1) })
				return
			}
			p.f.s.Memory.Replace(&p.keptBytes, 0)
			p.settle(a)
		})
	}
	try(1)
	return true
}
