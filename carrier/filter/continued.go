package filter

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/migration"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// brokeOff has another endpoint continue a stream whose engine ended it before its time.
func (in *Insured) brokeOff(cause string) {
	f := in.f
	t, passes := &f.hop.ticket, f.s.Passes
	rest := in.stream.Release(nil) // an error's event
	reason := in.stream.Continue()
	switch {
	case in.to.ended:
		return
	case reason == migration.Complete:
		in.stop()
		passes.Observer.Streams.Continued(t.Pool, cause, resultFinished)
		in.give(in.stream.Finish(nil), true)
		return
	case cause == causeDifferent || cause == causeAnew || reason != "": // D is well, or nobody else is asked
	case in.unloaded(cause):
	case in.diesAgain():
		in.endsHere(cause, rest)
		return
	}
	if reason == "" && in.again.times >= in.policy.Limit() {
		reason = resultTimes
	}
	if reason != "" && in.again.spare == nil {
		passes.Observer.Streams.Continued(t.Pool, cause, string(reason))
		if cause == causeEnded { // the client gets what D says
			in.d.plain = true
			in.give(rest, in.d.id == 0)
		} else {
			in.cut(cause + ": " + string(reason))
		}
		return
	}
	in.stop()
	passes.Observer.HopEnded(t.Pool, "decode", t.Decode, "failed", passes.Since(t), nil)
	if reason != "" { // the engine before is still there
		in.goBack()
		return
	}
	passes.Release(pass.HeldBy(t))
	switch pool := passes.State.Pool(t.Pool); {
	case cause == causeDifferent, cause == causeAnew: // D is well
	case cause == causeReset:
		passes.Faults.Hop(t.Pool, f.id, t.Decode, &faults.Failure{})
	case pool != nil && in.notLoaded():
		passes.Faults.LoadFailed(pool, t.Prefill, t.Decode, faults.SeenStream)
	default:
		passes.Faults.Hop(t.Pool, f.id, t.Decode, &faults.Failure{Status: http.StatusInternalServerError})
	}
	in.again.said = rest
	in.goOn(cause, kvtransfer.CauseStream)
}

// beganAnew has another endpoint continue a stream whose next engine did not: it ignored the token ids.
func (in *Insured) beganAnew() {
	t, passes := &in.f.hop.ticket, in.f.s.Passes
	if pool := passes.State.Pool(t.Pool); pool != nil {
		passes.DoesNotContinue(pool, t.Decode, in.f.id)
	}
	in.brokeOff(causeAnew)
}

// notLoaded reports whether D's error may be that it could not load P's KV: there is no text yet.
func (in *Insured) notLoaded() bool { return in.f.hop.ticket.Loads && in.stream.Empty() }

// unloaded counts an error that may be a failed KV load. It reports whether that is no reason to ask nobody else.
func (in *Insured) unloaded(cause string) bool {
	const most = 2
	if cause != causeEnded || !in.notLoaded() {
		return false
	}
	in.again.loads++
	return in.again.loads <= most
}

// mostDeaths is how many engines may die under one answer, however long each had written.
const mostDeaths = 3

// diesAgain counts an engine that has died under the answer, or ended it with an error. It reports whether no other one
// is asked: the request may be what kills them. The first one is always replaced. The next ones are only if they had
// written for a while ([migration.Policy.Soon]): what kills engines does so at the same place again.
func (in *Insured) diesAgain() bool {
	t := &in.f.hop.ticket
	in.again.died = append(in.again.died, t.Decode)
	n := len(in.again.died)
	return n >= mostDeaths || n > 1 && (!in.d.spoke || time.Since(in.d.since) < in.policy.Soon())
}

// endsHere ends the answer for that reason. said is the engine's error, if it sent one. If the previous engine is still
// there, it goes on.
func (in *Insured) endsHere(cause string, said []byte) {
	f := in.f
	if in.again.spare != nil {
		in.stop()
		in.goBack()
		return
	}
	t, passes := &f.hop.ticket, f.s.Passes
	passes.Observer.Streams.Continued(t.Pool, cause, resultDied)
	passes.Observer.DiedUnder(f.id, t, in.again.died)
	passes.Log.Warn(
		"engines died, or failed, one after the other under one request: it may be the cause, and no other "+
			"one is asked (docs/continue.md#a-request-that-kills-engines)", "request_id", f.id, "pool", t.Pool,
		"endpoints", in.again.died, "cause", cause)
	passes.Faults.CheckEndpoint(passes.State.Pool(t.Pool), t.Decode)
	switch {
	case cause == causeEnded:
		in.d.plain = true
		in.give(said, in.d.id == 0)
	case !in.to.begun:
		in.giveUp(openai.Unavailable("endpoint_failed", "two engines failed under this request, one after the other",
			time.Second))
	default:
		in.cut(cause + ": " + resultDied)
	}
}

