package extproc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
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
//   - D's headers are held back if their status is 200: most engines answer a stream with 200 before they have done
//     anything, and what has gone to a client cannot be planned again. Headers that show that D has P's blocks, or has
//     failed, are held for verdictSoon at most (docs/adr/0089): P answers later than D, by a batch of other prompts;
//   - if P fails or exceeds its time limit, D is cut and the request is planned again, by a 307 with a ticket;
//   - the same if D fails;
//   - if the client leaves or D refuses the request, P's leg ends too, if the dialect wants that.
func (x decodeLeg) serve() error {
	t, err := x.openLeg()
	if err != nil {
		return err
	}
	x.spanPairLeg(telemetry.SpanDecodeLeg, t)
	p := x.s.pairs.Enter(t.ID)
	defer x.s.pairs.Leave(t.ID)
	if err = x.serveDecode(t, p); err != nil {
		x.s.pairs.GiveUp(t.ID) // the client has left, or Envoy is trying this leg again
	}
	return err
}

func (x decodeLeg) serveDecode(t *kvtransfer.Ticket, p *concurrent.Pair) error {
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + plan.MaxDecodeMember); err != nil {
		return err
	}
	edits, err := concurrent.DecodeEdits(t, x.stream.body.Len())
	if err != nil {
		return err
	}
	policy, _ := x.s.passes.Policy(t.Pool)
	if c := policy.Dialect.Concurrent; c != nil && c.PrefillFirst {
		return x.afterPrefillOf(t, p, edits)
	}
	late := x.streamsLate(t)
	if err := x.stream.answerBody(edits); err != nil {
		return err
	}
	return x.watch(t, p, late)
}

// openLeg opens the ticket of a leg whose first message is the request headers.
func (x pairLeg) openLeg() (*kvtransfer.Ticket, error) {
	if x.stream.msg.Phase == envoywire.PhaseNone {
		if err := x.stream.receive(); err != nil {
			return nil, err
		}
	}
	if x.stream.msg.Phase != envoywire.PhaseRequestHeaders {
		return nil, errors.New("the first message of a leg was not request headers")
	}
	h := &x.stream.msg.Headers
	return x.openPairTicket(h.Ticket, h.ClientID)
}

func (x pairLeg) openPairTicket(ticket, requestID []byte) (*kvtransfer.Ticket, error) {
	x.stream.requestID = string(requestID)
	t, err := x.s.passes.Keys().Open(string(ticket), x.stream.requestID, x.s.passes.Now())
	if err != nil {
		x.meter.Observer.TicketRefused()
		return nil, fmt.Errorf("opening the ticket of a leg: %w", err)
	}
	if t.Stage != kvtransfer.PairLegs {
		x.meter.Observer.TicketRefused()
		return nil, fmt.Errorf("one of two legs came with a ticket of stage %v", t.Stage)
	}
	return t, nil
}

// streamsLate reports whether D answers with 200 only when it has P's blocks, even if the answer is a stream.
func (x decodeLeg) streamsLate(t *kvtransfer.Ticket) bool {
	policy, _ := x.s.passes.Policy(t.Pool)
	c, d, h := policy.Dialect.Concurrent, plan.EndpointOf(x.s.State, t.Pool, t.Decode), &x.stream.msg.Headers
	return c != nil && c.StreamsLate != nil && d != nil &&
		c.StreamsLate(openai.Classify(string(h.Method), string(h.Path)), d.Transfer.Release, x.stream.body.Bytes())
}

// verdictSoon is how long P's verdict may take after headers that say that D has P's blocks, or has failed: when P
// dies, D may show it first.
const verdictSoon = 100 * time.Millisecond

// watch waits for P's verdict. If it returns nil, Envoy continues without this stream. late: see streamsLate.
func (x decodeLeg) watch(t *kvtransfer.Ticket, p *concurrent.Pair, late bool) error {
	received := x.stream.receiveLater() // at most one message comes: D's headers
	limit := x.s.passes.PairLimit(t)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	held := false
	var soon <-chan time.Time
	for {
		select {
		case got := <-received:
			if got.err != nil {
				return got.err
			}
			x.stream.take(got)
			var err error
			if held, err = x.holdAnswer(t, p, limit); !held || err != nil {
				return err
			}
			if received = nil; late {
				soon = time.After(verdictSoon)
			}
		case <-soon:
			return x.goOn(t, held)
		case <-p.Ended:
			if p.Verdict.OK {
				return x.goOn(t, held)
			}
			return x.prefillFailed(t, p)
		case <-timer.C:
			x.meter.Observer.PrefillLate(t)
			x.s.pairs.GiveUp(t.ID)
			return x.planAgain(t, kvtransfer.CausePrefill, &faults.Failure{Unreached: true})
		case <-x.s.draining:
			return x.release(held)
		case <-x.stream.Context().Done():
			return io.EOF
		}
	}
}

// goOn ends the leg's watch: D has P's blocks.
func (x decodeLeg) goOn(t *kvtransfer.Ticket, held bool) error {
	x.meter.SpanLegEnded("ok", 0)
	x.s.passes.PairHolds(t)
	return x.release(held)
}

