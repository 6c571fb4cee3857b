package filter

import (
	"context"
	"strings"
	"time"

	"tandem/extproc/ended"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/internal/guard"
	"tandem/internal/periodic"
)

// watch has [Shared.Run] watch an answer that may not come. With begin false the watch ends.
func (s *Shared) watch(f *Filter, begin bool) {
	if !f.state.MayFail() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.waiting, f); begin {
		s.waiting[f] = struct{}{}
	}
}

// ResponseHeaders is called when an answer begins: D's, or Envoy's own in its place.
func (f *Filter) ResponseHeaders(end bool) Status {
	if !f.state.IsSent() {
		return Continue
	}
	return f.guarded("response headers", func() Status {
		header := func(name string) string { return string(f.envoy.ResponseHeader(name)) }
		if f.got.begins(f, header) && !end {
			f.envoy.Count(f.got.tokens.Events)
		}
		f.got.first = time.Since(f.began)
		o := f.envoy.Outcome()
		f.noteKept(&o) // says once what is wrong with the route, before a request needs it
		switch {
		case faults.Filtered(o.Details):
			return filtered(f, &o)
		case f.hop.other && f.asksOther(failure(f, &o)):
			return Stop
		case !f.state.MayFail() && faults.Redirects(o.Status):
			return f.refuseRedirect()
		case !f.state.MayFail():
			return answers(f, &o, end)
		case f.hop.pair != nil:
			return f.hop.pair.answers(&o, end)
		}
		switch failed := faults.Failed(o.Status); {
		case failed && f.decodeFailed(failure(f, &o)):
			return Stop
		case faults.Redirects(o.Status):
			return f.refuseRedirect()
		}
		return f.checkLate(&o, end, end)
	})
}

// refuseRedirect answers in place of an endpoint's redirect.
func (f *Filter) refuseRedirect() Status {
	f.takeBack()
	f.refuse(openai.Redirected())
	return Stop
}

// filtered lets the answer of another filter go to the client.
func filtered(f *Filter, o *Outcome) Status {
	f.deniedBehind(o)
	if f.hop.pair != nil {
		f.hop.pair.abandoned.Store(true)
	}
	f.begun()
	f.state = journey.Answered
	return Continue // as it is
}

// ResponseBody is called for the pieces of an answer that is rewritten, and for the first one if the headers wait for
// it. end: it is the last.
func (f *Filter) ResponseBody(end bool) Status {
	return f.guarded("response body", func() Status {
		if f.state == journey.Checking {
			if !end && openai.IsComment(f.envoy.AppendPiece(nil)) {
				return Stop // it says nothing of the engine, and waits with the headers
			}
			f.state = journey.Decoding
			f.envoy.HoldAnswer(false)
			o := f.envoy.Outcome()
			if status := f.checkLate(&o, true, false); status != Continue {
				return status
			}
		}
		if r := f.hop.rewrite; r != nil {
			return r.body(end)
		}
		return Continue
	})
}

// checkLate checks an answer that begins: if it may be made from KV that is another prompt's by now, the request is
// planned again. The headers of a stream come before its engine has done anything, so they wait for its first piece:
// then it has begun. bare: the answer has no body.
func (f *Filter) checkLate(o *Outcome, begun, bare bool) Status {
	t := &f.hop.ticket
	late := f.s.journeys.AnswerRule(t).Late
	if late == 0 {
		return answers(f, o, bare)
	}
	if !begun && openai.IsEventStream(string(f.envoy.ResponseHeader("content-type"))) {
		f.state = journey.Checking
		f.envoy.HoldAnswer(true)
		return Stop
	}
	if f.s.Passes.Since(t) > late && f.s.journeys.IsOutdated(t, f.id) {
		return f.refuseOutdated()
	}
	return answers(f, o, bare)
}

// begun records that an answer is D's for good.
func (f *Filter) begun() {
	if f.state.MayFail() {
		f.s.watch(f, false)
		f.state = journey.Answering
	}
}

// takeBack takes the request back from D, whose answer the client does not get.
func (f *Filter) takeBack() {
	if f.begun(); f.state.IsSent() {
		f.state = journey.Waiting
	}
}

// refuseOutdated plans the request again if its answer may be another prompt's or, where that cannot be, answers with
// an error.
func (f *Filter) refuseOutdated() Status {
	if !f.decodeFailed(&faults.Failure{}) {
		f.takeBack()
		const message = "the endpoint stood still until the KV of this prompt may have been freed; try again"
		f.refuse(openai.Unavailable("kv_outdated", message, time.Second))
	}
	return Stop
}

// noHost is Envoy's response code detail where the cluster of another's route does not have the endpoint, or has it as
// unhealthy (1.40). A cluster of Tandem's connects to any endpoint.
const noHost = "no_healthy_upstream"

