package pass

import (
	"cmp"
	"log/slog"
	"net/http"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// Requests whose two legs run at once: how P's leg ended, and what follows if the pair failed.

// maxRefusal bounds the stored text of P's refusal of a request, in bytes.
const maxRefusal = 64 << 10

// SettlePair settles P's leg of a pair by P's answer: it releases what P held, counts the result, and learns from it.
// joined is the part of P's answer that belongs into the client's; nil: none.
func (x *Prefilled) SettlePair(t *kvtransfer.Ticket, a *Answer) (v concurrent.Outcome, joined []byte) {
	x.observeLoad(t, a.Load)
	f := faults.Of(a.Code, string(a.Details), string(a.RetryAfter))
	v = concurrent.Outcome{Status: f.Status, RetryAfter: f.RetryAfter, Unreached: f.Unreached}
	took := x.shared.Since(t)
	policy, _ := x.shared.Policy(t.Pool)
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
		x.meter.PromptRead(x.ID, t, got, took)
		if pool := x.shared.State.Pool(t.Pool); pool != nil {
			x.shared.MarkGood(pool, t.Prefill)
			if got.PromptTokens > 0 {
				learnPrompt(pool, t, got.PromptTokens)
			}
		}
	}
	x.meter.MirrorEnded(x.ID, t, a.Code, result, took)
	x.shared.State.Bookings.Release(HeldBy(t).Prefill)
	return v, joined
}

// PairLimit returns the time limit of P's leg of a pair. The pool may have been removed since it began.
func (s *Shared) PairLimit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := s.Policy(t.Pool)
	return cmp.Or(policy.PrefillTimeout, 30*time.Second) + time.Duration(t.PromptTokens)*policy.PerToken
}

// PairHolds records that D of a pair has the prompt now: P has done its part, so its KV has arrived or is on its way.
func (s *Shared) PairHolds(t *kvtransfer.Ticket) {
	pool := s.State.Pool(t.Pool)
	if pool == nil {
		return
	}
	d := pool.Endpoint(t.Decode)
	if hashes := pool.TextOf(nil, t.Prompt, plan.MaxBlocks); d != nil && len(hashes) > 0 {
		s.State.Routed(pool, d, hashes)
	}
}

// PairCause returns the cause for which a pair is planned again whose P has failed, or refused the request; "" if the
// client gets P's answer instead.
func (s *Shared) PairCause(t *kvtransfer.Ticket, v *concurrent.Outcome) string {
	policy, _ := s.Policy(t.Pool)
	switch {
	case policy.DecodeDecides(v.Status, t.Shaped):
		return kvtransfer.CauseRefused
	case plan.ClientsFault(v.Status) && (v.Status != http.StatusNotFound || !s.MayPlanAgain(t)):
		return ""
	}
	return kvtransfer.CausePrefill
}

// PairFailed settles a pair that failed before its answer began: it releases what the pass held, and returns the ticket
// of the next one. f is how P failed, or D if the cause says so.
func (s *Shared) PairFailed(t *kvtransfer.Ticket, requestID, cause string, f *faults.Failure) kvtransfer.Ticket {
	policy, _ := s.Policy(t.Pool)
	if d := plan.EndpointOf(s.State, t.Pool, t.Decode); d != nil && d.Failed() {
		if cause != kvtransfer.CauseDecode {
			cause, f = kvtransfer.CauseDecode, &faults.Failure{Unreached: true} // P waits for D, so it fails with D
		}
	} else if policy.Dialect.Concurrent == nil && cause == kvtransfer.CausePrefill {
		cause = kvtransfer.CausePoolGone // so nobody could judge P's answer
	}
	next := *t // its id stays: it names the leg that may still be running
	next.Stage, next.Params, next.Cause = kvtransfer.Failed, nil, cause
	next.Redirects++
	s.Release(HeldBy(t))
	switch {
	case cause == kvtransfer.CauseRefused:
		next.Loads = false
	case f.NotFound() && cause != kvtransfer.CausePoolGone:
		at := t.Prefill
		if cause == kvtransfer.CauseDecode {
			at = t.Decode
			s.Observer.HopEnded(t.Pool, "decode", t.Decode, "refused", s.Since(t), nil)
		}
		s.lacksModel(&next, at)
		next.ID = t.ID
	case cause == kvtransfer.CauseDecode:
		s.Observer.HopEnded(t.Pool, "decode", t.Decode, "failed", s.Since(t), nil)
		s.Faults.Decode(&next, requestID, f)
	case cause == kvtransfer.CausePoolGone:
		next.Loads = false
	default:
		next.Loads = !f.Full() // P may have failed because D did
		s.Faults.Endpoint(&next, requestID, t.Prefill, f)
	}
	if peers := policy.Peers; peers != nil {
		peers.Failed(t.Prefill) // P may return as another engine, and D may have failed because it did
	}
	return next
}

// SettleEncode settles an encode leg by its answer, and returns the next ticket: with the parameters for prefill, or
// without, so that prefill encodes by itself.
func (x *Prefilled) SettleEncode(t *kvtransfer.Ticket, a *Answer) *kvtransfer.Ticket {
	next := *t
	next.ID = plan.NewID()
	next.Redirects++
	next.Stage, next.Cause = kvtransfer.Failed, kvtransfer.CauseEncode
	took, result := x.shared.Since(t), "failed"
	x.shared.State.Bookings.Release(HeldBy(t).Decode)
	switch {
	case plan.ClientsFault(a.Code): // prefill will report it, in terms of the client's own body
		result = "refused"
	case a.Code == 200 && !a.Over && !a.Cut:
		params, err := kvtransfer.ReadEncoded(a.Body)
		if err != nil {
			x.log(slog.LevelWarn, "an encode endpoint's answer is of no use: prefill encodes",
				"endpoint", t.Decode, "err", err)
			break
		}
		next.Stage, next.Cause, next.Params, result = kvtransfer.Encoded, "", params, "ok"
		next.Expires = x.shared.Now().Add(x.shared.HandOverTTL)
		if pool := x.shared.State.Pool(t.Pool); pool != nil {
			x.shared.MarkGood(pool, t.Decode)
		}
	default:
		f := faults.Of(a.Code, string(a.Details), string(a.RetryAfter))
		f.Unreached, f.Overdue = f.Unreached || a.Cut, a.Overdue
		x.shared.Faults.Endpoint(&next, x.ID, t.Decode, &f)
		next.Excluded = t.Excluded // it decodes nothing
	}
	x.meter.LegEnded(t.Pool, "encode", t.Decode, result, a.Code, took)
	return &next
}
