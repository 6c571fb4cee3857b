package extproc

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/reclaim"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// prefillLeg handles the filter of the prefill leg.
type prefillLeg struct{ *prefillAnswer }

// prefillAnswer settles a prefill leg with P's answer, which is read by the leg's filter or by pass 2.
type prefillAnswer struct {
	handler
	pair kvtransfer.Pair
	ids  []uint32 // scratch for token ids
}

func (x *prefillAnswer) reset() { x.pair = kvtransfer.Pair{} }

// serve serves the prefill leg's filter: it turns P's answer, or Envoy's own in its place, into the redirect.
func (x prefillLeg) serve() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("the first message of a prefill leg was not response headers")
	}
	a := &x.msg.Attributes
	x.requestID = string(a.RequestID)
	t, err := x.s.keys().Open(string(a.Ticket), x.requestID, x.s.now())
	if t == nil {
		x.TicketRefused()
		return fmt.Errorf("opening the ticket of a prefill leg: %w", err)
	}
	if t.Stage != kvtransfer.PrefillLeg {
		x.TicketRefused()
		return fmt.Errorf("a prefill leg came with a ticket of stage %v", t.Stage)
	}
	x.startSpan(telemetry.SpanPrefillAnswer, false)
	x.SpanTicket(t)
	code, _ := strconv.Atoi(string(x.msg.Headers.Status))
	x.observe(t)
	if plan.ClientsFault(code) {
		x.PrefillRefused(t, code, x.s.since(t))
		x.s.release(t)
		x.dropInline()
		return x.answerRefused()
	}
	if err := x.receiveAnswer(); err != nil {
		x.answerCut(t, code)
		return err
	}
	x.EndPhase(telemetry.PhaseReceive)
	next, final := x.settlePrefill(t, code, x.body.Bytes(), x.msg.Over)
	if final != nil {
		x.s.release(t)
		return x.answerClient(t, final)
	}
	if next.Stage == kvtransfer.HandOver && x.s.reclaim.Enabled(t.Pool) {
		return x.handOverRecorded(next)
	}
	x.EndPhase(telemetry.PhaseDecide)
	gone := x.stream.Context().Err() // Envoy ended the stream while P's answer waited here
	err = x.redirect(next, replan.Location(x.msg.Attributes.Path))
	x.EndPhase(telemetry.PhaseAnswer)
	if next.Stage == kvtransfer.HandOver && (gone != nil || err != nil) {
		x.s.reclaim.Orphaned(next, x.requestID, reclaim.ClientGone)
	}
	return err
}

// handOverRecorded sends a hand-over on if the pool reclaims orphaned ones. The end of the request decides what
// became of it, not the end of this stream: if this replica's connection broke, Envoy may ask another one.
func (x prefillLeg) handOverRecorded(next *kvtransfer.Ticket) error {
	// before sending: the access log may report the end of the request at any moment after
	x.s.reclaim.Record(next, x.requestID, next.Params, next.Decode, false)
	x.EndPhase(telemetry.PhaseDecide)
	err := x.redirect(next, replan.Location(x.msg.Attributes.Path))
	x.EndPhase(telemetry.PhaseAnswer)
	if !x.s.State.HasReplicas() && (err == nil || x.stream.Context().Err() != nil) && x.endedByEnvoy() {
		x.s.reclaim.Confirm(next.ID, x.requestID)
	}
	return err
}

// endedByEnvoy waits for the stream's end and reports whether Envoy ended it. A stream that ended with its
// connection was not ended by Envoy.
func (x prefillLeg) endedByEnvoy() bool {
	for {
		err := x.receive()
		if err == nil {
			continue
		}
		if errors.Is(err, io.EOF) {
			return true
		}
		source := sourceOf(x.stream.Context())
		return status.Code(err) == codes.Canceled && source != nil && !source.IsGone()
	}
}

// answerCut counts an answer of P's whose rest will not come: P has finished, and nobody can name the blocks that
// it keeps.
func (x prefillLeg) answerCut(t *kvtransfer.Ticket, code int) {
	if policy, _ := x.s.policy(t.Pool); code == 200 && policy.Dialect.Prefill != nil {
		x.Orphaned(t.Pool, t.Prefill, reclaim.AnswerCut)
	}
}