// failure returns how D failed, from its own answer or from Envoy's in its place.
func failure(f *Filter, o *Outcome) *faults.Failure {
	how := faults.Of(o.Status, o.Details, string(f.envoy.ResponseHeader(names.HeaderRetryAfter)))
	how.Absent = f.route != nil && o.Details == noHost
	how.Overdue = strings.HasPrefix(o.Details, "upstream_per_try_timeout")
	return &how
}

// asksOther plans a request of one hop again, if its endpoint has done nothing for it. false: the answer is the
// client's.
func (f *Filter) asksOther(how *faults.Failure) bool {
	return (how.NotFound() || how.Unreached || how.Absent) && f.decodeFailed(how)
}

// decodeFailed plans the request again after its endpoint failed before the answer began. false: that is not possible.
func (f *Filter) decodeFailed(how *faults.Failure) bool {
	return f.planAgain(func() kvtransfer.Ticket { return f.s.journeys.DecodeFailed(&f.hop.ticket, f.id, how) })
}

// planAgain begins the request again, in another filter that continues the attempt, with the ticket of the failed hop.
// false: there is no way.
func (f *Filter) planAgain(failed func() kvtransfer.Ticket) bool {
	f.begun()
	if !f.s.journeys.Another(&f.hop.ticket) {
		return false
	}
	if !f.kept() {
		f.keepsNothing()
		failed()
		f.takeBack()
		f.refuse(openai.Unavailable("route_keeps_no_body", noRetries, 0))
		return true
	}
	next := failed()
	key := f.s.putRestart(&attempt{next, f.id, f.reservedAs, f.hop.trace, f.began, f.got.explained})
	f.envoy.SetHeader(headerAttempt, key)
	f.asItCame()
	was := f.state
	f.state = journey.Handed // Envoy may end this filter before Restart returns
	ok := f.envoy.Restart()
	switch {
	case f.s.takeRestart(key) == nil:
	case f.state == journey.Over: // it ended this one, and no other came
		f.endOffWorker(true)
	default:
		f.state = was
	}
	return ok
}

// lost plans the request again because its answer does not come.
func (f *Filter) lost() {
	switch {
	case !f.state.MayFail():
	case f.hop.pair != nil:
		f.hop.pair.carryOut(f.hop.pair.journey.DecodeLost())
	case !f.decodeFailed(&faults.Failure{}):
		f.takeBack()
		f.refuse(openai.Unavailable("endpoint_failed", "the endpoint did not answer; try again", time.Second))
	}
}

// Run looks after requests whose answers do not come, until ctx ends.
func (s *Shared) Run(ctx context.Context) {
	periodic.Run(ctx, 250*time.Millisecond, func(time.Time) {
		for _, f := range s.silent() {
			if s.journeys.Lost(&f.hop.ticket) {
				f.worker.wake(f.lost)
			}
		}
		s.lookAfter()
	})
}

// silent returns the requests that have waited for long.
func (s *Shared) silent() (out []*Filter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for f := range s.waiting {
		if s.Passes.Since(&f.hop.ticket) >= journey.Silence {
			out = append(out, f)
		}
	}
	return out
}

// finish records the end of the request, once, when nothing runs for it any more.
func (f *Filter) finish() {
	if f.state == journey.Over {
		return
	}
	f.begun()
	was := f.state
	f.state = journey.Over
	f.drop()
	if p := f.hop.pair; p != nil {
		p.close()
	}
	if r := f.hop.rewrite; r != nil {
		r.close()
	}
	switch {
	case was == journey.Handed:
	case was.IsSent():
		f.end(true)
	default:
		f.endOffWorker(false)
	}
}

// endOffWorker is end in a goroutine, for it may have to tell Redis.
func (f *Filter) endOffWorker(sent bool) {
	go func() {
		defer guard.Recover(guard.With(context.Background(), f.s.Passes.Guard), "envoy filter end")
		f.end(sent)
	}()
}

// end ends the request by what Envoy knows of it. sent: an endpoint that decodes had it.
func (f *Filter) end(sent bool) {
	t, o := &f.hop.ticket, f.worker.outcome
	if t.ID == ([16]byte{}) {
		if f.resumed == nil {
			return // it was refused before endpoints were chosen
		}
		t = &f.resumed.ticket
	}
	InsuredOf(f).outcome(o)
	e := &ended.Pass{
		RequestID: []byte(f.id), Details: []byte(o.Details), Status: o.Status, Start: f.began,
		Duration: time.Since(f.began), ClientGone: o.ClientGone(), Reservation: []byte(f.reservedAs),
		Traceparent: []byte(f.hop.trace.parent),
		Answered: ended.Answered{FirstByte: f.got.first, Body: o.Bytes, Usage: f.got.used(f, o),
			Continued: InsuredOf(f).joined()},
	}
	if sent {
		e.Try = ended.Try{Tries: 1, Began: true}
	}
	f.s.journeys.End(&journey.Ending{Ticket: t, Ended: e, Here: true})
}
