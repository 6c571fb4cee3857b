package journey

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate/media"
)

// Settled is what P's answer leads to: another pass, or the client's answer.
type Settled struct {
	Next    *kvtransfer.Ticket // the request goes on with it; nil: it ends here
	Err     *openai.Error      // the client gets it; nil: it gets Answer
	Answer  []byte             // the body that the client gets with the headers of P's answer
	Refused bool               // Answer is P's own refusal, without what Tandem had added for P
}

// Ends returns the ticket with which a request ends, if it does before the next pass has decided.
func (s *Settled) Ends() kvtransfer.Ticket {
	t := *s.Next
	t.Params, t.Undo = nil, nil
	t.Excluded = slices.Clone(t.Excluded)
	return t
}

// Legs settles the legs of requests by their engines' answers, for one stream after the other.
type Legs struct {
	shared  *Shared
	learner *pass.Prefilled
	pair    kvtransfer.Pair // scratch
}

// Begin prepares legs for the stream of a pass.
func (s *Shared) Begin(x *Legs, p *pass.Pass) { x.shared, x.learner = s, &p.Prefilled }

// Resume continues a request whose leg has ended, by its ticket, as [pass.Pass.Resume] has it. If P's answer came with
// the ticket, it is settled first.
func (x *Legs) Resume(
	ctx context.Context, p *pass.Pass, t *kvtransfer.Ticket, ticketErr error,
) (*plan.Decision, error) {
	if err := p.Returns(t); err != nil {
		return nil, err
	}
	attempt := t.ID // an inline answer gets another
	if t.Stage == kvtransfer.PrefillLeg {
		t = x.settleInline(ctx, p, t)
	}
	return p.Resume(ctx, t, attempt, ticketErr)
}

// settleInline settles a prefill leg whose answer came with pass 1's ticket. If pass 1 allows it and P's answer is
// short, Envoy makes the redirect by itself, with the answer in a header. That saves the prefill leg's stream and the
// sealing of a second ticket. Longer answers, and answers other than 200, go through the leg's filter. The hand-over's
// id is derived from the ticket's: it is good for one pass 2.
func (x *Legs) settleInline(ctx context.Context, p *pass.Pass, t *kvtransfer.Ticket) *kvtransfer.Ticket {
	x.learner.ID = p.ID
	answer := p.Head.Prefilled
	// in place: the write position stays behind the read position
	n, err := base64.StdEncoding.Decode(answer, answer)
	settled := x.Settle(ctx, t, &pass.Answer{
		Code: http.StatusOK, Body: answer[:n], Over: err != nil, Load: p.Head.Load, Inline: true,
	})
	settled.Next.ID = t.ID.Inline()
	return settled.Next
}

// Settle settles a prefill leg that ended with P's answer, for the leg's filter, for the call of P inside Envoy, and
// for pass 2: it learns from the answer, releases P's reservation if P has done its part (all of them, if the request
// ends here), counts the result, and says how the request goes on.
func (x *Legs) Settle(ctx context.Context, t *kvtransfer.Ticket, a *pass.Answer) Settled {
	s, took := x.shared.Passes, x.shared.Passes.Since(t)
	x.learner.ObserveLoad(t, a.Load)
	next, final := x.afterPrefill(t, a)
	if next == nil || final != nil { // the request ends here
		s.Release(pass.HeldBy(t))
	}
	switch {
	case next == nil && final == nil:
		x.learner.Meter.PrefillRefused(t, a.Code, took)
		return refused(a)
	case final != nil:
		x.learner.Meter.PrefillEnded(x.learner.ID, t, a.Code, took, nil)
		return Settled{Answer: final}
	case next.Stage == kvtransfer.HandOver:
		x.awaitKV(ctx, t)
		x.dateHandOver(ctx, next, took)
		s.State.Bookings.Complete(pass.HeldBy(t).Prefill)
		if !a.Inline && s.Reclaim.Enabled(t.Pool) {
			// before it is sent on: the end of the request may be reported at any moment after
			s.Reclaim.Record(next, x.learner.ID, next.Params, next.Decode, false)
		}
	}
	x.learner.Meter.PrefillEnded(x.learner.ID, t, a.Code, took, next)
	return Settled{Next: next}
}

// refused is P's refusal of the request itself, for the client.
func refused(a *pass.Answer) Settled {
	switch {
	case a.NoMemory:
		return Settled{Err: openai.ServerBusy()}
	case a.Over || a.Cut:
		return Settled{Err: openai.BadRequest("prefill_refused", "", "the prefill endpoint refused this request")}
	}
	return Settled{Answer: openai.CutEcho(nil, a.Body), Refused: true}
}

