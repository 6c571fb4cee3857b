package extproc

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// decodeLeg serves the decode leg's filter where both legs run at once: the body becomes D's, and then the stream watches
// over D until P has done its part. From there on D can do the rest alone, and the stream ends, so that no answer hangs on
// this replica. While P is at work
//
//   - D's headers are held back, if they are good: engines answer a stream with 200 before they have done anything, and
//     what has gone to a client cannot be planned again. D has no token before P's blocks are there, so this costs nothing;
//   - P's failure, or its time running out, cuts D and plans anew: an answer of 307 with a ticket;
//   - so does D's;
//   - a client that leaves, or a D that refuses, ends P's leg too where the dialect wants that.
func (x *exchange) decodeLeg() error {
	t, err := x.openLeg()
	if err != nil {
		return err
	}
	x.spanPairLeg(spanDecodeLeg, t)
	p := x.s.pairs.enter(t.ID)
	defer x.s.pairs.leave(t.ID)
	if err = x.serveDecode(t, p); err != nil {
		x.s.pairs.giveUp(t.ID) // the client has left, or this leg is lost to a second try
	}
	return err
}

func (x *exchange) serveDecode(t *kvtransfer.Ticket, p *pair) error {
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + maxDecodeMember); err != nil {
		return err
	}
	edits, err := x.decodeBody(t)
	if err != nil {
		return err
	}
	policy, _ := x.s.policy(t.Pool)
	if c := policy.Concurrent; c != nil && c.PrefillFirst() {
		return x.afterPrefillOf(t, p, edits)
	}
	if err := x.answerBody(edits); err != nil {
		return err
	}
	return x.watch(t, p)
}

// openLeg opens the ticket of a leg whose request headers come first.
func (x *exchange) openLeg() (*kvtransfer.Ticket, error) {
	if x.msg.phase == phaseNone {
		if err := x.receive(); err != nil {
			return nil, err
		}
	}
	if x.msg.phase != phaseRequestHeaders {
		return nil, errors.New("the first message of a leg was not request headers")
	}
	h := &x.msg.headers
	return x.openPairTicket(h.ticket, h.clientID)
}

func (x *exchange) openPairTicket(ticket, requestID []byte) (*kvtransfer.Ticket, error) {
	x.requestID = string(requestID)
	t, err := x.s.keys().Open(string(ticket), x.requestID, time.Now())
	if err != nil {
		x.s.metrics.forgedTickets.Inc()
		return nil, fmt.Errorf("opening the ticket of a leg: %w", err)
	}
	if t.Stage != kvtransfer.PairLegs {
		x.s.metrics.forgedTickets.Inc()
		return nil, fmt.Errorf("one of two legs came with a ticket of stage %v", t.Stage)
	}
	return t, nil
}

// decodeBody plans how P's body becomes D's: what was changed for P is undone, and D's own members take the place of P's,
// or those stay where they are meant for both.
func (x *exchange) decodeBody(t *kvtransfer.Ticket) (openai.Edits, error) {
	if x.body.len() != t.BodyBytes {
		return nil, fmt.Errorf("the body of a decode leg has %d bytes, %d were sent", x.body.len(), t.BodyBytes)
	}
	if err := t.Undo.Check(x.body.len()); err != nil {
		return nil, fmt.Errorf("undoing a leg's edits: %w", err)
	}
	if len(t.Undo) == 0 {
		return nil, errors.New("the undo of a prefill leg is empty")
	}
	if t.Params == nil {
		return t.Undo[1:], nil
	}
	edits := t.Undo
	edits[0].New = append(append(t.Params, ','), edits[0].New...)
	return edits, nil
}

// watch waits for P's verdict. What it returns nil on, Envoy carries on with by itself.
func (x *exchange) watch(t *kvtransfer.Ticket, p *pair) error {
	received := x.receiveLater() // at most one message comes: D's headers
	limit := x.prefillLimit(t)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	held := false
	for {
		select {
		case got := <-received:
			if got.err != nil {
				return got.err
			}
			x.take(got)
			var err error
			if held, err = x.holdAnswer(t, p, limit); !held || err != nil {
				return err
			}
			received = nil
		case <-p.ended:
			switch {
			case p.verdict.ok:
				x.spanLegEnded("ok", 0)
				x.holds(t)
				return x.letGo(held)
			case clientsFault(p.verdict.status):
				return x.answerFor(p.verdict)
			}
			return x.planAgain(t, kvtransfer.CausePrefill)
		case <-timer.C:
			x.s.metrics.prefillLate(t)
			x.s.pairs.giveUp(t.ID)
			return x.planAgain(t, kvtransfer.CausePrefill)
		case <-x.s.draining:
			return x.letGo(held)
		case <-x.stream.Context().Done():
			return io.EOF
		}
	}
}

// holds notes that D has the prompt by now, for the next turn: P has done its part, so its KV is there or on its way.
func (x *exchange) holds(t *kvtransfer.Ticket) {
	pool := x.s.State.Pool(t.Pool)
	if pool == nil {
		return
	}
	if x.recall(pool, t); len(x.hashes) > 0 {
		if d := pool.Endpoint(t.Decode); d != nil {
			x.s.State.Routed(pool, d, x.hashes)
		}
	}
}

