package extproc

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// maxAnswer bounds what is read of a prefill endpoint's answer: one token, and the KV parameters.
const maxAnswer = 16 << 20

// prefillLeg serves the prefill leg's filter: P's answer, or what Envoy says in its place, becomes the way on.
func (x *exchange) prefillLeg() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.phase != phaseResponseHeaders {
		return errors.New("the first message of a prefill leg was not response headers")
	}
	a := &x.msg.attributes
	x.requestID = string(a.requestID)
	t, err := x.s.keys().Open(string(a.ticket), x.requestID, time.Now())
	if t == nil {
		x.s.metrics.forgedTickets.Inc()
		return fmt.Errorf("opening the ticket of a prefill leg: %w", err)
	}
	if t.Stage != kvtransfer.PrefillLeg {
		x.s.metrics.forgedTickets.Inc()
		return fmt.Errorf("a prefill leg came with a ticket of stage %v", t.Stage)
	}
	x.startSpan(spanPrefillAnswer, false)
	x.spanTicket(t)
	code, _ := strconv.Atoi(string(x.msg.headers.status))
	x.observe(t)
	if clientsFault(code) {
		x.s.metrics.prefillEnded(t, code, "refused", time.Since(x.s.sealedAt(t)), x.traced)
		x.s.release(t)
		x.dropCarried()
		return x.passAnswer()
	}
	if err := x.receiveAnswer(); err != nil {
		x.answerCut(t, code)
		return err
	}
	x.did(workReceive)
	next, final := x.settlePrefill(t, code, x.body.bytes(), x.msg.over)
	if final != nil {
		x.s.release(t)
		return x.answerClient(t, final)
	}
	if next.Stage == kvtransfer.HandOver && x.s.cleansUp(t.Pool) {
		return x.handOverKept(next)
	}
	x.did(workDecide)
	gone := x.stream.Context().Err() // Envoy let go while P's answer waited here
	err = x.redirect(next, location(x.msg.attributes.authority, x.msg.attributes.path))
	x.did(workAnswer)
	if next.Stage == kvtransfer.HandOver && (gone != nil || err != nil) {
		x.mayAskOthers()
		x.s.stranded(next, x.requestID, strandedClientGone)
	}
	return err
}

// handOverKept sends a hand-over on where the pool cleans up. What became of it the end of the request tells, not that of this stream: Envoy
// may ask another replica, if it was this one's connection that broke.
func (x *exchange) handOverKept(next *kvtransfer.Ticket) error {
	x.mayAskOthers()
	x.s.keep(next, x.requestID, next.Params, next.Decode, false) // before it is sent: the end of the request may be told at any moment after
	x.did(workDecide)
	err := x.redirect(next, location(x.msg.attributes.authority, x.msg.attributes.path))
	x.did(workAnswer)
	if !x.s.State.Shared() && (err == nil || x.stream.Context().Err() != nil) && x.endedByEnvoy() {
		x.s.over(next.ID, x.requestID, x.s.handed.sure(next.ID))
	}
	return err
}

// endedByEnvoy waits for the stream's end, and reports whether it was Envoy's doing, not that of a connection that broke.
func (x *exchange) endedByEnvoy() bool {
	for {
		if err := x.receive(); err != nil {
			return errors.Is(err, io.EOF) || status.Code(err) == codes.Canceled
		}
	}
}

// answerCut counts an answer of P's whose rest will not come: P has finished, and what it keeps nobody can name.
func (x *exchange) answerCut(t *kvtransfer.Ticket, code int) {
	if policy, _ := x.s.policy(t.Pool); code == 200 && policy.Dialect != nil {
		x.s.metrics.stranded.WithLabelValues(t.Pool, t.Prefill, strandedAnswerCut).Inc()
	}
}

// settlePrefill settles a prefill leg that has ended with P's answer: what was booked for it, what is counted of it, and the way on.
// final is the client's answer, if P's is all there is to say.
func (x *exchange) settlePrefill(t *kvtransfer.Ticket, code int, answer []byte, over bool) (next *kvtransfer.Ticket, final []byte) {
	took := time.Since(x.s.sealedAt(t))
	next, final = x.afterPrefill(t, code, answer, over)
	if final != nil {
		x.s.metrics.prefillEnded(t, code, "ok", took, x.traced)
		x.s.recent.change(x.requestID, func(trace *Trace) { trace.PrefillTime, trace.Decode = took, "" })
		return nil, final
	}
	if next.Stage == kvtransfer.HandOver {
		x.awaitKV(t)
		next.Expires = time.Now().Add(x.s.HandOverTTL)
	}
	result := "ok"
	if next.Stage == kvtransfer.Failed {
		x.s.State.Release(kvstate.ReservationID(t.Reservations[0]))
		result = "failed"
	} else {
		x.s.State.Complete(kvstate.ReservationID(t.Reservations[0]))
	}
	x.s.metrics.prefillEnded(t, code, result, took, x.traced)
	x.s.recent.change(x.requestID, func(trace *Trace) { trace.PrefillTime = took })
	x.spanPrefilled(code, next)
	return next, nil
}