// goOn plans a pass that continues the stream on another engine than D.
func (in *Insured) goOn(cause, planned string) {
	t := in.f.hop.ticket
	in.again.times++
	if in.again.cause == "" {
		in.again.last = time.Unix(0, in.lastSent.Load())
	}
	in.again.cause, in.again.from, t.Cause, t.Stage = cause, in.f.s.Passes.Now(), planned, kvtransfer.Failed
	in.f.reservedAs += "+" // as many times as the stream was continued
	in.plan(&t, plan.Attempt{
		Redirects: 1, Started: t.Started, From: in.again.from, Excluded: []string{t.Decode}, DecodeFailed: true,
	})
}

// canFail reports whether there may be one more pass after D's leg has failed before its first event.
func (in *Insured) canFail() bool {
	return in.f.s.journeys.Another(&in.f.hop.ticket)
}

// failed plans the request again after its leg failed before its first event.
func (in *Insured) failed(failure *faults.Failure) {
	f := in.f
	in.stop()
	if !in.canFail() || in.stream.Continue() != "" {
		in.giveUp(openai.Unavailable("endpoint_failed", "no endpoint answered; try again", time.Second))
		return
	}
	next := f.s.journeys.DecodeFailed(&f.hop.ticket, f.id, failure)
	a := plan.Next(&next)
	a.From = in.again.from
	in.plan(&next, a)
}

// plan plans a pass of the request, from the client's body, which Envoy keeps.
func (in *Insured) plan(t *kvtransfer.Ticket, a plan.Attempt) {
	f := in.f
	f.s.watchInsured(in, false)
	in.placed.Store(nil)
	f.hop.ticket, f.state = t.Clone(), journey.Waiting
	if in.continues() {
		f.state = journey.Continuing
	}
	f.hop.ticket.Reservations = [2]uint64{} // they are the leg's before, which may still be there
	f.m = f.s.scratch.Get().(*scratch)
	f.m.meter.Begin("", nil)
	x, b := &f.m.pass, &f.m.body
	x.ID, x.Prefilled.ID, x.ReservedAs, x.Continues = f.id, f.id, f.reservedAs, in.stream.Continues()
	path, _ := paths.WithoutPrefix(f.s.PathPrefixes, f.head.Extra(":path"))
	x.Head = f.head.pass(path, f.s.Passes.Headers())
	n := f.envoy.BodySize()
	if !f.s.hold(f.m, n) {
		in.giveUp(openai.ServerBusy())
		return
	}
	b.data, b.changed = f.envoy.AppendBody(slices.Grow(b.data[:0], n)), false
	f.m.meter.Replanned(f.id, t)
	f.beside("continue", true, func(p passing, ctx context.Context) onWorker {
		d, err := x.First(ctx, in.api, a)
		return p.commit(ctx, d, err)
	})
}

// giveUp ends a request that no endpoint serves: with an error or, if the client has a part of the answer, as D ended
// that. If the previous engine is still there, it goes on.
func (in *Insured) giveUp(e *openai.Error) {
	f := in.f
	f.drop()
	if in.goBack() || in.to.ended {
		return
	}
	if !in.to.begun {
		f.takeBack()
		f.refuse(e)
		return
	}
	f.s.Passes.Observer.GivenUp(e)
	f.s.Passes.Observer.Streams.Continued(f.hop.ticket.Pool, cmp.Or(in.again.cause, causeReset), resultRefused)
	f.state = journey.Answering
	if in.again.cause == causeEnded && len(in.again.said) > 0 {
		in.stop()
		in.give(in.again.said, true)
		return
	}
	in.cut(cmp.Or(in.again.cause, causeReset) + ": " + e.Code + ": " + e.Message)
}

