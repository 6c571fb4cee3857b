package pass

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
	"tandem/kvstate/media"
	"tandem/kvstate/prefixindex"
	"tandem/kvstate/standstill"
)

// Answer is a prefill endpoint's answer, or Envoy's in its place.
type Answer struct {
	Code                int
	Body                []byte
	Over                bool // Body is not all
	Details, RetryAfter []byte
	Load                []byte // that the engine reports with it (ORCA)
	NoMemory            bool   // Body is not all, because there was no memory for it
	Inline              bool   // it came with pass 2
	Cut, Overdue        bool   // inside Envoy: it broke off after it had begun, or did not come in time
}

// Settled is what P's answer leads to: another pass, or the client's answer.
type Settled struct {
	Next    *kvtransfer.Ticket // the request goes on with it; nil: it ends here
	Err     *openai.Error      // the client gets it; nil: it gets Answer
	Answer  []byte             // the body that the client gets with the headers of P's answer
	Refused bool               // Answer is P's own refusal, without what Tandem had added for P
}

// Prefilled settles prefill legs by P's answers, for one stream.
type Prefilled struct {
	shared *Shared
	meter  *telemetry.Meter
	ID     string          // of the request
	Asked  int             // tokens of the prompt that P was asked with: an answer is continued; 0: unknown
	pair   kvtransfer.Pair // scratch
	ids    []uint32        // scratch for token ids
}

// Settle settles a prefill leg that ended with P's answer, for the leg's filter, for the call of P inside Envoy, and
// for pass 2: it learns from the answer, releases what P held (all that the request held, if that ends here), counts
// the result, and says how the request goes on.
func (x *Prefilled) Settle(ctx context.Context, t *kvtransfer.Ticket, a *Answer) Settled {
	s, took := x.shared, x.shared.Since(t)
	x.observeLoad(t, a.Load)
	if plan.ClientsFault(a.Code) && !s.PlansAgain(t, a.Code) {
		x.meter.PrefillRefused(t, a.Code, took)
		s.Release(HeldBy(t))
		return refused(a)
	}
	next, final := x.afterPrefill(t, a)
	if final != nil {
		s.Release(HeldBy(t))
		x.meter.PrefillEnded(x.ID, t, a.Code, took, nil)
		return Settled{Answer: final}
	}
	if next.Stage == kvtransfer.HandOver {
		x.awaitKV(ctx, t)
		x.dateHandOver(ctx, next, took)
	}
	if next.Stage == kvtransfer.Failed {
		s.State.Bookings.Release(HeldBy(t).Prefill)
	} else {
		s.State.Bookings.Complete(HeldBy(t).Prefill)
	}
	if next.Stage == kvtransfer.HandOver && !a.Inline && s.Reclaim.Enabled(t.Pool) {
		// before it is sent on: the end of the request may be reported at any moment after
		s.Reclaim.Record(next, x.ID, next.Params, next.Decode, false)
	}
	x.meter.PrefillEnded(x.ID, t, a.Code, took, next)
	return Settled{Next: next}
}

// refused is P's refusal of the request itself, for the client.
func refused(a *Answer) Settled {
	switch {
	case a.NoMemory:
		return Settled{Err: openai.ServerBusy()}
	case a.Over || a.Cut:
		return Settled{Err: openai.BadRequest("prefill_refused", "", "the prefill endpoint refused this request")}
	}
	return Settled{Answer: openai.CutEcho(nil, a.Body), Refused: true}
}

// Cut counts an answer of P's whose rest will not come: P has finished, and nobody can name the blocks that it keeps.
func (s *Shared) Cut(t *kvtransfer.Ticket) {
	if policy, _ := s.Policy(t.Pool); policy.Dialect.Prefill != nil {
		s.Reclaim.Left(t, reclaim.AnswerCut)
	}
}