// afterPrefill returns the redirect's ticket: with KV parameters, or with what went wrong. final is the client's
// answer, if P's answer ends the request. Neither: the client gets P's refusal.
func (x *Legs) afterPrefill(t *kvtransfer.Ticket, a *pass.Answer) (_ *kvtransfer.Ticket, final []byte) {
	next := *t // with the same id: another replica may read this answer, too, and hands over the same
	next.Redirects++
	next.Learn = kvtransfer.Learn{}
	s := x.shared.Passes
	pool := s.State.Pool(t.Pool)
	policy, ok := s.Policy(t.Pool)
	if d := &policy.Dialect; a.Code == http.StatusOK && (!ok || d.Prefill == nil || a.Inline && !d.Inline) {
		fail(&next)
		next.Cause = kvtransfer.CausePoolGone
		next.Prefills-- // P has done its part
		s.Reclaim.Left(t, next.Cause)
		return &next, nil
	}
	if a.Code != http.StatusOK || a.Over || a.Cut {
		if a.Cut || a.Code == http.StatusOK {
			s.Cut(t)
		}
		return x.prefillFailed(&next, a), nil
	}
	x.pair = kvtransfer.Pair{
		RequestID: x.learner.ID, Attempt: t.ID, Prefill: pass.Side(pool, t.Prefill), Decode: pass.Side(pool, t.Decode),
	}
	x.pair.Prefill.Unsure = a.Unsure
	got, err := policy.Dialect.ReadAnswer(a.Body, &x.pair)
	if err == nil && got.Final != nil && t.Stream {
		var cannot error
		if got.Final, cannot = openai.OneShot(got.Final, t.StreamUsage); cannot != nil {
			got.Unused = cannot.Error()
		}
	}
	if err != nil {
		x.log(slog.LevelWarn, "prefill answered without usable KV parameters", "endpoint", t.Prefill, "err", err)
		a.Absent = errors.Is(err, kvtransfer.ErrOther)
		return x.prefillFailed(&next, a), nil
	}
	if asked := x.learner.Asked; asked > 0 && got.PromptTokens != int64(asked) {
		got.Params, got.Final = nil, nil
		got.Unused = fmt.Sprintf("it was asked with %d token ids and computed %d: it does not continue answers",
			asked, got.PromptTokens)
		if pool != nil {
			s.DoesNotContinue(pool, t.Prefill, x.learner.ID)
		}
	}
	if got.Unused != "" {
		x.log(slog.LevelInfo, "KV parameters not handed on: decode computes the prompt",
			"endpoint", t.Prefill, "why", got.Unused)
	}
	if c := policy.Dialect.Concurrent; c != nil { // P was not known well enough for concurrent legs
		_, peer, _ := c.ReadAnswer(a.Body, nil)
		policy.LearnEngine(t.Prefill, peer)
	}
	x.learner.Computed(pool, t, &got, s.Since(t))
	if pool != nil && got.PromptTokens > 0 {
		next.PromptTokens = got.PromptTokens
	}
	next.Stage, next.Params, next.Cached = kvtransfer.HandOver, got.Params, got.CachedTokens+1
	next.Written = got.WrittenTokens
	return &next, got.Final
}

// prefillFailed makes next the ticket of a request whose prefill was lost; nil: the client gets P's answer.
func (x *Legs) prefillFailed(next *kvtransfer.Ticket, a *pass.Answer) *kvtransfer.Ticket {
	s, f := x.shared.Passes, failureOf(a)
	if pool := s.State.Pool(next.Pool); f.Overdue && pool != nil && next.Media == (media.Count{}) {
		// otherwise the time limit would never be learned to be too short
		pool.ObservePrefill(next.PromptTokens, s.Since(next))
	}
	policy, known := s.Policy(next.Pool)
	m := faults.Means(faults.Prefill, &f, faults.Facts{
		Code: a.Code, DecodeDecides: policy.DecodeDecides(a.Code, next.Shaped),
		Last: !known || !s.Limits.Another(next.Redirects-1),
	})
	if m.Client {
		return nil
	}
	x.shared.planAgain(next, x.learner.ID, next.Prefill, &f, &m)
	return next
}

// failureOf returns how a leg failed, by the answer to it.
func failureOf(a *pass.Answer) faults.Failure {
	f := faults.Of(a.Code, string(a.Details), string(a.RetryAfter))
	f.Unreached, f.Overdue, f.Absent = f.Unreached || a.Cut, a.Overdue, a.Absent
	return f
}

// dateHandOver sets how long the hand-over is good for, and writes into the parameters for D when their lease ends, if
// D reads that. If the end is not known, D gets no parameters and computes the prompt.
func (x *Legs) dateHandOver(ctx context.Context, next *kvtransfer.Ticket, took time.Duration) {
	s := x.shared.Passes
	policy, _ := s.Policy(next.Pool)
	next.Expires = s.Now().Add(policy.Dialect.HandOverTTL(s.HandOverTTL))
	if policy.Dialect.Expiry == nil || next.Params == nil {
		return
	}
	var err error
	if next.Params, err = policy.Dialect.Expiry.Write(ctx, next.Params, took); err != nil {
		next.Params = nil
		s.Reclaim.Strand(next)
		s.Observer.Outdated(next.Pool, next.Prefill, "unknown")
		x.log(slog.LevelWarn, "decode gets no KV parameters and computes the prompt",
			"prefill", next.Prefill, "err", err)
	}
}

// awaitKV waits until P's KV has arrived at D, if P pushes it. After a timeout D continues without it and computes
// what is missing.
func (x *Legs) awaitKV(ctx context.Context, t *kvtransfer.Ticket) {
	policy, _ := x.shared.Passes.Policy(t.Pool)
	push := policy.Dialect.Push
	if push == nil {
		return
	}
	if !push.Await(ctx, &x.pair) && ctx.Err() == nil {
		x.log(slog.LevelWarn, "no notification that decode has the KV came within lmcache.noticeTimeout: "+
			"decode computes what it lacks (docs/operations.md#tandemnoticesmissed)",
			"prefill", t.Prefill, "decode", t.Decode)
	}
}

// log writes a message about the request to the log.
func (x *Legs) log(level slog.Level, message string, args ...any) {
	args = append([]any{"request_id", x.learner.ID}, args...)
	x.shared.Passes.Log.Log(context.Background(), level, message, args...)
}
