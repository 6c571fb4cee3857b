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
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/internal/guard"
)

// pair is a request both of whose legs are under way: P's is a call, D's the request itself. D has no token before P
// has done its part, so its answer waits for that: engines answer a stream with 200 before they have done anything, and
// what has gone to a client cannot be planned again. It waits in a filter behind Envoy's router ([Answers]): in front
// of it, an answer that breaks off while it waits would be an error that nobody can take back. All of it runs on the
// worker, except where a comment says otherwise.
type pair struct {
	f          *Filter
	trace      traceContext
	ticket     kvtransfer.Ticket // of P's body; never changed, so any goroutine may read it
	routed     pass.Routed
	edits      openai.Edits // make D's body of P's
	undo       openai.Edits // make the client's body of D's
	first      bool         // D's leg is sent when P has answered
	keeps      bool         // P's leg goes on without the request: D frees its blocks only when P has sent
	keptBytes  int64        // of the budget, for P's body; whoever sends it
	abandoned  atomic.Bool  // nobody waits for P any more
	ended      bool         // P's leg has
	joined     []byte       // the part of P's answer that belongs into the client's; nil: none
	key        string       // of its waiting answer
	upstream   Continuer    // D's answer, which waits for P behind Envoy's router; nil: it does not
	failing    *faults.Failure
	late, over *time.Timer // nil: not set
}

// newPair makes the bodies of both legs, and returns a function that sends them.
func newPair(f *Filter, r *pass.Routed) func() {
	f.m.edit(r.Edits)
	body := f.m.body.data
	p := &pair{f: f, trace: f.hop.trace, ticket: clone(&r.Ticket), routed: *r, keeps: !r.Pair.Cancel}
	t := clone(&p.ticket)
	p.undo = concurrent.DecodeUndo(&p.ticket)
	var err error
	if p.edits, err = concurrent.DecodeEdits(&t, len(body)); err != nil {
		return f.refusal(err)
	}
	policy, _ := f.s.Passes.Policy(t.Pool)
	if c := policy.Dialect.Concurrent; c != nil {
		p.first = c.PrefillFirst
	}
	return p.begin
}

// begin sends P's leg, and D's unless that waits for P.
func (p *pair) begin() {
	f, how := p.f, &p.routed.Pair.Plan
	f.hop.pair = p
	limit := f.s.Passes.PairLimit(&p.ticket)
	id := cmp.Or(how.RequestID, f.id)
	c := prefillCall(f, p.routed.Pair.Prefill, p.routed.Path, f.m.body.data, limit, how.PrefillRank, id)
	switch {
	case p.keeps:
		c.Timeout = f.s.Passes.Limits.TicketTTL
		if !p.keep(c) {
			f.refuse(openai.ServerBusy())
			return
		}
		p.late = time.AfterFunc(limit, func() { f.wake(p.overdue) })
	case !f.envoy.Call(c):
		p.first = true // D would wait in vain
		p.settle(notSent())
	}
	if !p.first {
		p.send()
	}
}

// send sends D's leg: the request goes on.
func (p *pair) send() {
	f, r := p.f, &p.routed
	if !p.ended {
		p.key = rand.Text()
		f.envoy.SetHeader(headerPair, p.key)
		waiting.Store(p.key, p)
	}
	r.Edits = p.edits
	t := &f.hop.ticket
	t.Undo, t.BodyBytes = p.undo, p.edits.Len(len(f.m.body.data))
	sent := *r
	p.routed, p.edits = pass.Routed{}, nil // they have memory of the pass's, which is given back
	f.sendOn(&sent)
}

// called is told how P's call has ended.
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
			v.Outcome, v.joined = m.pass.Prefilled.SettlePair(&p.ticket, &a.Answer)
			m.meter.EndSpan("")
			f.s.release(m)
			return v, nil
		})
		if f.wake(func() { p.prefilled(&v.Outcome, v.joined) }) && v.OK && !p.abandoned.Load() {
			f.s.Passes.PairHolds(&p.ticket)
		}
	}()
}

// waits reports whether the request still waits for P.
func (p *pair) waits() bool {
	return !p.ended && p.f.hop.pair == p && !p.f.hop.answered && !p.f.hop.handed
}

// prefilled goes on after P's leg has ended.
func (p *pair) prefilled(v *concurrent.Outcome, joined []byte) {
	if !p.waits() {
		return
	}
	f := p.f
	p.ended, p.joined = true, joined
	switch {
	case f.hop.sent && !f.hop.replan: // D has refused the request
	case v.OK && !f.hop.sent:
		p.send()
	case v.OK && p.failing != nil:
		p.planAgain(kvtransfer.CauseDecode, p.failing)
	case v.OK && p.upstream != nil:
		waits := p.upstream
		p.upstream = nil
		waits.ContinueAnswer()
	case v.OK:
	default:
		cause := f.s.Passes.PairCause(&p.ticket, v)
		if cause == "" {
			p.refuse(v)
			return
		}
		p.planAgain(cause, &faults.Failure{
			Status: v.Status, RetryAfter: v.RetryAfter, Unreached: v.Unreached,
		})
	}
}

