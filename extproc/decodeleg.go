package extproc

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
)

// pairLeg is what the handlers of two concurrent legs share.
type pairLeg struct{ handler }

// decodeLeg handles the filter of the decode leg.
type decodeLeg struct{ pairLeg }

// serve serves the decode leg's filter when both legs run concurrently. It sends D's body, and watches D until P
// has done its part. From there on D needs nobody, and the stream ends, so that no answer depends on this replica.
// While P is working
//
//   - D's headers are held back if their status is 200: engines answer a stream with 200 before they have done anything,
//     and what has gone to a client cannot be planned again. D has no token before P's blocks arrive, so this costs nothing;
//   - if P fails or exceeds its time limit, D is cut and the request is planned again, by a 307 with a ticket;
//   - the same if D fails;
//   - if the client leaves or D refuses the request, P's leg ends too, if the dialect wants that.
func (x decodeLeg) serve() error {
	t, err := x.openLeg()
	if err != nil {
		return err
	}
	x.spanPairLeg(telemetry.SpanDecodeLeg, t)
	p := x.s.pairs.enter(t.ID)
	defer x.s.pairs.leave(t.ID)
	if err = x.serveDecode(t, p); err != nil {
		x.s.pairs.giveUp(t.ID) // the client has left, or Envoy is trying this leg again
	}
	return err
}

func (x decodeLeg) serveDecode(t *kvtransfer.Ticket, p *pair) error {
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + plan.MaxDecodeMember); err != nil {
		return err
	}
	edits, err := x.decodeBody(t)
	if err != nil {
		return err
	}
	policy, _ := x.s.policy(t.Pool)
	if c := policy.Dialect.Concurrent; c != nil && c.PrefillFirst {
		return x.afterPrefillOf(t, p, edits)
	}
	if err := x.answerBody(edits); err != nil {
		return err
	}
	return x.watch(t, p)
}

// openLeg opens the ticket of a leg whose first message is the request headers.
func (x pairLeg) openLeg() (*kvtransfer.Ticket, error) {
	if x.msg.Phase == envoywire.PhaseNone {
		if err := x.receive(); err != nil {
			return nil, err
		}
	}
	if x.msg.Phase != envoywire.PhaseRequestHeaders {
		return nil, errors.New("the first message of a leg was not request headers")
	}
	h := &x.msg.Headers
	return x.openPairTicket(h.Ticket, h.ClientID)
}

func (x pairLeg) openPairTicket(ticket, requestID []byte) (*kvtransfer.Ticket, error) {
	x.requestID = string(requestID)
	t, err := x.s.keys().Open(string(ticket), x.requestID, time.Now())
	if err != nil {
		x.s.metrics.TicketRefused()
		return nil, fmt.Errorf("opening the ticket of a leg: %w", err)
	}
	if t.Stage != kvtransfer.PairLegs {
		x.s.metrics.TicketRefused()
		return nil, fmt.Errorf("one of two legs came with a ticket of stage %v", t.Stage)
	}
	return t, nil
}

// decodeBody returns the edits that turn P's body into D's: they undo the changes made for P, and replace P's
// members by D's, unless they are meant for both.
func (x decodeLeg) decodeBody(t *kvtransfer.Ticket) (openai.Edits, error) {
	if x.body.Len() != t.BodyBytes {
		return nil, fmt.Errorf("the body of a decode leg has %d bytes, %d were sent", x.body.Len(), t.BodyBytes)
	}
	if err := t.Undo.Check(x.body.Len()); err != nil {
		return nil, fmt.Errorf("undoing a leg's edits: %w", err)
	}
	switch {
	case t.Params != nil && len(t.Params) == 0:
		return t.Undo, nil // the client's own
	case len(t.Undo) == 0:
		return nil, errors.New("the undo of a prefill leg is empty")
	case t.Params == nil:
		return t.Undo[1:], nil
	}
	edits := t.Undo
	edits[0].New = append(append(t.Params, ','), edits[0].New...)
	return edits, nil
}

// watch waits for P's verdict. If it returns nil, Envoy continues without this stream.
func (x decodeLeg) watch(t *kvtransfer.Ticket, p *pair) error {
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
				x.SpanLegEnded("ok", 0)
				x.holds(t)
				return x.passAnswer(held)
			case clientsFault(p.verdict.status):
				return x.answerFor(p.verdict)
			}
			return x.planAgain(t, kvtransfer.CausePrefill)
		case <-timer.C:
			x.s.metrics.PrefillLate(t)
			x.s.pairs.giveUp(t.ID)
			return x.planAgain(t, kvtransfer.CausePrefill)
		case <-x.s.draining:
			return x.passAnswer(held)
		case <-x.stream.Context().Done():
			return io.EOF
		}
	}
}

// holds records that D has the prompt now: P has done its part, so its KV has arrived or is on its way.
func (x decodeLeg) holds(t *kvtransfer.Ticket) {
	pool := x.s.State.Pool(t.Pool)
	if pool == nil {
		return
	}
	d := pool.Endpoint(t.Decode)
	if hashes := pool.TextOf(nil, t.Prompt, plan.MaxBlocks); d != nil && len(hashes) > 0 {
		x.s.State.Routed(pool, d, hashes)
	}
}

