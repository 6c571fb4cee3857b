package extproc

import (
	"errors"
	"log/slog"
	"strconv"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/envoywire"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
)

// mirroredLeg handles the filter of the mirrored prefill leg.
type mirroredLeg struct {
	pairLeg
	answer *pass.Prefilled
	legs   *journey.Legs
}

// serve serves the filter of the mirrored prefill leg. Envoy ignores the leg's answer, so this handler observes P's
// result, and cuts the leg when nobody waits for it, if the dialect wants that. In that case the stream begins with
// the request headers, else with P's answer.
func (x mirroredLeg) serve() error {
	if err := x.stream.receive(); err != nil {
		return err
	}
	var t *kvtransfer.Ticket
	var err error
	if x.stream.msg.Phase == envoywire.PhaseRequestHeaders {
		if t, err = x.openLeg(); err == nil {
			x.spanPairLeg(telemetry.SpanPrefillAnswer, t)
			err = x.untilAnswer(t)
		}
	} else {
		a := &x.stream.msg.Attributes
		if t, err = x.openPairTicket(a.Ticket, a.ClientID); err == nil {
			x.spanPairLeg(telemetry.SpanPrefillAnswer, t)
		}
	}
	if err != nil {
		return err
	}
	if x.stream.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("a mirrored leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.stream.msg.Headers.Status))
	if err := x.stream.receiveAnswer(); err != nil {
		return err
	}
	a := &x.stream.msg.Attributes
	x.answer.ID = x.stream.requestID
	v, joined := x.legs.SettlePair(t, &pass.Answer{
		Code: code, Body: x.stream.body.Bytes(), Over: x.stream.msg.Over, Load: x.stream.msg.Headers.Load,
		Details: a.Details, RetryAfter: a.RetryAfter,
	})
	if joined != nil {
		if err := x.s.State.HandOvers.PutHandOverAs(t.ID, joined); err != nil {
			x.log(slog.LevelWarn, "no room for prefill's log probabilities: the client gets decode's alone", "err", err)
		}
	}
	x.s.pairs.Report(t.ID, v)
	return x.dropAnswer(code, v)
}

// untilAnswer lets the leg start, and waits for P's headers. It cuts the leg if nobody waits for it any more, and some
// time after its limit: the decode leg, which holds P to the limit, may have ended before.
func (x mirroredLeg) untilAnswer(t *kvtransfer.Ticket) error {
	p := x.s.pairs.Enter(t.ID)
	defer x.s.pairs.Leave(t.ID)
	if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseRequestHeaders}); err != nil {
		return err
	}
	late := time.NewTimer(x.s.journeys.PairLimit(t) + time.Second)
	defer late.Stop()
	select {
	case got := <-x.stream.receiveLater():
		if got.err != nil { // the leg ended without an answer
			x.s.pairs.Report(t.ID, concurrent.Outcome{})
			return got.err
		}
		x.stream.take(got)
		return nil
	case <-x.s.draining:
		return errAnswered // P continues without this stream
	case <-p.Over.Done():
	case <-late.C:
	}
	x.s.State.Bookings.Release(pass.HeldBy(t).Prefill)
	took, result := x.s.passes.Since(t), "client_gone"
	if took >= x.s.journeys.PairLimit(t) { // P exceeded its time limit
		result = "failed"
	}
	x.meter.LegEnded(t.Pool, "prefill", t.Prefill, result, 0, took)
	return errors.Join(errAnswered, x.stream.send(&envoywire.Reply{Immediate: &envoywire.Immediate{Status: 503, Details: names.DetailsPrefix + "_given_up"}}))
}

// dropAnswer ends the leg without P's answer: it has no reader. Other replicas learn its status from Envoy's
// access log, so an unusable answer gets a status that says so.
func (x mirroredLeg) dropAnswer(code int, v concurrent.Outcome) error {
	if code < 300 && !v.OK {
		x.stream.headers.Set(":status", []byte("502"))
	}
	x.stream.headers.Remove("content-length")
	bare := x.stream.msg.Phase == envoywire.PhaseResponseHeaders // the answer had no body
	if err := x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.stream.headers}); err != nil || bare {
		return err
	}
	if x.stream.msg.Phase == envoywire.PhaseResponseTrailers {
		return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
	}
	return x.stream.send(&envoywire.Reply{Phase: envoywire.PhaseResponseBody, Kind: envoywire.StreamBody, End: true})
}