// InlineID derives the id of an inline hand-over from that of the prefill leg's ticket. It differs from the id that
// the leg's filter would use: if it is consumed, pass 2 began with an inline answer.
func InlineID(id [16]byte) [16]byte {
	id[0] ^= 0x40
	return id
}

// observeLoad records the load that P reports with its answer.
func (x *Prefilled) observeLoad(t *kvtransfer.Ticket, load []byte) {
	e := plan.EndpointOf(x.shared.State, t.Pool, t.Prefill)
	if len(load) == 0 || e == nil {
		return
	}
	if signals, ok := enginehttp.ParseORCA(load); ok {
		signals.At = time.Now()
		x.shared.State.Observe(e, signals)
	}
}

// dateHandOver sets how long the hand-over is good for, and writes into the parameters for D when their lease ends,
// if D reads that. D gets none whose end is not known: it computes the prompt.
func (x *Prefilled) dateHandOver(ctx context.Context, next *kvtransfer.Ticket, took time.Duration) {
	policy, _ := x.shared.Policy(next.Pool)
	next.Expires = x.shared.Now().Add(policy.Dialect.HandOverTTL(x.shared.HandOverTTL))
	if policy.Dialect.Expiry == nil || next.Params == nil {
		return
	}
	var err error
	if next.Params, err = policy.Dialect.Expiry.Write(ctx, next.Params, took); err != nil {
		next.Params = nil
		x.shared.Reclaim.Strand(next)
		x.meter.Observer.Outdated(next.Pool, next.Prefill, "unknown")
		x.log(slog.LevelWarn, "decode gets no KV parameters and computes the prompt",
			"prefill", next.Prefill, "err", err)
	}
}

