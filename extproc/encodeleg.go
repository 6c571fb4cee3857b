package extproc

import (
	"errors"
	"fmt"
	"strconv"

	"tandem/extproc/envoywire"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
)

// An encode stage (EPD): a pool may have endpoints that only make embeddings of images, audio and video. A chat with
// such parts first goes to one of them, unchanged, by the route encode. The filter of the listener encode-leg makes the
// engine's body from it, and a redirect from the engine's answer. Pass 2 gets the client's own body, so the ticket has
// no edits to undo, and it has the parameters for prefill (ec_transfer_params). The media stay in the body, so a
// prefill engine that lacks parameters encodes by itself: a failed encode leg only costs time.

// encodeLeg handles the filter of the encode leg.
type encodeLeg struct {
	handler
	req    *openai.Request
	answer *pass.Prefilled
	legs   *journey.Legs
}

// serve serves the encode leg's filter: it sends the engine's body, and turns its answer into a redirect.
func (x encodeLeg) serve() error {
	t, err := x.openEncodeLeg()
	if err != nil {
		return err
	}
	x.startSpan(telemetry.SpanEncodeLeg, false)
	x.meter.SpanTicket(t)
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return err
	}
	if x.stream.body.Len() != t.BodyBytes {
		return fmt.Errorf("the body of an encode leg has %d bytes, %d were sent", x.stream.body.Len(), t.BodyBytes)
	}
	if err := x.req.Scan(openai.Chat, x.stream.body.Bytes(), openai.Limits{}); err != nil {
		return err
	}
	x.meter.EndPhase(telemetry.PhaseScan)
	x.stream.Rewrite(x.stream.body.Len()+256, x.req.AppendEncode)
	if err := x.stream.answerBody(nil); err != nil {
		return err
	}
	x.meter.EndPhase(telemetry.PhaseAnswer)
	if err := x.stream.receive(); err != nil {
		return err
	}
	if x.stream.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("an encode leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status))
	if err := x.stream.receiveAnswer(); err != nil {
		return err
	}
	x.meter.EndPhase(telemetry.PhaseReceive)
	h, a := &x.stream.msg.Headers, &x.stream.msg.Attributes // these are the request's headers, except for the status
	x.answer.ID = x.stream.requestID
	next := x.legs.SettleEncode(t, &pass.Answer{
		Code: code, Body: x.stream.body.Bytes(), Over: x.stream.msg.Over, Details: a.Details, RetryAfter: a.RetryAfter,
	})
	err = x.redirect(next, replan.Location(h.Path))
	x.meter.EndPhase(telemetry.PhaseAnswer)
	return err
}

// openEncodeLeg opens the ticket of the leg's request.
func (x encodeLeg) openEncodeLeg() (*kvtransfer.Ticket, error) {
	if err := x.stream.receive(); err != nil {
		return nil, err
	}
	if x.stream.msg.Phase != envoywire.PhaseRequestHeaders {
		return nil, errors.New("the first message of an encode leg was not request headers")
	}
	h := &x.stream.msg.Headers
	x.stream.requestID = string(h.RequestID)
	t, err := x.s.passes.Keys().Open(string(h.Ticket), x.stream.requestID, x.s.passes.Now())
	if err == nil && t.Stage != kvtransfer.EncodeLeg {
		err = fmt.Errorf("it is of stage %v", t.Stage)
	}
	if err != nil {
		x.meter.Observer.TicketRefused()
		return nil, fmt.Errorf("opening the ticket of an encode leg: %w", err)
	}
	return t, nil
}
