package journey

import (
	"cmp"
	"log/slog"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
)

// The legs of a pair: how P's ended, and what follows if one of them failed. [Pair] says when.

// maxRefusal bounds the stored text of P's refusal of a request, in bytes.
const maxRefusal = 64 << 10

// SettlePair settles P's leg of a pair by P's answer: it releases what P held, counts the result, and learns from it.
// joined is the part of P's answer that belongs into the client's; nil: none.
func (x *Legs) SettlePair(t *kvtransfer.Ticket, a *pass.Answer) (v concurrent.Outcome, joined []byte) {
	x.learner.ObserveLoad(t, a.Load)
	f := faults.Of(a.Code, string(a.Details), string(a.RetryAfter))
	v = concurrent.Outcome{Status: f.Status, RetryAfter: f.RetryAfter, Unreached: f.Unreached}
	took := x.shared.Passes.Since(t)
	policy, _ := x.shared.Passes.Policy(t.Pool)
	result := "failed"
	switch {
	case plan.ClientsFault(a.Code), policy.DecodeDecides(f.Status, t.Shaped):
		result = "refused"
		if len(a.Body) <= maxRefusal {
			v.Answer = openai.CutEcho(nil, a.Body)
		}
	case a.Code == 200 && !a.Over && !a.Cut && policy.Dialect.Concurrent != nil:
		got, peer, err := policy.Dialect.Concurrent.ReadAnswer(a.Body, t.Params)
		policy.LearnEngine(t.Prefill, peer)
		if err != nil {
			x.log(slog.LevelWarn, "prefill answered, but not as one that has sent its KV",
				"endpoint", t.Prefill, "err", err)
			break
		}
		v.OK, result, joined = true, "ok", got.Joined
		x.learner.Meter.PromptRead(x.learner.ID, t, got, took)
		if pool := x.shared.Passes.State.Pool(t.Pool); pool != nil {
			x.shared.Passes.MarkGood(pool, t.Prefill)
			if got.PromptTokens > 0 {
				pass.LearnPrompt(pool, t, got.PromptTokens)
			}
		}
	}
	x.learner.Meter.MirrorEnded(x.learner.ID, t, a.Code, result, took)
	x.shared.Passes.State.Bookings.Release(pass.HeldBy(t).Prefill)
	return v, joined
}

// PairLimit returns the time limit of P's leg of a pair. The pool may have been removed since it began.
func (s *Shared) PairLimit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := s.Passes.Policy(t.Pool)
	return cmp.Or(policy.PrefillTimeout, 30*time.Second) + time.Duration(t.PromptTokens)*policy.PerToken
}

// PairHolds records that D of a pair has the prompt now: P has done its part, so its KV has arrived or is on its way.
func (s *Shared) PairHolds(t *kvtransfer.Ticket) {
	pool := s.Passes.State.Pool(t.Pool)
	if pool == nil {
		return
	}
	d := pool.Endpoint(t.Decode)
	if hashes := pool.TextOf(nil, t.Prompt, plan.MaxBlocks); d != nil && len(hashes) > 0 {
		s.Passes.State.Routed(pool, d, hashes)
	}
}

// PairFailed settles a pair that failed before its answer began, and returns the ticket of the next pass. f is how the
// leg failed.
func (s *Shared) PairFailed(
	t *kvtransfer.Ticket, requestID string, leg faults.Leg, f *faults.Failure,
) kvtransfer.Ticket {
	x := s.Passes
	policy, _ := x.Policy(t.Pool)
	if d := plan.EndpointOf(x.State, t.Pool, t.Decode); leg == faults.Prefill && d != nil && d.Failed() {
		leg, f = faults.Decode, &faults.Failure{Unreached: true} // P waits for D, so it fails with D
	}
	addr, m := t.Prefill, s.pairMeans(t, leg, f)
	if leg == faults.Decode {
		addr = t.Decode
		result := "failed"
		if f.NotFound() {
			result = "refused"
		}
		x.Observer.HopEnded(t.Pool, "decode", t.Decode, result, x.Since(t), nil)
	}
	next := *t
	next.Redirects++
	s.planAgain(&next, requestID, addr, f, &m)
	next.ID = t.ID // it names the leg that may still be running
	if peers := policy.Peers; peers != nil {
		peers.Failed(t.Prefill) // P may return as another engine, and D may have failed because it did
	}
	return next
}

// pairMeans returns what a failed leg of a pair means.
func (s *Shared) pairMeans(t *kvtransfer.Ticket, leg faults.Leg, f *faults.Failure) faults.Meaning {
	policy, _ := s.Passes.Policy(t.Pool)
	return faults.Means(leg, f, faults.Facts{
		Last: !s.Another(t), DecodeDecides: policy.DecodeDecides(f.Status, t.Shaped),
		Gone: policy.Dialect.Concurrent == nil,
	})
}