// afterPrefill returns the redirect's ticket: with KV parameters, or with what went wrong. final is the client's
// answer, if P's answer ends the request.
func (x *Prefilled) afterPrefill(t *kvtransfer.Ticket, a *Answer) (_ *kvtransfer.Ticket, final []byte) {
	next := *t // with the same id: whoever else reads this answer hands over the same
	next.Redirects++
	next.Learn = kvtransfer.Learn{}
	pool := x.shared.State.Pool(t.Pool)
	policy, ok := x.shared.Policy(t.Pool)
	if d := &policy.Dialect; a.Code == 200 && (!ok || d.Prefill == nil || a.Inline && !d.Inline) {
		next.ID, next.Stage, next.Cause = plan.NewID(), kvtransfer.Failed, kvtransfer.CausePoolGone
		next.Prefills-- // P has done its part
		x.shared.Reclaim.Left(t, next.Cause)
		return &next, nil
	}
	if a.Code != 200 || a.Over || a.Cut {
		if a.Cut || a.Code == 200 {
			x.shared.Cut(t)
		}
		x.prefillFailed(&next, a)
		return &next, nil
	}
	x.pair = kvtransfer.Pair{
		RequestID: x.ID, Attempt: t.ID, Prefill: Side(pool, t.Prefill), Decode: Side(pool, t.Decode),
	}
	got, err := policy.Dialect.ReadAnswer(a.Body, &x.pair)
	if err == nil && got.Final != nil && t.Stream {
		var cannot error
		if got.Final, cannot = openai.OneShot(got.Final, t.StreamUsage); cannot != nil {
			got.Unused = cannot.Error()
		}
	}
	if err != nil {
		x.log(slog.LevelWarn, "prefill answered without usable KV parameters", "endpoint", t.Prefill, "err", err)
		x.prefillFailed(&next, a)
		return &next, nil
	}
	if x.Asked > 0 && got.PromptTokens != int64(x.Asked) {
		got.Params, got.Final = nil, nil
		got.Unused = fmt.Sprintf("it was asked with %d token ids and computed %d: it does not continue answers",
			x.Asked, got.PromptTokens)
		if pool != nil {
			x.shared.DoesNotContinue(pool, t.Prefill, x.ID)
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
	x.computed(pool, t, &got, x.shared.Since(t))
	if pool != nil && got.PromptTokens > 0 {
		next.PromptTokens = got.PromptTokens
	}
	next.Stage, next.Params, next.Cached = kvtransfer.HandOver, got.Params, got.CachedTokens+1
	next.Written = got.WrittenTokens
	return &next, got.Final
}

// computed records that P has computed a prompt in some time, and learns from its answer. pool may be nil: it has left.
func (x *Prefilled) computed(pool *kvstate.Pool, t *kvtransfer.Ticket, got *kvtransfer.Answer, took time.Duration) {
	if pool != nil {
		x.shared.MarkGood(pool, t.Prefill)
		if x.Asked == 0 { // else a part of the answer is in the prompt
			x.learn(pool, t, got)
		}
		if got.PromptTokens > 0 {
			if x.Asked == 0 {
				learnPrompt(pool, t, got.PromptTokens)
			}
			if t.Media == (media.Count{}) {
				pool.ObservePrefill(got.PromptTokens-max(got.CachedTokens, 0), took)
			}
		}
	}
	x.meter.PromptRead(x.ID, t, *got, took)
}

// learnPrompt learns from the number of tokens that P has counted in the prompt of its leg.
func learnPrompt(pool *kvstate.Pool, t *kvtransfer.Ticket, tokens int64) {
	size := kvstate.PromptSize{Text: t.BodyBytes - t.OtherBytes, Counted: t.Counted, Media: t.Media}
	pool.LearnPrompt(t.Model, &size, tokens)
}

// learn records from P's answer the prompt's token ids, and how much of the prompt P had in its cache.
func (x *Prefilled) learn(pool *kvstate.Pool, t *kvtransfer.Ticket, got *kvtransfer.Answer) {
	// what was expected of a prompt with media is in part what its media were thought to have
	if e := pool.Endpoint(t.Prefill); e != nil && got.CachedTokens >= 0 && t.Media == (media.Count{}) {
		x.shared.State.ObserveCached(e, t.ExpectedCached, got.CachedTokens)
	}
	if t.Learn.Bytes == 0 || got.PromptIDs == nil {
		return
	}
	text := pool.TextOf(nil, t.Prompt, plan.MaxBlocks)
	if text == nil {
		return
	}
	if ids, ok := openai.TokenIDs(x.ids[:0], got.PromptIDs); ok {
		x.ids = ids
		x.meter.Observer.Learned(pool.Spec.Name, "prefill", len(ids))
		learned := prefixindex.TextPrompt{Blocks: text, BlockBytes: plan.BlockBytes, Bytes: t.Learn.Bytes}
		prompt := prefixindex.TokenPrompt{IDs: ids, LoRA: t.Learn.LoRA, Salt: t.Learn.Salt}
		x.shared.State.LearnTokens(pool, learned, &prompt)
	}
}

// prefillFailed makes next the ticket of a request whose prefill was lost.
func (x *Prefilled) prefillFailed(next *kvtransfer.Ticket, a *Answer) {
	f := faults.Of(a.Code, string(a.Details), string(a.RetryAfter))
	f.Unreached, f.Overdue = f.Unreached || a.Cut, a.Overdue
	if pool := x.shared.State.Pool(next.Pool); f.Overdue && pool != nil && next.Media == (media.Count{}) {
		// else the limit would never learn that it is too short
		pool.ObservePrefill(next.PromptTokens, x.shared.Since(next))
	}
	switch policy, _ := x.shared.Policy(next.Pool); {
	case f.NotFound():
		x.shared.lacksModel(next, next.Prefill)
		return
	case policy.DecodeDecides(f.Status, next.Shaped):
		next.ID, next.Stage, next.Params, next.Cause = plan.NewID(), kvtransfer.Failed, nil, kvtransfer.CauseRefused
		return
	}
	if next.Turn.Named && !f.Full() { // the decode endpoint that P should have fetched from may be at fault instead
		next.ID, next.Stage, next.Params = plan.NewID(), kvtransfer.Failed, nil
		x.shared.TurnFailed(next, x.ID, a.Code)
		return
	}
	x.shared.Faults.Prefill(next, x.ID, &f)
}

// PlansAgain reports whether a request is planned again after P has refused it with a status of [plan.ClientsFault]. If
// not, the client gets P's answer.
func (s *Shared) PlansAgain(t *kvtransfer.Ticket, status int) bool {
	policy, ok := s.Policy(t.Pool)
	return ok && s.MayPlanAgain(t) &&
		(status == http.StatusNotFound || policy.DecodeDecides(status, t.Shaped))
}

// MayPlanAgain reports whether there may be one more pass after that of a ticket.
func (s *Shared) MayPlanAgain(t *kvtransfer.Ticket) bool {
	return t.Redirects+1 < s.Limits.MaxRedirects
}

// lacksModel makes next the ticket of a request that an endpoint has answered with 404: it is planned again without
// that endpoint, which is not blamed.
func (s *Shared) lacksModel(next *kvtransfer.Ticket, addr string) {
	next.ID, next.Stage, next.Params, next.Cause = plan.NewID(), kvtransfer.Failed, nil, kvtransfer.CauseModel
	next.Excluded, next.Loads = append(slices.Clip(next.Excluded), addr), false
}

// DecodeFailed settles a decode leg that failed before its answer began: it releases what the pass held, and returns
// the next ticket. Whatever the failure is, the KV parameters of the leg count as consumed.
func (s *Shared) DecodeFailed(t *kvtransfer.Ticket, requestID string, f *faults.Failure) kvtransfer.Ticket {
	next := *t
	next.ID, next.Stage, next.Params, next.Cause = plan.NewID(), kvtransfer.Failed, nil, kvtransfer.CauseDecode
	next.Redirects++
	result := "failed"
	if f.NotFound() {
		result = "refused"
	}
	s.Observer.HopEnded(t.Pool, "decode", t.Decode, result, s.Since(t), nil)
	if t.Split {
		s.Observer.Orphaned(t.Pool, t.Prefill, reclaim.DecodeFailed) // or fetched: the failure does not show it
		if kvstate.Unfetched(s.State, HeldBy(t).Decode) {
			s.Reclaim.Strand(t)
		}
	}
	s.Release(HeldBy(t))
	if s.waitsFor(t, f) {
		next.Cause, next.Loads = kvtransfer.CauseOutdated, false
		s.Faults.Hop(t.Pool, requestID, t.Decode, f)
		return next
	}
	switch {
	case f.NotFound():
		s.lacksModel(&next, t.Decode)
	case f.Overdue:
		next.Loads = false
		s.Faults.Endpoint(&next, requestID, t.Decode, f)
	default:
		s.Faults.Decode(&next, requestID, f)
	}
	return next
}

// waitsFor reports whether a decode leg ended only because its endpoint stood still until the KV may have been
// outdated, and no other endpoint can serve the request: then it has not failed the request, and is asked again.
func (s *Shared) waitsFor(t *kvtransfer.Ticket, f *faults.Failure) bool {
	if f.Status != 0 || f.Unreached || f.Overdue || s.Outdated(t) == "" {
		return false
	}
	e := plan.EndpointOf(s.State, t.Pool, t.Decode)
	return (e.TakesWork() || s.State.Health.StandsStill(e)) && !s.AnotherDecodes(t)
}

// Outdated returns why the KV that a decode leg was to fetch may be another prompt's by now, if it has not fetched it;
// "" if nothing says so.
func (s *Shared) Outdated(t *kvtransfer.Ticket) standstill.Reason {
	policy, _ := s.Policy(t.Pool)
	d := plan.EndpointOf(s.State, t.Pool, t.Decode)
	if !t.Loads || d == nil || policy.Dialect.Lease == 0 {
		return ""
	}
	prefill := plan.EndpointOf(s.State, t.Pool, t.Prefill)
	return s.State.Outdated(prefill, d, time.Now().Add(-s.Since(t)))
}

// Lost reports whether a decode leg without an answer so far will get none: its endpoint has failed for a while, its
// KV may be another prompt's, or its time is over. An engine whose core stands still may only be slow: it is waited for
// where no other one can take the request.
func (s *Shared) Lost(t *kvtransfer.Ticket) bool {
	e := plan.EndpointOf(s.State, t.Pool, t.Decode)
	limit := s.answerLimit(t, e)
	failed := e != nil && s.State.Health.FailedFor(e) >= lostAfter &&
		(!s.State.Health.StandsStill(e) || s.AnotherDecodes(t) || s.State.Health.FailedFor(e) >= s.stillLimit(t))
	return failed || s.Outdated(t) != "" || limit > 0 && s.Since(t) >= limit
}

// AnotherDecodes reports whether another endpoint than the ticket's may decode, as far as is known.
func (s *Shared) AnotherDecodes(t *kvtransfer.Ticket) bool {
	pool := s.State.Pool(t.Pool)
	return pool != nil && slices.ContainsFunc(pool.Endpoints(), func(e *kvstate.Endpoint) bool {
		return e.Addr != t.Decode && e.TakesWork() && e.Role&kvstate.RoleDecode != 0 &&
			!slices.Contains(t.Excluded, e.Addr)
	})
}

// lostAfter is how long an endpoint must be marked as failed before its requests are given up. A failed request or a
// stalled engine marks it for less.
const lostAfter = 3 * time.Second

// stillLimit returns how long an endpoint that stands still is waited for where no other one can serve: as long as a
// stream may take to begin. Real vLLM compiles for 2 to 25 s; what stands for longer hangs.
func (s *Shared) stillLimit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := s.Policy(t.Pool)
	return policy.StreamStart
}

// answerLimit returns how long the answer may take to begin; 0: no limit. e may be nil.
func (s *Shared) answerLimit(t *kvtransfer.Ticket, e *kvstate.Endpoint) time.Duration {
	pool := s.State.Pool(t.Pool)
	if t.Stage != kvtransfer.DecodeLeg || pool == nil {
		return 0
	}
	tokens := t.PromptTokens
	if e != nil && !t.Split { // it computes its prompts one after the other
		_, booked := e.Load()
		tokens = max(tokens, booked)
	}
	policy, _ := s.Policy(t.Pool)
	return policy.AnswerStart(t.Stream, pool.PrefillTime(tokens, policy.PerToken))
}

// awaitKV waits until P's KV has arrived at D, if P pushes it. After a timeout D continues without it and computes
// what is missing.
func (x *Prefilled) awaitKV(ctx context.Context, t *kvtransfer.Ticket) {
	policy, _ := x.shared.Policy(t.Pool)
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
func (x *Prefilled) log(level slog.Level, message string, args ...any) {
	x.shared.Log.Log(context.Background(), level, message, append([]any{"request_id", x.ID}, args...)...)
}

// DoesNotContinue records that an engine of a pool does not continue what another one has begun.
func (s *Shared) DoesNotContinue(pool *kvstate.Pool, addr, requestID string) {
	if e := pool.Endpoint(addr); e != nil && e.DoesNotContinue(time.Now()) {
		s.Log.Warn("an engine does not continue the answers of others: asked with the token ids of one, "+
			"it began anew; for a while it is not asked to (docs/continue.md#engines-that-do-not-continue)",
			"pool", pool.Spec.Name, "endpoint", addr, "request_id", requestID)
	}
}

// MarkGood records that an endpoint of a pool has served a request.
func (s *Shared) MarkGood(pool *kvstate.Pool, addr string) {
	if e := pool.Endpoint(addr); e != nil {
		s.State.Health.MarkGood(e)
	}
}