// overdue plans the request again because P has exceeded its time.
func (p *pair) overdue() {
	if !p.waits() || p.f.hop.sent && !p.f.hop.replan {
		return
	}
	o := p.f.s.Passes.Observer
	o.PrefillLate(&p.ticket)
	if p.ended = !p.keeps; p.ended { // Envoy has cut it
		o.HopEnded(p.ticket.Pool, "prefill", p.ticket.Prefill, "failed", p.f.s.Passes.Since(&p.ticket), nil)
	}
	p.planAgain(kvtransfer.CausePrefill, &faults.Failure{Unreached: true})
}

// named gives the request its client's id again, which Envoy puts into the answer: D's leg may have had another.
func (p *pair) named() { p.f.envoy.SetHeader(names.HeaderRequestID, p.f.id) }

// answers is called when D's answer begins, while it may still be planned again.
func (p *pair) answers(o *Outcome, end bool) Status {
	f := p.f
	p.named()
	switch {
	case faults.Failed(o.Status):
		how := failure(f.envoy, o)
		if p.ended || how.Full() {
			p.planAgain(kvtransfer.CauseDecode, how)
			return Stop
		}
		p.failing = how // when P dies, D often fails first
		p.over = time.AfterFunc(concurrent.VerdictWait, func() { f.wake(p.decodeFailed) })
		return Pause
	case o.Status != http.StatusOK && o.Status != http.StatusPartialContent:
		p.abandoned.Store(true)
	}
	return answers(f, o, end)
}

// decodeFailed plans the request again after D has failed, and P has not.
func (p *pair) decodeFailed() {
	if p.failing != nil && p.waits() {
		p.planAgain(kvtransfer.CauseDecode, p.failing)
	}
}

// planAgain plans the request again after P or, if the cause says so, D has failed. If D's leg was sent, it begins
// again with the body that D got, else with P's, which is here.
func (p *pair) planAgain(cause string, how *faults.Failure) {
	f := p.f
	p.abandoned.Store(true)
	if !f.hop.sent {
		f.beside("plan again", true, func(ctx context.Context) func() {
			next := f.s.Passes.PairFailed(&p.ticket, f.id, cause, how)
			f.again(ctx)
			d, err := f.m.pass.Resume(ctx, &next, nil)
			return f.commit(ctx, d, err)
		})
		return
	}
	again := func() kvtransfer.Ticket { return f.s.Passes.PairFailed(&f.hop.ticket, f.id, cause, how) }
	if !f.planAgain(again) {
		p.named()
		f.hop.sent = false
		f.refuse(openai.Unavailable("endpoint_failed", "the endpoints failed and there is no other way to answer",
			time.Second))
	}
}

// refuse answers with P's refusal of the request.
func (p *pair) refuse(v *concurrent.Outcome) {
	f := p.f
	f.begun()
	p.named()
	f.hop.sent = false
	if len(v.Answer) == 0 {
		f.refuse(&openai.Error{Status: v.Status, Type: "invalid_request_error", Code: "prefill_refused",
			Message: "the prefill endpoint refused this request"})
		return
	}
	f.hop.answered = true
	f.envoy.Respond(v.Status, []Header{{"content-type", names.ContentTypeJSON}}, v.Answer,
		names.DetailsPrefix+"_prefill_refused")
}

// headerPair names the pair of D's request, for the filter behind Envoy's router, which takes it away.
const headerPair = "x-tandem-pair"

// waiting are the pairs whose D was asked while P works, by their keys: until their requests end.
var waiting sync.Map

// Continuer is an answer that waits.
type Continuer interface{ ContinueAnswer() }

// Answers is called behind Envoy's router when the D of a pair answers. A good answer waits there for P: of one that
// breaks off meanwhile the router has seen nothing, so the request is planned again.
func Answers(key string, status int, answer Continuer) Status {
	p, ok := waiting.Load(key)
	if !ok || status != http.StatusOK && status != http.StatusPartialContent {
		return Continue
	}
	return p.(*pair).hold(answer)
}

func (p *pair) hold(answer Continuer) Status {
	if !p.waits() {
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

// A leg of P's that goes on without the request: how often it is sent, and how long after a try that failed. D waits
// for these very blocks.
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
