package extproc

import (
	"errors"
	"fmt"
	"io"
	"time"

	"tandem/extproc/concurrent"
	"tandem/extproc/endpointpicker"
	"tandem/extproc/envoywire"
	"tandem/extproc/hedging"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
)

// mainRole handles the main listener's filter: pass 1 and pass 2 of a request.
type mainRole struct {
	*planning
	prefilled *prefillAnswer
}

// serve serves pass 1 and pass 2 of a request.
func (x mainRole) serve() error {
	if err := x.receive(); err != nil {
		return err
	}
	if x.msg.Phase != envoywire.PhaseRequestHeaders {
		return errors.New("the first message of a stream was not request headers")
	}
	x.identify()
	x.startSpan(telemetry.SpanDecide, true)
	d, err := x.decide()
	if err != nil {
		return err
	}
	r, err := x.commit(d)
	if err != nil {
		return err
	}
	x.EndPhase(telemetry.PhaseDecide)
	err = x.answer(r)
	x.EndPhase(telemetry.PhaseAnswer)
	if err == nil && x.stream.Context().Err() != nil {
		err = io.EOF // Envoy ended the stream before the answer
	}
	if err != nil {
		r.release(x.s.State)
		return err
	}
	return nil
}

// decide decides where the request goes, and receives the body if the decision needs it.
func (x mainRole) decide() (*plan.Decision, error) {
	h := &x.msg.Headers
	if len(h.Upgrade) > 0 {
		return nil, openai.BadRequest("upgrade_not_supported", "", "protocol upgrades are not supported here")
	}
	if h.Ticket != nil { // an empty one is forged, too
		t, err := x.openTicket()
		if t == nil {
			return nil, err
		}
		return nextPass(x).resume(t, err)
	}
	h.Path, x.stripped = paths.WithoutPrefix(x.s.PathPrefixes, h.Path)
	if x.msg.Mode.Request == envoywire.ModeBuffered {
		if err := x.undecided(); err != nil {
			return nil, err
		}
	}
	switch api := x.clientAPI(); api {
	case openai.Models:
		return x.listModels()
	case openai.PassThrough:
		return firstPass{x.planning}.passThrough()
	default:
		return firstPass{x.planning}.first(api)
	}
}

// undecided gives pass 1 a ticket, with the reply to its headers. Envoy keeps a buffered body: if the replica that has it
// fails, the replan port takes this ticket, and another replica begins again. Engines never see it.
func (x mainRole) undecided() error {
	h, now := &x.msg.Headers, x.s.now()
	sealed, err := x.s.keys().Seal(make([]byte, 0, 512), &kvtransfer.Ticket{
		ID: plan.NewID(), Stage: kvtransfer.Undecided, Expires: now.Add(x.s.TicketTTL), Started: now,
		Authority: string(h.Authority), Path: string(h.Path),
	}, x.requestID)
	if err != nil {
		return fmt.Errorf("sealing the ticket of a request that is not decided: %w", err)
	}
	x.headers.Set(envoywire.HeaderTicket, sealed)
	if x.newID {
		x.headers.Set(envoywire.HeaderRequestID, []byte(x.requestID))
	}
	return nil
}

// openTicket opens the ticket of pass 2. Envoy removes tickets from clients' requests, so a ticket here came with a
// redirect, and the body with it is a leg's. If the ticket cannot be read (another key, another release, or an
// Envoy that lets clients' tickets in), the client's body cannot be restored, and the request fails. Tickets of a
// leg, which engines see, are refused as well, except pass 1's together with P's inline answer. An
// expired ticket is returned with its error.
func (x mainRole) openTicket() (*kvtransfer.Ticket, error) {
	t, err := x.s.keys().Open(string(x.msg.Headers.Ticket), x.requestID, x.s.now())
	inline := len(x.msg.Headers.Prefilled) > 0
	if t != nil && (t.Stage.Redirects() || inline && t.Stage == kvtransfer.PrefillLeg) {
		return t, err
	}
	x.RequestLost(x.requestID)
	x.s.releasePasses(x.reservedAs, x.s.State.Release) // an engine may have forged it
	x.s.Log.Warn("ticket refused", "request_id", x.requestID, "err", err)
	return nil, openai.Unavailable(envoywire.CodeTicketRefused, "the state of this request cannot be read here; send it again", time.Second)
}

// answer sends Envoy the route and the body.
func (x mainRole) answer(r route) error {
	x.setHeaders(r)
	return x.sendOn(r.Edits, x.decision)
}