// afterPrefillOf sends D's request only after P has done its part, and then ends the stream.
func (x decodeLeg) afterPrefillOf(t *kvtransfer.Ticket, p *pair, edits openai.Edits) error {
	limit := x.prefillLimit(t)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.ended:
		switch {
		case p.verdict.ok:
			x.SpanLegEnded("ok", 0)
			x.holds(t)
			return x.answerBody(edits)
		case clientsFault(p.verdict.status):
			return x.answerFor(p.verdict)
		}
	case <-timer.C:
		x.s.metrics.PrefillLate(t)
		x.s.pairs.giveUp(t.ID)
	case <-x.stream.Context().Done():
		return io.EOF
	}
	return x.planAgain(t, kvtransfer.CausePrefill)
}

// prefillLimit returns the time limit of P's leg.
func (x pairLeg) prefillLimit(t *kvtransfer.Ticket) time.Duration {
	policy, _ := x.s.policy(t.Pool)
	return policy.PrefillTimeout + time.Duration(t.PromptTokens)*policy.PerToken
}

// holdAnswer handles D's headers, which arrived before P's verdict. Good ones are held back, and Envoy's timeout is
// extended.
func (x decodeLeg) holdAnswer(t *kvtransfer.Ticket, p *pair, limit time.Duration) (held bool, err error) {
	if x.msg.Phase != envoywire.PhaseResponseHeaders {
		return false, errors.New("a decode leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.msg.Headers.Status))
	if (code >= 500 || code < 200) && len(x.msg.Headers.Final) == 0 {
		cause := kvtransfer.CauseDecode
		if p.prefillFailed(x.stream.Context()) {
			cause = kvtransfer.CausePrefill // D failed because P did
		}
		x.s.pairs.giveUp(t.ID)
		return false, x.planAgain(t, cause)
	}
	if code >= 300 {
		x.s.pairs.giveUp(t.ID)
		x.SpanLegEnded("refused", code)
		// a script of this listener removes Tandem's additions from its body
		return false, x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders})
	}
	return true, x.send(&envoywire.Reply{Patience: limit + time.Second})
}

// passAnswer releases D's answer if it is held back, and ends the stream without error, so that Envoy continues.
func (x decodeLeg) passAnswer(held bool) error {
	if !held {
		return nil
	}
	return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders})
}

// answerFor answers the client with P's refusal of the request.
func (x decodeLeg) answerFor(v outcome) error {
	x.SpanLegEnded("refused", 0)
	i := &envoywire.Immediate{Status: v.status, Body: v.answer, Details: envoywire.DetailsPrefix + "_prefill_refused"}
	if len(i.Body) == 0 {
		e := openai.Error{Status: v.status, Type: "invalid_request_error", Code: "prefill_refused", Message: "the prefill endpoint refused this request"}
		i.Body = e.JSON()
	}
	i.Headers.Set("content-type", []byte(envoywire.ContentTypeJSON))
	return x.send(&envoywire.Reply{Immediate: i})
}

// planAgain cuts D with a redirect to pass 2, which plans another attempt.
func (x decodeLeg) planAgain(t *kvtransfer.Ticket, cause string) error {
	decode := endpointOf(x.s.State, t.Pool, t.Decode)
	decodeOut := decode != nil && decode.Failed()
	if decodeOut {
		cause = kvtransfer.CauseDecode // P waits for D, so it fails with D
	}
	next := *t // its id stays: it names the leg that may still be running
	next.Stage, next.Params, next.Cause = kvtransfer.Failed, nil, cause
	next.Redirects++
	x.SpanLegEnded("failed", 0)
	x.SpanCause(cause)
	failed := t.Prefill
	if cause == kvtransfer.CauseDecode {
		failed = t.Decode
		x.s.metrics.HopEnded(t.Pool, "decode", t.Decode, "failed", time.Since(x.s.sealedAt(t)), x.Exemplar)
	}
	next.Excluded = append(next.Excluded, failed)
	if cause != kvtransfer.CauseDecode || decodeOut || !x.s.loadLegFailed(t) {
		next.Loads = false
		if pool := x.s.State.Pool(t.Pool); pool != nil {
			x.markFailed(pool, failed)
		}
	}
	policy, _ := x.s.policy(t.Pool)
	if peers := policy.Peers; peers != nil {
		peers.Failed(t.Prefill) // P may return as another engine, and D may have failed because it did
	}
	sealed, err := x.s.keys().Seal(nil, &next, x.requestID)
	if err != nil {
		return fmt.Errorf("sealing the ticket of a failed pair: %w", err)
	}
	h := &x.msg.Headers
	i := &envoywire.Immediate{Status: 307, Details: envoywire.DetailsPrefix + "_plan_again"}
	i.Headers.Set("location", location(h.Path))
	i.Headers.Set(envoywire.HeaderTicket, sealed)
	return x.send(&envoywire.Reply{Immediate: i})
}