// afterPrefillOf holds D's leg back until P has done its part, and then lets it go its way.
func (x *exchange) afterPrefillOf(t *kvtransfer.Ticket, p *pair, edits openai.Edits) error {
	limit := x.prefillLimit(t)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.ended:
		switch {
		case p.verdict.ok:
			x.spanLegEnded("ok", 0)
			x.holds(t)
			return x.answerBody(edits)
		case clientsFault(p.verdict.status):
			return x.answerFor(p.verdict)
		}
	case <-timer.C:
		x.s.metrics.prefillLate(t)
		x.s.pairs.giveUp(t.ID)
	case <-x.stream.Context().Done():
		return io.EOF
	}
	return x.planAgain(t, kvtransfer.CausePrefill)
}

// prefillLimit is how long P may take.
func (x *exchange) prefillLimit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := x.s.policy(t.Pool)
	return policy.PrefillTimeout + time.Duration(t.PromptTokens)*policy.PerToken
}

// holdAnswer looks at D's headers, which came before P's verdict. Good ones are held, and Envoy is told to be patient.
func (x *exchange) holdAnswer(t *kvtransfer.Ticket, p *pair, limit time.Duration) (held bool, err error) {
	if x.msg.phase != phaseResponseHeaders {
		return false, errors.New("a decode leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.msg.headers.status))
	if code >= 500 && len(x.msg.headers.final) == 0 {
		cause := kvtransfer.CauseDecode
		select {
		case <-p.ended:
			if !p.verdict.ok {
				cause = kvtransfer.CausePrefill // D failed for want of P
			}
		default:
		}
		x.s.pairs.giveUp(t.ID)
		return false, x.planAgain(t, cause)
	}
	if code >= 400 {
		x.s.pairs.giveUp(t.ID)
		x.spanLegEnded("refused", code)
		return false, x.send(&reply{phase: phaseResponseHeaders})
	}
	return true, x.send(&reply{patience: limit + time.Second})
}

// letGo lets D's answer through if it is held, and ends the stream in peace, which Envoy takes for leave to carry on.
func (x *exchange) letGo(held bool) error {
	if !held {
		return nil
	}
	return x.send(&reply{phase: phaseResponseHeaders})
}

// received is a message that was read beside the handler.
type received struct {
	message
	err error
}

// receiveLater reads the next message in a goroutine, which ends with the stream. The message has memory of its own: the
// exchange may serve another stream by the time it comes.
func (x *exchange) receiveLater() <-chan *received {
	stream, out := x.stream, make(chan *received, 1)
	go func() {
		r := new(received)
		r.err = stream.RecvMsg(&r.message)
		out <- r
	}()
	return out
}

// take makes a message that was read beside the handler the current one. What came with the request stays.
func (x *exchange) take(r *received) {
	x.msg.phase, x.msg.endOfStream = r.phase, r.endOfStream
	x.msg.headers.status, x.msg.headers.final = r.headers.status, r.headers.final
}

// answerFor answers with what P found wrong with the request.
func (x *exchange) answerFor(v outcome) error {
	x.spanLegEnded("refused", 0)
	i := &immediate{status: v.status, body: v.answer, details: detailsPrefix + "_prefill_refused"}
	if len(i.body) == 0 {
		e := openai.Error{Status: v.status, Type: "invalid_request_error", Code: "prefill_refused", Message: "the prefill endpoint refused this request"}
		i.body = e.JSON()
	}
	i.headers.add("content-type", []byte(contentTypeJSON))
	return x.send(&reply{immediate: i})
}

// planAgain cuts D with a redirect to pass 2, which plans another attempt.
func (x *exchange) planAgain(t *kvtransfer.Ticket, cause string) error {
	next := *t // its id stays: it names the leg that may still run
	next.Stage, next.Params, next.Cause = kvtransfer.Failed, nil, cause
	next.Redirects++
	x.spanLegEnded("failed", 0)
	x.spanCause(cause)
	failed := t.Prefill
	if cause == kvtransfer.CauseDecode {
		failed = t.Decode
		x.s.metrics.hop(t.Pool, "decode", t.Decode, "failed", time.Since(x.s.sealedAt(t)), x.traced)
	}
	next.Excluded = append(next.Excluded, failed)
	if pool := x.s.State.Pool(t.Pool); pool != nil {
		x.markFailed(pool, failed)
	}
	policy, _ := x.s.policy(t.Pool)
	if peers := policy.Peers; peers != nil {
		peers.Failed(t.Prefill) // it may come back as another engine, and D may have failed because it has
	}
	sealed, err := x.s.keys().Seal(nil, &next, x.requestID)
	if err != nil {
		return fmt.Errorf("sealing the ticket of a failed pair: %w", err)
	}
	h := &x.msg.headers
	i := &immediate{status: 307, details: detailsPrefix + "_plan_again"}
	i.headers.add("location", location(h.authority, h.path))
	i.headers.add(headerTicket, sealed)
	return x.send(&reply{immediate: i})
}