// settlePrefill settles a prefill leg that ended with P's answer: it releases the reservations, counts the result,
// and returns the next ticket. final is the client's answer, if the request ends here.
func (x *prefillAnswer) settlePrefill(t *kvtransfer.Ticket, code int, answer []byte, over bool) (next *kvtransfer.Ticket, final []byte) {
	took := x.s.since(t)
	next, final = x.afterPrefill(t, code, answer, over)
	if final != nil {
		x.PrefillEnded(x.requestID, t, code, took, nil)
		return nil, final
	}
	if next.Stage == kvtransfer.HandOver {
		x.awaitKV(t)
		x.dateHandOver(next, took)
	}
	if next.Stage == kvtransfer.Failed {
		x.s.State.Release(kvstate.ReservationID(t.Reservations[0]))
	} else {
		x.s.State.Complete(kvstate.ReservationID(t.Reservations[0]))
	}
	x.PrefillEnded(x.requestID, t, code, took, next)
	return next, nil
}

// dateHandOver sets how long the hand-over is good for, and writes into the parameters for D when their lease ends, if D
// reads that. D gets none whose end is not known: it computes the prompt.
func (x *prefillAnswer) dateHandOver(next *kvtransfer.Ticket, took time.Duration) {
	policy, _ := x.s.policy(next.Pool)
	next.Expires = x.s.now().Add(policy.Dialect.HandOverTTL(x.s.HandOverTTL))
	if policy.Dialect.Expiry == nil || next.Params == nil {
		return
	}
	var err error
	if next.Params, err = policy.Dialect.Expiry.Write(x.stream.Context(), next.Params, took); err != nil {
		next.Params = nil
		x.Outdated(next.Pool, next.Prefill, "unknown")
		x.log(slog.LevelWarn, "decode gets no KV parameters and computes the prompt", "prefill", next.Prefill, "err", err)
	}
}

// observe records the load that P reports with its answer.
func (x *prefillAnswer) observe(t *kvtransfer.Ticket) {
	pool := x.s.State.Pool(t.Pool)
	if len(x.msg.Headers.Load) == 0 || pool == nil {
		return
	}
	signals, ok := enginehttp.ParseORCA(x.msg.Headers.Load)
	e := pool.Endpoint(t.Prefill)
	if ok && e != nil {
		signals.At = time.Now()
		x.s.State.Observe(e, signals)
	}
}

// answerRefused passes P's refusal without the members that Tandem added for P.
func (x prefillLeg) answerRefused() error {
	if err := x.receiveAnswer(); err != nil {
		return err
	}
	switch {
	case x.noMemory:
		return serverBusy()
	case x.msg.Over:
		return openai.BadRequest("prefill_refused", "", "the prefill endpoint refused this request")
	}
	text := openai.CutEcho(nil, x.body.Bytes())
	if len(text) != x.body.Len() {
		x.headers.Remove("content-length")
	}
	return x.answerWith(text)
}