// afterPrefillOf sends D's request only after P has done its part, and then ends the stream.
func (x decodeLeg) afterPrefillOf(t *kvtransfer.Ticket, p *concurrent.Pair, edits openai.Edits) error {
	limit := x.s.passes.PairLimit(t)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.Ended:
		if p.Verdict.OK {
			x.meter.SpanLegEnded("ok", 0)
			x.s.passes.PairHolds(t)
			return x.stream.answerBody(edits)
		}
		return x.prefillFailed(t, p)
	case <-timer.C:
		x.meter.Observer.PrefillLate(t)
		x.s.pairs.GiveUp(t.ID)
	case <-x.stream.Context().Done():
		return io.EOF
	}
	return x.planAgain(t, kvtransfer.CausePrefill, &faults.Failure{Unreached: true})
}

// prefillFailed plans the request again after P has failed, or answers the client with P's refusal.
func (x decodeLeg) prefillFailed(t *kvtransfer.Ticket, p *concurrent.Pair) error {
	cause := x.s.passes.PairCause(t, &p.Verdict)
	if cause == "" {
		return x.answerFor(p.Verdict)
	}
	x.s.pairs.GiveUp(t.ID)
	return x.planAgain(t, cause, pass.PrefillFailure(p))
}

// holdAnswer handles D's headers, which arrived before P's verdict. Good ones are held back, and Envoy's timeout is
// extended, unless the answer is JSON: that is whole, so P's blocks have come.
func (x decodeLeg) holdAnswer(t *kvtransfer.Ticket, p *concurrent.Pair, limit time.Duration) (held bool, err error) {
	if x.stream.msg.Phase != envoywire.PhaseResponseHeaders {
		return false, errors.New("a decode leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status))
	if faults.Failed(code) && (code != http.StatusNotFound || t.Redirects+1 < x.s.MaxRedirects) &&
		len(x.stream.msg.Headers.Final) == 0 {
		return false, x.decodeFailed(t, p, code)
	}
	if code != http.StatusOK && code != http.StatusPartialContent { // D does no work for this request
		x.s.pairs.GiveUp(t.ID)
		x.meter.SpanLegEnded("refused", code)
		// a script of this listener removes Tandem's additions from its body
		return false, x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders})
	}
	if bytes.HasPrefix(x.stream.msg.Headers.ContentType, []byte(names.ContentTypeJSON)) {
		return false, x.goOn(t, true)
	}
	return true, x.stream.send(&envoywire.Reply{Patience: limit + time.Second})
}

// decodeFailed plans the request again after an error of D, which may be P's fault.
func (x decodeLeg) decodeFailed(t *kvtransfer.Ticket, p *concurrent.Pair, code int) error {
	a := &x.stream.msg.Attributes
	f := faults.Of(code, string(a.Details), string(a.RetryAfter))
	cause := kvtransfer.CauseDecode
	if !f.Full() && p.PrefillFailed(x.stream.Context()) {
		cause, f = kvtransfer.CausePrefill, *pass.PrefillFailure(p) // D failed because P did
	}
	x.s.pairs.GiveUp(t.ID)
	return x.planAgain(t, cause, &f)
}

// release releases D's answer if it is held back, and ends the stream without error, so that Envoy continues.
func (x decodeLeg) release(held bool) error {
	if !held {
		return nil
	}
	return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders})
}

// answerFor answers the client with P's refusal of the request.
func (x decodeLeg) answerFor(v concurrent.Outcome) error {
	x.meter.SpanLegEnded("refused", 0)
	i := &envoywire.Immediate{Status: v.Status, Body: v.Answer, Details: names.DetailsPrefix + "_prefill_refused"}
	if len(i.Body) == 0 {
		e := openai.Error{Status: v.Status, Type: "invalid_request_error", Code: "prefill_refused", Message: "the prefill endpoint refused this request"}
		i.Body = e.For(x.stream.msg.Headers.Path).JSON()
	}
	i.Headers.Set("content-type", []byte(names.ContentTypeJSON))
	return x.stream.send(&envoywire.Reply{Immediate: i})
}

// planAgain cuts D with a redirect to pass 2, which plans another attempt. f is how P, or D, failed.
func (x decodeLeg) planAgain(t *kvtransfer.Ticket, cause string, f *faults.Failure) error {
	next := x.s.passes.PairFailed(t, x.stream.requestID, cause, f)
	x.meter.SpanLegEnded("failed", 0)
	x.meter.SpanCause(next.Cause)
	sealed, err := x.s.passes.Keys().Seal(nil, &next, x.stream.requestID)
	if err != nil {
		return fmt.Errorf("sealing the ticket of a failed pair: %w", err)
	}
	h := &x.stream.msg.Headers
	i := &envoywire.Immediate{Status: 307, Details: names.DetailsPrefix + "_plan_again"}
	i.Headers.Set("location", replan.Location(h.Path))
	i.Headers.Set(names.HeaderTicket, sealed)
	return x.stream.send(&envoywire.Reply{Immediate: i})
}