// observe notes what P says about its load along with its answer.
func (x *exchange) observe(t *kvtransfer.Ticket) {
	pool := x.s.State.Pool(t.Pool)
	if len(x.msg.headers.load) == 0 || pool == nil {
		return
	}
	signals, ok := kvstate.ParseORCA(x.msg.headers.load)
	e := pool.Endpoint(t.Prefill)
	if ok && e != nil {
		signals.At = time.Now()
		x.s.State.Observe(e, signals)
	}
}

// clientsFault reports whether P's status is about the request itself, so that it is the client's answer.
func clientsFault(code int) bool {
	switch code {
	case 400, 401, 403, 404, 413, 415, 422:
		return true
	}
	return false
}

// passAnswer lets P's answer through to the client, byte for byte.
func (x *exchange) passAnswer() error {
	if err := x.send(&reply{phase: phaseResponseHeaders, headers: &x.headers}); err != nil {
		return err
	}
	for !x.msg.endOfStream {
		x.msg.body, x.msg.bodyLimit = &x.body, maxAnswer
		if err := x.receive(); err != nil {
			return err
		}
		if x.msg.phase == phaseResponseTrailers {
			return x.send(&reply{phase: phaseResponseTrailers})
		}
		x.pieces.cut(&x.body, nil)
		shared := x.body.share()
		end := x.msg.endOfStream
		err := x.pieces.each(shared, func(parts mem.BufferSlice, last bool) error {
			return x.send(&reply{phase: phaseResponseBody, kind: bodyStreamed62, parts: parts, end: last && end})
		})
		shared.Free()
		if err != nil {
			return err
		}
	}
	return nil
}

// dropCarried takes off what the leg's route puts on each of its answers, in case it is carried: a client must not see the ticket.
func (x *exchange) dropCarried() {
	x.headers.drop(headerTicket)
	x.headers.drop(headerCarry)
}

// receiveAnswer reads an engine's answer to its end. msg.over says that it is not all in x.body: it is too long or, if x.noMemory says
// so too, there is no memory for it now.
func (x *exchange) receiveAnswer() error {
	x.msg.body, x.msg.bodyLimit, x.msg.over, x.noMemory = &x.body, maxAnswer, false, false
	for !x.msg.endOfStream {
		if err := x.receive(); err != nil {
			return err
		}
		if x.hold() != nil {
			x.noMemory = x.noMemory || !x.msg.over
			x.msg.over = true
		}
	}
	return nil
}

// afterPrefill makes the ticket that the redirect carries: KV parameters in hand, or what went wrong. final, where P's
// answer is all there is to say, is the client's.
func (x *exchange) afterPrefill(t *kvtransfer.Ticket, code int, answer []byte, over bool) (_ *kvtransfer.Ticket, final []byte) {
	next := *t // its name too: whoever else reads this answer hands over the same
	next.Redirects++
	next.Learn = kvtransfer.Learn{}
	pool := x.s.State.Pool(t.Pool)
	policy, _ := x.s.policy(t.Pool)
	if code != 200 || over || policy.Dialect == nil {
		x.prefillFailed(pool, &next, code)
		return &next, nil
	}
	x.setPair(t.ID, x.side(pool, t.Prefill), x.side(pool, t.Decode))
	got, err := policy.Dialect.ReadAnswer(answer, &x.pair)
	if err == nil && got.Final != nil && t.Stream {
		var cannot error
		if got.Final, cannot = openai.OneShot(got.Final, t.StreamUsage); cannot != nil {
			got.Unused = cannot.Error()
		}
	}
	if err != nil {
		x.s.Log.Warn("prefill answered without usable KV parameters", "request_id", x.requestID, "endpoint", t.Prefill, "err", err)
		x.prefillFailed(pool, &next, code)
		return &next, nil
	}
	if got.Unused != "" {
		x.s.Log.Info("KV parameters not handed on: decode computes the prompt", "request_id", x.requestID, "endpoint", t.Prefill, "why", got.Unused)
	}
	if policy.Concurrent != nil { // P was not known well enough for both legs at once
		_, peer, _ := policy.Concurrent.ReadAnswer(answer, nil)
		policy.learnPeer(t.Prefill, peer)
	}
	if pool != nil {
		x.markGood(pool, t.Prefill)
		x.learn(pool, t, &got)
		if got.PromptTokens > 0 {
			pool.ObservePrompt(int64(t.BodyBytes), got.PromptTokens)
			pool.ObservePrefill(got.PromptTokens-max(got.CachedTokens, 0), time.Since(x.s.sealedAt(t)))
			next.PromptTokens = got.PromptTokens
		}
	}
	x.s.metrics.prompt(t.Pool, got)
	x.s.metrics.expected.compare(t, got, time.Since(x.s.sealedAt(t)))
	x.s.recent.change(x.requestID, func(trace *Trace) {
		trace.CachedTokens = got.CachedTokens
		if got.PromptTokens > 0 {
			trace.PromptTokens = got.PromptTokens
		}
	})
	next.Stage, next.Params, next.Cached = kvtransfer.HandOver, got.Params, got.CachedTokens+1
	return &next, got.Final
}