// afterPrefill returns the redirect's ticket: with KV parameters, or with what went wrong. final is the client's
// answer, if P's answer ends the request.
func (x *prefillAnswer) afterPrefill(t *kvtransfer.Ticket, code int, answer []byte, over bool) (_ *kvtransfer.Ticket, final []byte) {
	next := *t // with the same id: whoever else reads this answer hands over the same
	next.Redirects++
	next.Learn = kvtransfer.Learn{}
	pool := x.s.State.Pool(t.Pool)
	policy, ok := x.s.policy(t.Pool)
	if d := &policy.Dialect; code == 200 && (!ok || d.Prefill == nil || len(x.msg.Headers.Prefilled) > 0 && !d.Inline) {
		next.ID, next.Stage, next.Cause = plan.NewID(), kvtransfer.Failed, kvtransfer.CausePoolGone
		next.Prefills-- // P has done its part
		x.Orphaned(t.Pool, t.Prefill, next.Cause)
		return &next, nil
	}
	if code != 200 || over {
		x.prefillFailed(&next, code)
		return &next, nil
	}
	x.pair = kvtransfer.Pair{RequestID: x.requestID, Attempt: t.ID, Prefill: x.side(pool, t.Prefill), Decode: x.side(pool, t.Decode)}
	got, err := policy.Dialect.ReadAnswer(answer, &x.pair)
	if err == nil && got.Final != nil && t.Stream {
		var cannot error
		if got.Final, cannot = openai.OneShot(got.Final, t.StreamUsage); cannot != nil {
			got.Unused = cannot.Error()
		}
	}
	if err != nil {
		x.log(slog.LevelWarn, "prefill answered without usable KV parameters", "endpoint", t.Prefill, "err", err)
		x.prefillFailed(&next, code)
		return &next, nil
	}
	if got.Unused != "" {
		x.log(slog.LevelInfo, "KV parameters not handed on: decode computes the prompt", "endpoint", t.Prefill, "why", got.Unused)
	}
	if c := policy.Dialect.Concurrent; c != nil { // P was not known well enough for concurrent legs
		_, peer, _ := c.ReadAnswer(answer, nil)
		policy.learnEngine(t.Prefill, peer)
	}
	if pool != nil {
		x.markGood(pool, t.Prefill)
		x.learn(pool, t, &got)
		if got.PromptTokens > 0 {
			pool.ObservePrompt(int64(t.BodyBytes), got.PromptTokens)
			pool.ObservePrefill(got.PromptTokens-max(got.CachedTokens, 0), x.s.since(t))
			next.PromptTokens = got.PromptTokens
		}
	}
	x.PromptRead(x.requestID, t, got, x.s.since(t))
	next.Stage, next.Params, next.Cached = kvtransfer.HandOver, got.Params, got.CachedTokens+1
	next.Written = got.WrittenTokens
	return &next, got.Final
}

// answerClient answers the client in P's place.
func (x prefillLeg) answerClient(t *kvtransfer.Ticket, body []byte) error {
	x.headers.Remove("content-length")
	x.dropInline()
	if t.Stream {
		x.headers.Set("content-type", []byte("text/event-stream; charset=utf-8"))
	}
	return x.answerWith(body)
}

// answerWith replaces P's body, which was received; it does nothing if there is none.
func (x prefillLeg) answerWith(body []byte) error {
	bare := x.msg.Phase == envoywire.PhaseResponseHeaders
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.headers}); err != nil || bare {
		return err
	}
	x.spare.Grow(len(body))
	x.spare.Data = append(x.spare.Data[:0], body...)
	x.pieces.Cut(&x.spare, nil)
	shared := x.spare.Share()
	defer shared.Free()
	trailers := x.msg.Phase == envoywire.PhaseResponseTrailers
	err := x.sendPieces(envoywire.PhaseResponseBody, shared, !trailers)
	if err == nil && trailers {
		err = x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
	}
	return err
}

// prefillFailed makes next the ticket of a request whose prefill was lost.
func (x *prefillAnswer) prefillFailed(next *kvtransfer.Ticket, code int) {
	a := &x.msg.Attributes
	f := faults.Of(code, string(a.Details), string(a.RetryAfter))
	if next.Turn.Named && !f.Full() { // the decode endpoint that P should have fetched from may be at fault instead
		next.ID, next.Stage, next.Params = plan.NewID(), kvtransfer.Failed, nil
		x.s.conversationFailed(next, x.requestID, code)
		return
	}
	x.s.faults.Prefill(next, x.requestID, &f)
}

// awaitKV waits until P's KV has arrived at D, if P pushes it. After a timeout D continues without it and computes
// what is missing.
func (x *prefillAnswer) awaitKV(t *kvtransfer.Ticket) {
	policy, _ := x.s.policy(t.Pool)
	push := policy.Dialect.Push
	if push == nil {
		return
	}
	if !push.Await(x.stream.Context(), &x.pair) && x.stream.Context().Err() == nil {
		x.log(slog.LevelWarn, "no notification that decode has the KV came within lmcache.noticeTimeout: decode computes what it lacks "+
			"(docs/operations.md#tandemnoticesmissed)", "prefill", t.Prefill, "decode", t.Decode)
	}
}
