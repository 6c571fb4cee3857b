package extproc

import (
	"errors"
	"log/slog"
	"strconv"

	"tandem/extproc/concurrent"
	"tandem/extproc/envoywire"
	"tandem/extproc/faults"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/extproc/telemetry"
	"tandem/kvstate"
)

// mirroredLeg handles the filter of the mirrored prefill leg.
type mirroredLeg struct{ pairLeg }

// serve serves the filter of the mirrored prefill leg. Envoy ignores the leg's answer, so this handler observes P's
// result, and cuts the leg when nobody waits for it, if the dialect wants that. In that case the stream begins with
// the request headers, else with P's answer.
func (x mirroredLeg) serve() error {
	if err := x.receive(); err != nil {
		return err
	}
	var t *kvtransfer.Ticket
	var err error
	if x.msg.Phase == envoywire.PhaseRequestHeaders {
		if t, err = x.openLeg(); err == nil {
			x.spanPairLeg(telemetry.SpanPrefillAnswer, t)
			err = x.untilAnswer(t)
		}
	} else {
		a := &x.msg.Attributes
		if t, err = x.openPairTicket(a.Ticket, a.ClientID); err == nil {
			x.spanPairLeg(telemetry.SpanPrefillAnswer, t)
		}
	}
	if err != nil {
		return err
	}
	if x.msg.Phase != envoywire.PhaseResponseHeaders {
		return errors.New("a mirrored leg went on without an answer")
	}
	code, _ := strconv.Atoi(string(x.msg.Headers.Status))
	if err := x.receiveAnswer(); err != nil {
		return err
	}
	v := x.judge(t, code)
	x.s.State.Release(kvstate.ReservationID(t.Reservations[0]))
	x.s.pairs.Report(t.ID, v)
	return x.dropAnswer(code, v)
}

// untilAnswer lets the leg start, and waits for P's headers. It cuts the leg if nobody waits for it any more.
func (x mirroredLeg) untilAnswer(t *kvtransfer.Ticket) error {
	p := x.s.pairs.Enter(t.ID)
	defer x.s.pairs.Leave(t.ID)
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseRequestHeaders}); err != nil {
		return err
	}
	select {
	case got := <-x.receiveLater():
		if got.err != nil { // the leg ended without an answer
			x.s.pairs.Report(t.ID, concurrent.Outcome{})
			return got.err
		}
		x.take(got)
		return nil
	case <-x.s.draining:
		return errAnswered // P continues without this stream
	case <-p.Over:
	}
	x.s.State.Release(kvstate.ReservationID(t.Reservations[0]))
	took, result := x.s.since(t), "client_gone"
	if took >= x.prefillLimit(t) { // P exceeded its time limit
		result = "failed"
	}
	x.LegEnded(t.Pool, "prefill", t.Prefill, result, 0, took)
	return errors.Join(errAnswered, x.send(&envoywire.Reply{Immediate: &envoywire.Immediate{Status: 503, Details: envoywire.DetailsPrefix + "_given_up"}}))
}

// judge evaluates P's answer in x.body, counts it, and learns from it.
func (x mirroredLeg) judge(t *kvtransfer.Ticket, code int) concurrent.Outcome {
	a := &x.msg.Attributes
	f := faults.Of(code, string(a.Details), string(a.RetryAfter))
	v := concurrent.Outcome{Status: f.Status, RetryAfter: f.RetryAfter, Unreached: f.Unreached}
	took := x.s.since(t)
	pool := x.s.State.Pool(t.Pool)
	policy, _ := x.s.policy(t.Pool)
	result := "failed"
	switch {
	case plan.ClientsFault(code):
		result = "refused"
		if x.body.Len() <= maxRefusal {
			v.Answer = openai.CutEcho(nil, x.body.Bytes())
		}
	case code == 200 && !x.msg.Over && policy.Dialect.Concurrent != nil:
		got, peer, err := policy.Dialect.Concurrent.ReadAnswer(x.body.Bytes(), t.Params)
		policy.learnEngine(t.Prefill, peer)
		if err != nil {
			x.log(slog.LevelWarn, "prefill answered, but not as one that has sent its KV", "endpoint", t.Prefill, "err", err)
			break
		}
		v.OK, result = true, "ok"
		x.prefilled(pool, t, got)
	}
	x.MirrorEnded(x.requestID, t, code, result, took)
	return v
}

// learnEngine records what a prefill engine reported about itself.
func (p Policy) learnEngine(addr string, said kvtransfer.Peer) {
	if p.Peers != nil {
		p.Peers.Learn(addr, said)
	}
}

// maxRefusal bounds the stored text of P's refusal of a request.
const maxRefusal = 64 << 10

// prefilled records what a good answer reports.
func (x mirroredLeg) prefilled(pool *kvstate.Pool, t *kvtransfer.Ticket, got kvtransfer.Answer) {
	x.PromptRead(x.requestID, t, got, x.s.since(t))
	if got.Joined != nil {
		if err := x.s.State.PutHandOverAs(t.ID, got.Joined); err != nil {
			x.log(slog.LevelWarn, "no room for prefill's log probabilities: the client gets decode's alone", "err", err)
		}
	}
	if pool == nil {
		return
	}
	x.markGood(pool, t.Prefill)
	if got.PromptTokens > 0 {
		pool.ObservePrompt(int64(t.BodyBytes), got.PromptTokens)
	}
}

// dropAnswer ends the leg without P's answer, which nobody reads. Other replicas learn its status from Envoy's
// access log, so an unusable answer gets a status that says so.
func (x mirroredLeg) dropAnswer(code int, v concurrent.Outcome) error {
	if code < 300 && !v.OK {
		x.headers.Set(":status", []byte("502"))
	}
	x.headers.Remove("content-length")
	bare := x.msg.Phase == envoywire.PhaseResponseHeaders // the answer had no body
	if err := x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseHeaders, Headers: &x.headers}); err != nil || bare {
		return err
	}
	if x.msg.Phase == envoywire.PhaseResponseTrailers {
		return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseTrailers})
	}
	return x.send(&envoywire.Reply{Phase: envoywire.PhaseResponseBody, Kind: envoywire.StreamBody, End: true})
}

// mirrorEnded handles the access log entry of a mirrored leg, which every replica receives. The replica that
// reserved it releases it; the one that watches D learns how it ended.
func (s *Server) mirrorEnded(e *envoywire.LogEntry) {
	t, err := s.keys().Open(string(e.Ticket), string(e.ClientID), s.now())
	if t == nil {
		s.observer.TicketRefused()
		s.Log.Debug("access log entry of a leg with a ticket that is not ours", "request_id", string(e.ClientID), "err", err)
		return
	}
	s.State.Release(kvstate.ReservationID(t.Reservations[0]))
	f := faults.Of(e.Status, string(e.Details), string(e.RetryAfter))
	s.pairs.Report(t.ID, concurrent.Outcome{
		Status: f.Status, RetryAfter: f.RetryAfter, Unreached: f.Unreached, OK: e.Status == 200,
	})
}
