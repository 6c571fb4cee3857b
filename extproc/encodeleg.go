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
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
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
	x.s.State.Release(pass.HeldBy(t).Decode)
	h := &x.stream.msg.Headers // still the request's headers, except for the status
	err = x.redirect(x.afterEncode(t, code), replan.Location(h.Path))
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

// afterEncode returns the redirect's ticket: with the parameters for prefill, or without, so that prefill encodes
// by itself.
func (x encodeLeg) afterEncode(t *kvtransfer.Ticket, code int) *kvtransfer.Ticket {
	next := *t
	next.ID = plan.NewID()
	next.Redirects++
	next.Stage, next.Cause = kvtransfer.Failed, kvtransfer.CauseEncode
	took, result := x.s.passes.Since(t), "failed"
	pool := x.s.State.Pool(t.Pool)
	switch {
	case plan.ClientsFault(code): // prefill will report it, in terms of the client's own body
		result = "refused"
	case code == 200 && !x.stream.msg.Over:
		params, err := kvtransfer.ReadEncoded(x.stream.body.Bytes())
		if err != nil {
			x.log(slog.LevelWarn, "an encode endpoint's answer is of no use: prefill encodes", "endpoint", t.Decode, "err", err)
			break
		}
		next.Stage, next.Cause, next.Params, result = kvtransfer.Encoded, "", params, "ok"
		next.Expires = x.s.passes.Now().Add(x.s.HandOverTTL)
		if pool != nil {
			x.s.passes.MarkGood(pool, t.Decode)
		}
	default:
		a := &x.stream.msg.Attributes
		f := faults.Of(code, string(a.Details), string(a.RetryAfter))
		x.s.faults.Endpoint(&next, x.stream.requestID, t.Decode, &f)
		next.Excluded = t.Excluded // it decodes nothing
	}
	x.meter.LegEnded(t.Pool, "encode", t.Decode, result, code, took)
	return &next
}
