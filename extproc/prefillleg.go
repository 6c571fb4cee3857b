package extproc

import (
	"errors"
	"fmt"
	"io"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tandem/extproc/envoywire"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/extproc/reclaim"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
)

// prefillLeg handles the filter of the prefill leg.
type prefillLeg struct {
	handler
	answer *pass.Prefilled
	legs   *journey.Legs
}

// serve serves the prefill leg's filter: it turns P's answer, or Envoy's own in its place, into the redirect.
func (x prefillLeg) serve() error {
	if err := x.stream.receive(); err != nil {
		return err
	}
	if x.stream.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("the first message of a prefill leg was not response headers")
	}
	a := &x.stream.msg.Attributes
	x.stream.requestID = string(a.RequestID)
	t, err := x.s.passes.Keys().Open(string(a.Ticket), x.stream.requestID, x.s.passes.Now())
	if t == nil {
		x.meter.Observer.TicketRefused()
		return fmt.Errorf("opening the ticket of a prefill leg: %w", err)
	}
	if t.Stage != kvtransfer.PrefillLeg {
		x.meter.Observer.TicketRefused()
		return fmt.Errorf("a prefill leg came with a ticket of stage %v", t.Stage)
	}
	x.startSpan(telemetry.SpanPrefillAnswer, false)
	x.meter.SpanTicket(t)
	code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status))
	if err := x.stream.receiveAnswer(); err != nil {
		if code == 200 {
			x.s.prefillCut(t)
		}
		return err
	}
	x.meter.EndPhase(telemetry.PhaseReceive)
	x.answer.ID = x.stream.requestID
	settled := x.legs.Settle(x.stream.Context(), t, &pass.Answer{
		Code: code, Body: x.stream.body.Bytes(), Over: x.stream.msg.Over, NoMemory: x.stream.noMemory,
		Load: x.stream.msg.Headers.Load, Details: a.Details, RetryAfter: a.RetryAfter,
	})
	if settled.Next == nil {
		return x.answerClient(t, &settled)
	}
	if settled.Next.Stage == kvtransfer.HandOver && x.s.reclaim.Enabled(t.Pool) {
		return x.handOverRecorded(settled.Next)
	}
	return x.handOver(settled.Next)
}

// handOver sends the request on to the next pass.
func (x prefillLeg) handOver(next *kvtransfer.Ticket) error {
	x.meter.EndPhase(telemetry.PhaseDecide)
	gone := x.stream.Context().Err() // Envoy ended the stream while P's answer waited here
	err := x.redirect(next, replan.Location(x.stream.msg.Attributes.Path))
	x.meter.EndPhase(telemetry.PhaseAnswer)
	if next.Stage == kvtransfer.HandOver && (gone != nil || err != nil) {
		x.s.reclaim.Orphaned(next, x.stream.requestID, reclaim.ClientGone)
	}
	return err
}

// handOverRecorded sends a hand-over on if the pool reclaims orphaned ones. The end of the request decides what
// became of it, not the end of this stream: if this replica's connection broke, Envoy may ask another one.
func (x prefillLeg) handOverRecorded(next *kvtransfer.Ticket) error {
	x.meter.EndPhase(telemetry.PhaseDecide)
	err := x.redirect(next, replan.Location(x.stream.msg.Attributes.Path))
	x.meter.EndPhase(telemetry.PhaseAnswer)
	if !x.s.State.HasReplicas() && (err == nil || x.stream.Context().Err() != nil) && x.endedByEnvoy() {
		x.s.reclaim.Confirm(next.ID, x.stream.requestID)
	}
	return err
}

// endedByEnvoy waits for the stream's end and reports whether Envoy ended it. A stream that ended with its
// connection was not ended by Envoy.
func (x prefillLeg) endedByEnvoy() bool {
	for {
		err := x.stream.receive()
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

// answerClient answers the client in P's place, or with P's refusal.
func (x prefillLeg) answerClient(t *kvtransfer.Ticket, settled *journey.Settled) error {
	if settled.Err == nil && (!settled.Refused || len(settled.Answer) != x.stream.body.Len()) {
		x.stream.headers.Remove("content-length")
	}
	x.stream.dropInline()
	if settled.Err != nil {
		return settled.Err
	}
	if !settled.Refused && t.Stream {
		x.stream.headers.Set("content-type", []byte("text/event-stream; charset=utf-8"))
	}
	return x.answerWith(settled.Answer)
}

// answerWith replaces P's body, which was received; it does nothing if there is none.
func (x prefillLeg) answerWith(body []byte) error {
	bare := x.stream.msg.Phase == envoywire.PhaseResponseHeaders
	if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.stream.headers}); err != nil || bare {
		return err
	}
	x.stream.spare.Grow(len(body))
	x.stream.spare.Data = append(x.stream.spare.Data[:0], body...)
	x.stream.pieces.Cut(&x.stream.spare, nil)
	shared := x.stream.spare.Share()
	defer shared.Free()
	trailers := x.stream.msg.Phase == envoywire.PhaseResponseTrailers
	err := x.stream.sendPieces(envoywire.PhaseResponseBody, shared, !trailers)
	if err == nil && trailers {
		err = x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
	}
	return err
}
