package filter

import (
	"context"
	"maps"
	"slices"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/openai"
	"tandem/extproc/paths"
)

// How an insured answer goes on when its engine ends it, or is to be replaced: what [journey.Insured] decides is
// carried out here.

// carryOut does what follows from an event.
func (in *Insured) carryOut(a journey.StreamAction) {
	f := in.f
	switch a.Do {
	case journey.ReadOn, journey.PassEnd, journey.MoveOn: // the leg goes on
	case journey.BeginAnswer:
		in.begin()
		return
	default:
		in.stop()
	}
	switch a.Do {
	case journey.Finish:
		f.drop()
		f.state = journey.Answering
		in.give(a.Rest, true)
	case journey.PassEnd:
		in.give(a.Rest, in.d.id == 0)
	case journey.AskAgain:
		in.plan(&a)
	case journey.MoveOn:
		in.spare = &spare{leg: in.d.id, hop: f.hop, placed: in.placed.Load(), params: in.d.params}
		in.d.id = 0
		fallthrough
	case journey.GoOn:
		f.reservedAs += "+" // as often as another engine was asked to continue
		in.plan(&a)
	case journey.GoBack:
		in.goBack()
	case journey.AnswerError:
		f.drop()
		f.takeBack()
		f.refuse(a.Err)
	case journey.BreakOff:
		f.drop()
		f.state = journey.Answering
		in.cut(a.Why)
	case journey.ReadOn, journey.BeginAnswer:
	}
}

// plan plans a pass of the request, from the client's body, which Envoy keeps.
func (in *Insured) plan(next *journey.StreamAction) {
	f, a := in.f, next.Attempt
	f.s.watchInsured(in, false)
	in.placed.Store(nil)
	f.hop.ticket, f.state = next.Ticket.Clone(), journey.Waiting
	if in.hasPart() {
		f.state = journey.Continuing
	}
	f.hop.ticket.Reservations = [2]uint64{} // those that are set belong to the leg before, and may still be there
	f.m = f.s.scratch.Get().(*scratch)
	f.m.meter.Begin("", nil)
	x, b := &f.m.pass, &f.m.body
	x.ID, x.Prefilled.ID, x.ReservedAs, x.Continues = f.id, f.id, f.reservedAs, in.journey.Stream.Continues()
	path, _ := paths.WithoutPrefix(f.s.PathPrefixes, f.head.Extra(":path"))
	x.Head = f.head.pass(path, f.s.Passes.Headers())
	n := f.envoy.BodySize()
	if !f.s.hold(f.m, n) {
		in.giveUp(openai.ServerBusy())
		return
	}
	b.data, b.changed = f.envoy.AppendBody(slices.Grow(b.data[:0], n)), false
	f.m.meter.Replanned(f.id, &next.Ticket)
	f.offWorker("continue", true, func(p passing, ctx context.Context) onWorker {
		d, err := x.First(ctx, in.api, a)
		return p.commit(ctx, d, err)
	})
}

// giveUp ends a request that no endpoint serves.
func (in *Insured) giveUp(e *openai.Error) {
	in.f.drop()
	if !in.to.ended {
		in.carryOut(in.journey.NoneTakes(e))
	}
}

// cut ends the client's answer where it is.
func (in *Insured) cut(cause string) {
	if !in.to.ended {
		in.stop()
		in.breakOff(cause)
	}
}

// move asks another endpoint to continue the stream while its engine is still there. If no endpoint does, the engine
// goes on.
func (in *Insured) move(cause string) {
	if in.d.id != 0 && !in.to.ended && in.f.m == nil {
		in.carryOut(in.journey.Move(cause, in.sent()))
	}
}

// dropSpare ends the leg of the previous engine.
func (in *Insured) dropSpare() {
	in.journey.LeaveBefore()
	s := in.spare
	in.spare = nil
	if s != nil && s.leg != 0 {
		in.f.envoy.ResetStream(s.leg)
	}
}

// goBack has the previous engine go on.
func (in *Insured) goBack() {
	s, f := in.spare, in.f
	f.drop()
	in.spare = nil
	in.d, f.hop, f.state = dLeg{id: s.leg, status: 200, params: s.params}, s.hop, journey.Answering
	in.placed.Store(s.placed)
	f.s.watchInsured(in, true)
	in.data([][]byte{s.kept}, s.ended)
	if s.leg == 0 && !s.ended && f.m == nil { // else an error has it continued already
		in.carryOut(in.journey.Resets(in.sent()))
	}
}

// watchInsured has [Shared.Run] look after a leg.
func (s *Shared) watchInsured(in *Insured, begin bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.insured, in); begin {
		s.insured[in] = struct{}{}
	}
}

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
		cause := s.journeys.Replaces(&p.ticket, p.writes, time.Since(in.sent()))
		if cause == "" {
			continue
		}
		in.f.worker.wake(func() {
			switch {
			case in.placed.Load() != p || in.d.id == 0: // it has ended, or has begun to write
			case p.writes:
				in.move(cause)
			default:
				in.carryOut(in.journey.Fails(&faults.Failure{}))
			}
		})
	}
}