// cut ends the client's answer where it is.
func (in *Insured) cut(cause string) {
	if !in.to.ended {
		in.stop()
		in.breakOff(cause)
	}
}

// move has another endpoint continue the stream while its engine is still there. If no endpoint does, the engine goes
// on.
func (in *Insured) move(cause string) {
	f := in.f
	if in.d.id == 0 || in.again.spare != nil || len(in.again.died) > 1 || in.to.ended || in.d.plain || f.m != nil ||
		!in.d.spoke ||
		in.again.times >= in.policy.Limit() || time.Now().Before(in.again.rest) {
		return
	}
	before := in.stream
	if in.stream.Continue() != "" {
		return
	}
	in.again.spare = &spare{leg: in.d.id, hop: f.hop, placed: in.placed.Load(), stream: before,
		params: in.d.params, times: in.again.times}
	in.d.id = 0
	in.goOn(cause, kvtransfer.CauseMoved)
}

// dropSpare ends the leg of the previous engine.
func (in *Insured) dropSpare() {
	s := in.again.spare
	if s == nil {
		return
	}
	in.again.spare = nil
	passes, t := in.f.s.Passes, &s.hop.ticket
	passes.Release(pass.HeldBy(t))
	passes.Observer.HopEnded(t.Pool, "decode", t.Decode, "moved", passes.Since(t), nil)
	if s.leg != 0 {
		in.f.envoy.ResetStream(s.leg)
	}
}

// goBack lets the previous engine go on, if it is still there: no other one took its stream.
func (in *Insured) goBack() bool {
	s, f := in.again.spare, in.f
	if s == nil {
		return false
	}
	in.again.spare = nil
	in.again.rest = time.Now().Add(5 * time.Second)
	f.s.Passes.Observer.Streams.Continued(s.hop.ticket.Pool, in.again.cause, resultStayed)
	f.s.Passes.Release(pass.HeldBy(&f.hop.ticket))
	in.stream, in.d, in.again.cause, f.hop = s.stream, dLeg{id: s.leg, status: http.StatusOK,
		events: true, spoke: true, params: s.params}, "", s.hop
	f.state = journey.Answering
	in.placed.Store(s.placed)
	in.again.times = s.times // it was not continued
	f.s.watchInsured(in, true)
	in.data([][]byte{s.kept}, s.ended)
	if s.leg == 0 && !s.ended && f.m == nil { // else an error has it continued already
		in.reset()
	}
	return true
}

// watchInsured has [Shared.Run] look after a leg.
func (s *Shared) watchInsured(in *Insured, begin bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.insured, in); begin {
		s.insured[in] = struct{}{}
	}
}

// silentAfter is how long nothing may come of a stream whose endpoint has failed.
const silentAfter = 2 * time.Second

// lookAfter wakes the insured streams whose engine should be replaced: it has failed and is silent, or gets no more
// work.
func (s *Shared) lookAfter() {
	s.mu.Lock()
	all := slices.Collect(maps.Keys(s.insured))
	s.mu.Unlock()
	for _, in := range all {
		p := in.placed.Load()
		if p == nil {
			continue
		}
		quiet := time.Since(time.Unix(0, in.lastSent.Load()))
		e := plan.EndpointOf(s.Passes.State, p.ticket.Pool, p.ticket.Decode)
		switch {
		case !p.spoke.Load():
			if quiet >= journey.Silence && s.journeys.Lost(&p.ticket) {
				in.f.worker.wake(func() {
					if in.d.id != 0 && in.placed.Load() == p && !p.spoke.Load() {
						in.failed(&faults.Failure{})
					}
				})
			}
		case e != nil && e.Failed() && quiet >= silentAfter && s.another(&p.ticket):
			in.f.worker.wake(func() { in.move(causeSilent) })
		case (e == nil || e.Paused() || e.Draining) && s.another(&p.ticket):
			in.f.worker.wake(func() { in.move(causeMoved) })
		}
	}
}

// another reports whether another endpoint of the pool may decode.
func (s *Shared) another(t *kvtransfer.Ticket) bool {
	pool := s.Passes.State.Pool(t.Pool)
	if pool == nil {
		return false
	}
	for _, e := range pool.Endpoints() {
		if e.Addr != t.Decode && e.TakesWork() && e.Role&kvstate.RoleDecode != 0 {
			return true
		}
	}
	return false
}
