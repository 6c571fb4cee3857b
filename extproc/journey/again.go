package journey

import (
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/kvstate"
)

// [faults.Means] judges every failed leg, in both transports. Here the request is planned again: the next ticket says
// what went wrong, and the next pass releases what this one held.

// Another reports whether one more pass may follow that of a ticket.
func (s *Shared) Another(t *kvtransfer.Ticket) bool { return s.Passes.Limits.Another(t.Redirects) }

// fail makes next the ticket of a request whose leg has failed.
func fail(next *kvtransfer.Ticket) {
	next.ID, next.Stage, next.Params = plan.NewID(), kvtransfer.Failed, nil
}

// planAgain makes next the ticket of a request whose leg to an endpoint has failed, which means m.
func (s *Shared) planAgain(next *kvtransfer.Ticket, requestID, addr string, f *faults.Failure, m *faults.Meaning) {
	fail(next)
	s.Passes.Faults.Blame(next, requestID, addr, f, m)
}

// DecodeFailed settles a decode leg that failed before its answer began, and returns the next ticket. Whatever the
// failure is, the KV parameters of the leg count as consumed.
func (s *Shared) DecodeFailed(t *kvtransfer.Ticket, requestID string, f *faults.Failure) kvtransfer.Ticket {
	next, x := *t, s.Passes
	next.Redirects++
	result := "failed"
	if f.NotFound() {
		result = "refused"
	}
	x.Observer.HopEnded(t.Pool, "decode", t.Decode, result, x.Since(t), nil)
	if t.Split {
		// D may have fetched it: the failure does not show that
		x.Observer.Orphaned(t.Pool, t.Prefill, reclaim.DecodeFailed)
		if kvstate.Unfetched(x.State, pass.HeldBy(t).Decode) {
			x.Reclaim.Strand(t)
		}
	}
	m := faults.Means(faults.Decode, f, faults.Facts{Waits: s.waitsFor(t, f)})
	s.planAgain(&next, requestID, t.Decode, f, &m)
	return next
}

// waitsFor reports whether a decode leg ended only because its endpoint stood still until the KV may have been
// outdated, and no other endpoint can serve the request: then it has not failed the request, and is asked again.
func (s *Shared) waitsFor(t *kvtransfer.Ticket, f *faults.Failure) bool {
	if f.Status != 0 || f.Unreached || f.Overdue || s.Outdated(t) == "" {
		return false
	}
	e := plan.EndpointOf(s.Passes.State, t.Pool, t.Decode)
	return (e.TakesWork() || s.Passes.State.Health.StandsStill(e)) && !s.AnotherDecodes(t)
}

// HopLost settles a prefill or an encode leg that failed without an answer, and returns the next ticket. An endpoint
// that exceeded the leg's time limit counts as hanging.
func (s *Shared) HopLost(t *kvtransfer.Ticket, requestID string, overdue bool) kvtransfer.Ticket {
	next, x := *t, s.Passes
	next.Redirects++
	leg, addr := faults.Encode, t.Decode
	if t.Stage == kvtransfer.PrefillLeg {
		leg, addr = faults.Prefill, t.Prefill
		x.Reclaim.NotFollowed(t, requestID, reclaim.Replanned) // P has answered after all, but too late to be followed
		x.Observer.PrefillLost(t, overdue, x.Since(t))
	} else {
		x.Observer.HopEnded(t.Pool, "encode", addr, "failed", x.Since(t), nil)
	}
	f := faults.Failure{Overdue: overdue, Unreached: !overdue}
	m := faults.Means(leg, &f, faults.Facts{})
	s.planAgain(&next, requestID, addr, &f, &m)
	return next
}
