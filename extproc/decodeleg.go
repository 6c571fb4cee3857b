package extproc

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
)

// pairLeg is what the handlers of two concurrent legs share.
type pairLeg struct{ handler }

// decodeLeg handles the filter of the decode leg.
type decodeLeg struct{ pairLeg }

// serve serves the decode leg's filter when both legs run concurrently. It sends D's body, and watches D until P has
// done its part, as [journey.Pair] has it. From then on D needs neither P nor Tandem, and the stream ends, so that no
// answer depends on this replica. If the pair fails, D is cut and the request is planned again, by a 307 with a ticket.
// If the client leaves or D refuses the request, P's leg ends too, if the dialect wants that.
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
	rules := journey.PairRules{Early: true, StreamsLate: x.streamsLate(t)}
	w := watched{x, t, x.s.journeys.NewPair(t, rules), x.s.journeys.PairLimit(t), edits, nil, false}
	return w.watch(p)
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

// watched is a decode leg that is watched until D needs P no more.
type watched struct {
	decodeLeg
	ticket   *kvtransfer.Ticket
	pair     *journey.Pair
	limit    time.Duration // of P's leg
	edits    openai.Edits  // make D's body
	received <-chan *received
	answered bool // D's headers have come
}

// watch asks the pair what follows from what happens, and carries out what follows. If it returns nil, Envoy continues
// without this stream.
func (x *watched) watch(p *concurrent.Pair) error {
	limit := time.NewTimer(x.limit)
	defer limit.Stop()
	var elapsed <-chan time.Time
	ended, draining := p.Verdict.Done(), x.s.draining
	for next := x.pair.Begin(); ; {
		if over, err := x.carryOut(&next); over || err != nil {
			return err
		}
		if next.After > 0 {
			elapsed = time.After(next.After)
		}
		select {
		case got := <-x.received:
			if got.err != nil {
				return got.err
			}
			x.received, x.answered = nil, true
			x.stream.take(got)
			if x.stream.msg.Phase != envoywire.PhaseResponseHeaders {
				return errors.New("a decode leg went on without an answer")
			}
			next = x.pair.DecodeAnswers(x.answerHead())
		case <-ended:
			verdict := p.Verdict.Value()
			next, ended = x.pair.PrefillEnded(&verdict), nil
		case <-elapsed:
			next = x.pair.Elapsed()
		case <-limit.C:
			next = x.pair.PrefillOverdue()
		case <-draining:
			next, draining = x.pair.Drained(), nil
		case <-x.stream.Context().Done():
			return io.EOF
		}
	}
}

// carryOut does what follows from an event. over: the stream has nothing left to do.
func (x *watched) carryOut(a *journey.PairAction) (over bool, err error) {
	if a.Abandon {
		x.s.pairs.GiveUp(x.ticket.ID)
	}
	if a.Holds {
		x.meter.SpanLegEnded("ok", 0)
		x.s.journeys.PairHolds(x.ticket)
	}
	switch a.Do {
	case journey.SendDecode:
		if err := x.stream.answerBody(x.edits); err != nil {
			return true, err
		}
		x.received = x.stream.receiveLater() // at most one message comes: D's headers
		return false, nil
	case journey.Hold:
		return false, x.stream.send(&envoywire.Reply{Patience: x.limit + time.Second})
	case journey.LetGo:
		if !x.answered {
			return true, nil
		}
		if a.Abandon { // a script of this listener removes Tandem's additions from its body
			code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status))
			x.meter.SpanLegEnded("refused", code)
		}
		return true, x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders})
	case journey.PlanAgain:
		return true, x.planAgain(x.ticket, a.Leg, a.Failure)
	case journey.Refuse:
		return true, x.answerFor(a.Refusal)
	default:
		return false, nil
	}
}

// answerHead returns the head of D's answer, which was received.
func (x *watched) answerHead() *journey.DecodeHead {
	h, a := &x.stream.msg.Headers, &x.stream.msg.Attributes
	code, _ := strconv.Atoi(string(h.Status))
	return &journey.DecodeHead{
		Status: code, Failure: faults.Of(code, string(a.Details), string(a.RetryAfter)), Final: len(h.Final) > 0,
		Whole: bytes.HasPrefix(h.ContentType, []byte(names.ContentTypeJSON)),
	}
}

// answerFor answers the client with P's refusal of the request.
func (x decodeLeg) answerFor(v *concurrent.Outcome) error {
	x.meter.SpanLegEnded("refused", 0)
	i := &envoywire.Immediate{
		Status: v.Status, Body: journey.Refusal(v, x.stream.msg.Headers.Path), Details: names.DetailsPrefix + "_prefill_refused",
	}
	i.Headers.Set("content-type", []byte(names.ContentTypeJSON))
	return x.stream.send(&envoywire.Reply{Immediate: i})
}

// planAgain cuts D with a redirect to pass 2, which plans another attempt. f is how P, or D, failed.
func (x decodeLeg) planAgain(t *kvtransfer.Ticket, leg faults.Leg, f *faults.Failure) error {
	next := x.s.journeys.PairFailed(t, x.stream.requestID, leg, f)
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