// setExplanation adds the explanation of the decision, if an operator asked for it, and removes the operator's
// token.
func (x *planning) setExplanation() {
	if len(x.msg.Headers.Explain) > 0 {
		x.headers.Remove(envoywire.HeaderExplain)
	}
	if x.explanation != nil {
		x.headers.Set(envoywire.HeaderExplanation, x.explanation)
	}
}

// setHeaders sets the headers for Envoy and the next hop. Every header that controls routing is set or removed,
// whatever the client sent.
func (x mainRole) setHeaders(r route) {
	h := &x.headers
	h.Set(envoywire.HeaderEndpoint, []byte(r.Endpoint.HostPort()))
	x.setRank(r)
	h.Set(envoywire.HeaderLeg, []byte(r.Leg))
	x.setHost(r, len(x.msg.Headers.Ticket) > 0) // with a redirect, whose host is not the client's
	if r.Path != "" {
		h.Set(":path", []byte(r.Path))
	} else if x.stripped {
		h.Set(":path", x.msg.Headers.Path)
	}
	if x.newID {
		h.Set(envoywire.HeaderRequestID, []byte(x.requestID))
	}
	if r.ticket != nil {
		h.Set(envoywire.HeaderTicket, r.ticket)
	} else {
		h.Remove(envoywire.HeaderTicket)
	}
	perTry := r.PerTry
	switch r.Leg {
	case plan.LegDecode, plan.LegAnswer, plan.LegPair:
		if perTry == 0 || perTry > hedging.After {
			perTry = hedging.After
			h.Set(envoywire.HeaderHedge, []byte("true"))
		}
	}
	x.setAnswerRules(r)
	if perTry > 0 {
		h.SetInt(envoywire.HeaderPerTry, int(perTry.Milliseconds()))
	} else {
		h.Remove(envoywire.HeaderPerTry)
	}
	if r.Inline {
		h.Set(envoywire.HeaderCarry, replan.Location(x.msg.Headers.Path))
	} else {
		h.Remove(envoywire.HeaderCarry)
	}
	if len(x.msg.Headers.Prefilled) > 0 {
		h.Remove(envoywire.HeaderPrefilled)
		h.Remove(envoywire.HeaderLoad)
	}
	// another replica may watch a leg of a pair; and what others learn from this log, they learn by Redis otherwise
	x.s.loggers.Address(x.Context(), h, r.Pair == nil && x.s.State.Shares())
	x.SetTrace(&x.headers)
	if r.Leg != plan.LegEncode { // the next pass decides
		x.setExplanation()
	}
	concurrent.SetHeaders(&x.headers, &x.msg.Headers, x.requestID, r.Pair)
	if r.Sidecar != nil {
		endpointpicker.SetSidecar(h, r.Sidecar)
	}
	if s := r.Endpoint.Scheme; s != "" && s != "http" {
		h.Set(envoywire.HeaderScheme, []byte(s))
	} else {
		h.Remove(envoywire.HeaderScheme)
	}
}

// setAnswerRules says what Envoy does to D's answer. No pass needs to take them away: they change nothing in an answer
// without KV of P's.
func (x mainRole) setAnswerRules(r route) {
	if !r.Ticket.Loads || r.Ticket.Stage != kvtransfer.DecodeLeg {
		return
	}
	policy, _ := x.s.policy(r.Ticket.Pool)
	if late := policy.Dialect.LateAfter(); late > 0 {
		x.headers.SetInt(envoywire.HeaderRule, int(late.Milliseconds()))
	} else if policy.Dialect.Expiry != nil {
		x.headers.Set(envoywire.HeaderRule, []byte("cut"))
	}
}

// setHost sets the Host: the engine's name, if it has one, or the client's.
func (x mainRole) setHost(r route, resumed bool) {
	h, name := &x.headers, []byte(r.Endpoint.ServerNameSent())
	if len(name) > 0 {
		h.Set(envoywire.HeaderServerName, name)
		h.Set(":authority", name)
	} else if resumed {
		h.Set(":authority", x.msg.Headers.Authority)
		if r.Endpoint.Scheme == "https" { // an earlier pass may have set it
			h.Remove(envoywire.HeaderServerName)
		}
	}
}

// setRank names the data-parallel rank that is to take the request, where several are behind one port. A pair's legs
// have theirs from their plan. What an earlier pass or a client has set goes.
func (x mainRole) setRank(r route) {
	if rank := r.Endpoint.RankName(); rank != "" && r.Pair == nil {
		x.headers.Set(envoywire.HeaderRank, []byte(rank))
	} else if len(x.msg.Headers.Rank) > 0 {
		x.headers.Remove(envoywire.HeaderRank)
	}
}