// answerClient answers the client in P's place.
func (x *exchange) answerClient(t *kvtransfer.Ticket, body []byte) error {
	x.headers.drop("content-length")
	x.dropCarried()
	if t.Stream {
		x.headers.add("content-type", []byte("text/event-stream; charset=utf-8"))
	}
	if err := x.send(&reply{phase: phaseResponseHeaders, headers: &x.headers}); err != nil {
		return err
	}
	x.spare.grow(len(body))
	x.spare.data = append(x.spare.data[:0], body...)
	x.pieces.cut(&x.spare, nil)
	shared := x.spare.share()
	defer shared.Free()
	trailers := x.msg.phase == phaseResponseTrailers
	err := x.pieces.each(shared, func(parts mem.BufferSlice, last bool) error {
		return x.send(&reply{phase: phaseResponseBody, kind: bodyStreamed62, parts: parts, end: last && !trailers})
	})
	if err == nil && trailers {
		err = x.send(&reply{phase: phaseResponseTrailers})
	}
	return err
}

// prefillFailed makes next the ticket of a request whose prefill is lost.
func (x *exchange) prefillFailed(pool *kvstate.Pool, next *kvtransfer.Ticket, code int) {
	next.ID, next.Stage, next.Params = newTicketID(), kvtransfer.Failed, nil
	if next.Turn.Told { // it may as well be the decode endpoint that P was to fetch from
		x.s.turnFailed(next, x.requestID, code)
		return
	}
	next.Cause = kvtransfer.CausePrefill
	next.Excluded = append(next.Excluded, next.Prefill)
	if pool != nil && code >= 500 {
		x.markFailed(pool, next.Prefill)
	}
}

func (x *exchange) markFailed(pool *kvstate.Pool, addr string) {
	if e := pool.Endpoint(addr); e != nil {
		x.s.State.MarkFailed(e)
	}
}

func (x *exchange) markGood(pool *kvstate.Pool, addr string) {
	if e := pool.Endpoint(addr); e != nil {
		x.s.State.MarkGood(e)
	}
}

// redirect ends the leg with a 307 that Envoy follows, with the ticket it carries along. It is an answer of its own, in one
// message, and not P's with other headers: Envoy follows a redirect as soon as it sees the headers and cuts what has more to
// come, so a body, be it empty, would cost the internal connection each time.
func (x *exchange) redirect(t *kvtransfer.Ticket, to []byte) error {
	sealed, err := x.sealHandOver(t)
	if err != nil {
		return err
	}
	x.s.metrics.ticketBytes.Observe(float64(len(sealed)))
	i := &immediate{status: 307, details: detailsPrefix + "_redirect"}
	i.headers.add("location", to)
	i.headers.add(headerTicket, sealed)
	return x.send(&reply{immediate: i})
}

// sealHandOver seals the ticket; KV parameters that no header holds are kept here, and the ticket refers to them.
func (x *exchange) sealHandOver(t *kvtransfer.Ticket) ([]byte, error) {
	if len(t.Params) <= maxHeaderParams {
		sealed, err := x.s.keys().Seal(nil, t, x.requestID)
		if err != nil || len(sealed) <= kvtransfer.MaxHeaderBytes {
			return sealed, err
		}
	}
	x.mayAskOthers()
	var err error
	if t.ParamsRef, err = x.s.State.PutHandOver(t.Params); err != nil {
		x.s.Log.Warn("hand-over too large for a header and no room to keep it: decode computes the prompt", "request_id", x.requestID, "err", err)
		t.ParamsRef = [16]byte{}
	}
	t.Params = nil
	return x.s.keys().Seal(nil, t, x.requestID)
}

// maxHeaderParams is the length from which no packing makes KV parameters fit a header.
const maxHeaderParams = 8 * kvtransfer.MaxHeaderBytes

// location is the absolute URL of the request itself, which is where a redirect leads. Its host becomes :authority.
func location(authority, path []byte) []byte {
	if len(authority) == 0 {
		authority = []byte("tandem")
	}
	b := append([]byte("http://"), authority...)
	return append(b, path...)
}
