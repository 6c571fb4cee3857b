package extproc

import (
	"errors"
	"fmt"
	"log/slog"
	"strconv"

	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// An encode stage (EPD): a pool may have endpoints that only make embeddings of images, audio and video. A chat
// with such parts first goes to one of them, unchanged, by the route encode. The filter of the listener encode-leg
// makes the engine's body from it, and a redirect from the engine's answer. Pass 2 gets the client's own body,
// without undo however long it is, and the ticket has the parameters for prefill (ec_transfer_params). The media
// stay in the body, so an engine without parameters, or with some missing, encodes by itself: a failed encode leg
// only costs time.

// encodeLeg handles the filter of the encode leg.
type encodeLeg struct {
	handler
	req *openai.Request
}

// serve serves the encode leg's filter: it sends the engine's body, and turns its answer into a redirect.
func (x encodeLeg) serve() error {
	t, err := x.openEncodeLeg()
	if err != nil {
		return err
	}
	x.startSpan(telemetry.SpanEncodeLeg, false)
	x.SpanTicket(t)
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return err
	}
	if x.body.Len() != t.BodyBytes {
		return fmt.Errorf("the body of an encode leg has %d bytes, %d were sent", x.body.Len(), t.BodyBytes)
	}
	if err := x.req.Scan(openai.Chat, x.body.Bytes(), openai.Limits{}); err != nil {
		return err
	}
	x.EndPhase(telemetry.PhaseScan)
	x.spare.Grow(x.body.Len() + 256)
	x.spare.Data = x.req.AppendEncode(x.spare.Data[:0])
	x.swapBody()
	if err := x.answerBody(nil); err != nil {
		return err
	}
	x.EndPhase(telemetry.PhaseAnswer)
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("an encode leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.msg.Headers.Status))
	if err := x.receiveAnswer(); err != nil {
		return err
	}
	x.EndPhase(telemetry.PhaseReceive)
	x.s.State.Release(kvstate.ReservationID(t.Reservations[1]))
	h := &x.msg.Headers // still the request's headers, except for the status
	err = x.redirect(x.afterEncode(t, code), replan.Location(h.Path))
	x.EndPhase(telemetry.PhaseAnswer)
	return err
}

// openEncodeLeg opens the ticket of the leg's request.
func (x encodeLeg) openEncodeLeg() (*kvtransfer.Ticket, error) {
	if err := x.receive(); err != nil {
		return nil, err
	}
	if x.msg.Phase != envoywire.PhaseRequestHeaders {
		return nil, errors.New("the first message of an encode leg was not request headers")
	}
	h := &x.msg.Headers
	x.requestID = string(h.RequestID)
	t, err := x.s.keys().Open(string(h.Ticket), x.requestID, x.s.now())
	if err == nil && t.Stage != kvtransfer.EncodeLeg {
		err = fmt.Errorf("it is of stage %v", t.Stage)
	}
	if err != nil {
		x.TicketRefused()
		return nil, fmt.Errorf("opening the ticket of an encode leg: %w", err)
	}
	return t, nil
}

// afterEncode returns the redirect's ticket: with the parameters for prefill, or without, so that prefill encodes
// by itself.
func (x encodeLeg) afterEncode(t *kvtransfer.Ticket, code int) *kvtransfer.Ticket {
	next := *t
	next.ID = plan.NewID()
	next.Redirects++
	next.Stage, next.Cause = kvtransfer.Failed, kvtransfer.CauseEncode
	took, result := x.s.since(t), "failed"
	pool := x.s.State.Pool(t.Pool)
	switch {
	case plan.ClientsFault(code): // prefill will report it, in terms of the client's own body
		result = "refused"
	case code == 200 && !x.msg.Over:
		params, err := kvtransfer.ReadEncoded(x.body.Bytes())
		if err != nil {
			x.log(slog.LevelWarn, "an encode endpoint's answer is of no use: prefill encodes", "endpoint", t.Decode, "err", err)
			break
		}
		next.Stage, next.Cause, next.Params, result = kvtransfer.Encoded, "", params, "ok"
		next.Expires = x.s.now().Add(x.s.HandOverTTL)
		if pool != nil {
			x.markGood(pool, t.Decode)
		}
	default:
		a := &x.msg.Attributes
		f := faults.Of(code, string(a.Details), string(a.RetryAfter))
		x.s.faults.Endpoint(&next, x.requestID, t.Decode, &f)
		next.Excluded = t.Excluded // it decodes nothing
	}
	x.LegEnded(t.Pool, "encode", t.Decode, result, code, took)
	return &next
}
