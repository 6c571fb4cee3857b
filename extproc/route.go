package extproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"tandem/extproc/endpointpicker"
	"tandem/extproc/envoywire"
	"tandem/extproc/journey"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/models"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/extproc/replan"
	"tandem/extproc/telemetry"
)

// mainRole handles the main listener's filter: pass 1 and pass 2 of a request.
type mainRole struct {
	handler
	pass *pass.Pass
	legs *journey.Legs
}

// serve serves pass 1 and pass 2 of a request.
func (x mainRole) serve() error {
	if err := x.stream.receive(); err != nil {
		return err
	}
	if x.stream.msg.Phase != envoywire.PhaseRequestHeaders {
		return errors.New("the first message of a stream was not request headers")
	}
	x.identify(x.pass)
	x.startSpan(telemetry.SpanDecide, true)
	ctx := x.stream.Context()
	d, err := x.decide(ctx)
	if err != nil {
		return err
	}
	r, err := x.pass.Commit(ctx, d)
	if err != nil {
		return err
	}
	x.meter.EndPhase(telemetry.PhaseDecide)
	x.setHeaders(r)
	err = x.stream.sendOn(r.Edits, x.decision(x.pass))
	x.meter.EndPhase(telemetry.PhaseAnswer)
	if err == nil && ctx.Err() != nil {
		err = io.EOF // Envoy ended the stream before the answer
	}
	if err != nil {
		x.s.passes.Release(r.Held)
	}
	return err
}

// decide decides where the request goes, and receives the body if the decision needs it.
func (x mainRole) decide(ctx context.Context) (*plan.Decision, error) {
	h := &x.stream.msg.Headers
	if h.Ticket != nil { // an empty one is forged, too
		return x.resume(ctx)
	}
	h.Path, x.stream.newPath = paths.WithoutPrefix(x.s.PathPrefixes, h.Path)
	x.pass.Head = x.head()
	if x.stream.msg.Mode.Request == envoywire.ModeBuffered {
		if err := x.undecided(); err != nil {
			return nil, err
		}
	}
	api, err := x.s.passes.Admit(&x.pass.Head, x.arrival())
	switch {
	case err != nil:
		return nil, err
	case api == openai.Models:
		return x.listModels(ctx)
	case api == openai.PassThrough:
		return x.passThrough(ctx)
	}
	if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
		return nil, err
	}
	return x.pass.First(ctx, api, plan.Attempt{Started: x.s.passes.Now()})
}

// arrival returns what is known of the request before its body has come.
func (x mainRole) arrival() pass.Arrival {
	h := &x.stream.msg.Headers
	return pass.Arrival{
		Upgrade: len(h.Upgrade) > 0, Reads: x.stream.msg.Mode.Request != envoywire.ModeNone,
		Ended: x.stream.msg.EndOfStream, Length: h.ContentLength,
		Unfit: replan.Fits(h.Authority, h.Path, h.Count, h.Size),
	}
}

// passThrough receives a request that is never split.
func (x mainRole) passThrough(ctx context.Context) (*plan.Decision, error) {
	if x.stream.msg.Mode.Request != envoywire.ModeNone {
		if err := x.receiveBody(x.s.MaxBodyBytes); err != nil {
			return nil, err
		}
	}
	return x.pass.Other(ctx)
}

// listModels answers GET /v1/models, and GET /v1/models/NAME if the name is known; an engine answers of others.
func (x mainRole) listModels(ctx context.Context) (*plan.Decision, error) {
	body := models.Answer(x.s.State, string(x.stream.msg.Headers.Path), x.s.started)
	if body == nil {
		if err := x.s.passes.AdmitOther(&x.pass.Head, x.arrival()); err != nil {
			return nil, err
		}
		return x.passThrough(ctx)
	}
	i := &envoywire.Immediate{Status: 200, Body: body, Details: names.DetailsPrefix + "_models"}
	i.Headers.Set("content-type", []byte(names.ContentTypeJSON))
	i.Headers.Set(names.HeaderRequestID, []byte(x.stream.requestID))
	if err := x.stream.send(&envoywire.Reply{Immediate: i}); err != nil {
		return nil, err
	}
	return nil, errAnswered
}

// resume receives the body of pass 2, which has the ticket of a leg that has ended. The redirect's host and path are
// replaced with the client's.
func (x mainRole) resume(ctx context.Context) (*plan.Decision, error) {
	t, ticketErr := x.openTicket()
	if t == nil {
		return nil, ticketErr
	}
	if err := x.receiveBody(x.s.MaxBodyBytes + kvtransfer.MaxUndoBytes + plan.MaxDecodeMember); err != nil {
		return nil, err
	}
	h := &x.stream.msg.Headers
	h.Authority = []byte(t.Authority)
	if t.Path != "" && t.Path != string(h.Path) { // a redirect has no query, and an engine can make one
		h.Path, x.stream.newPath = []byte(t.Path), true
	}
	x.pass.Head = x.head()
	return x.legs.Resume(ctx, x.pass, t, ticketErr)
}

// undecided gives pass 1 a ticket, with the reply to its headers. Envoy keeps a buffered body: if the replica that
// has it fails, the replan port takes this ticket, and another replica begins again. Engines never see it.
func (x mainRole) undecided() error {
	h, now := &x.stream.msg.Headers, x.s.passes.Now()
	sealed, err := x.s.passes.Keys().Seal(make([]byte, 0, 512), &kvtransfer.Ticket{
		ID: plan.NewID(), Stage: kvtransfer.Undecided, Expires: now.Add(x.s.TicketTTL), Started: now,
		Authority: string(h.Authority), Path: string(h.Path),
	}, x.stream.requestID)
	if err != nil {
		return fmt.Errorf("sealing the ticket of a request that is not decided: %w", err)
	}
	x.stream.headers.Set(names.HeaderTicket, sealed)
	if x.stream.newID {
		x.stream.headers.Set(names.HeaderRequestID, []byte(x.stream.requestID))
	}
	return nil
}

// openTicket opens the ticket of pass 2. Envoy removes tickets from clients' requests, so a ticket here came with a
// redirect, and the body with it is a leg's. If the ticket cannot be read (another key, another release, or an
// Envoy that lets clients' tickets in), the client's body cannot be restored, and the request fails. Tickets of a
// leg, which engines see, are refused as well, except pass 1's together with P's inline answer. An
// expired ticket is returned with its error.
func (x mainRole) openTicket() (*kvtransfer.Ticket, error) {
	t, err := x.s.passes.Keys().Open(string(x.stream.msg.Headers.Ticket), x.stream.requestID, x.s.passes.Now())
	inline := len(x.stream.msg.Headers.Prefilled) > 0
	if t != nil && (t.Stage.Redirects() || inline && t.Stage == kvtransfer.PrefillLeg) {
		return t, err
	}
	x.meter.Observer.RequestLost(x.stream.requestID)
	x.s.passes.Revoke(x.pass.ReservedAs) // an engine may have forged it
	x.s.Log.Warn("ticket refused", "request_id", x.stream.requestID, "err", err)
	return nil, openai.Unavailable(names.CodeTicketRefused, "the state of this request cannot be read here; send it again", time.Second)
}

// setHeaders sets the headers for Envoy and the next hop. Every header that controls routing is set or removed,
// whatever the client sent.
func (x mainRole) setHeaders(r pass.Routed) {
	h := &x.stream.headers
	h.Set(names.HeaderEndpoint, []byte(r.Endpoint.HostPort()))
	x.setRank(r)
	if r.Leg == plan.LegOther {
		h.Set(names.HeaderLeg, []byte(plan.LegPass))
		h.Set(names.HeaderOther, []byte("true"))
	} else {
		h.Set(names.HeaderLeg, []byte(r.Leg))
	}
	x.setHost(r, len(x.stream.msg.Headers.Ticket) > 0) // with a redirect, whose host is not the client's
	if r.Path != "" {
		h.Set(":path", []byte(r.Path))
	} else if x.stream.newPath {
		h.Set(":path", x.stream.msg.Headers.Path)
	}
	if x.stream.newID {
		h.Set(names.HeaderRequestID, []byte(x.stream.requestID))
	}
	if r.Sealed != nil {
		h.Set(names.HeaderTicket, r.Sealed)
	} else {
		h.Remove(names.HeaderTicket)
	}
	perTry := r.PerTry
	switch r.Leg {
	case plan.LegDecode, plan.LegAnswer, plan.LegPair:
		if perTry == 0 || perTry > replan.HedgeAfter {
			perTry = replan.HedgeAfter
			h.Set(names.HeaderHedge, []byte("true"))
		}
	}
	x.setAnswerRules(r)
	if perTry > 0 {
		h.SetInt(names.HeaderPerTry, int(perTry.Milliseconds()))
	} else {
		h.Remove(names.HeaderPerTry)
	}
	if r.Inline {
		h.Set(names.HeaderCarry, replan.Location(x.stream.msg.Headers.Path))
	} else {
		h.Remove(names.HeaderCarry)
	}
	if len(x.stream.msg.Headers.Prefilled) > 0 {
		h.Remove(names.HeaderPrefilled)
		h.Remove(names.HeaderLoad)
	}
	// another replica may watch a leg of a pair; and what others learn from this log, they learn by Redis otherwise
	x.s.loggers.Address(x.stream.Context(), h, r.Pair == nil && x.s.State.Shares())
	if parent, state := x.meter.Trace(); parent != "" {
		h.Set(names.HeaderTraceparent, []byte(parent))
		if state != "" {
			h.Set(names.HeaderTracestate, []byte(state))
		}
	}
	if r.Leg != plan.LegEncode { // the next pass decides
		x.explain(x.pass)
	}
	setPairHeaders(&x.stream.headers, &x.stream.msg.Headers, x.stream.requestID, r.Pair)
	if r.Sidecar != nil {
		endpointpicker.SetSidecar(h, r.Sidecar)
	}
	if s := r.Endpoint.Scheme; s != "" && s != "http" {
		h.Set(names.HeaderScheme, []byte(s))
	} else {
		h.Remove(names.HeaderScheme)
	}
}

// setAnswerRules says what Envoy does to D's answer. No pass has to remove them again: they change only answers
// that use P's KV.
func (x mainRole) setAnswerRules(r pass.Routed) {
	rule := x.s.journeys.AnswerRule(&r.Ticket)
	if rule.Late > 0 {
		x.stream.headers.SetInt(names.HeaderRule, int(rule.Late.Milliseconds()))
	} else if rule.Cut {
		x.stream.headers.Set(names.HeaderRule, []byte("cut"))
	}
	if rule.Cut { // the script reads it
		x.stream.headers.Set("accept-encoding", []byte("identity"))
	}
}

// setHost sets the Host: the engine's name, if it has one, or the client's.
func (x mainRole) setHost(r pass.Routed, resumed bool) {
	h, name := &x.stream.headers, []byte(r.Endpoint.ServerNameSent())
	if len(name) > 0 {
		h.Set(names.HeaderServerName, name)
		h.Set(":authority", name)
	} else if resumed {
		h.Set(":authority", x.stream.msg.Headers.Authority)
		if r.Endpoint.Scheme == "https" { // an earlier pass may have set it
			h.Remove(names.HeaderServerName)
		}
	}
}

// setRank names the data-parallel rank that is to take the request, where several are behind one port. A pair's legs
// have theirs from their plan. What an earlier pass or a client has set is removed.
func (x mainRole) setRank(r pass.Routed) {
	if rank := r.Endpoint.RankName(); rank != "" && r.Pair == nil {
		x.stream.headers.Set(names.HeaderRank, []byte(rank))
	} else if len(x.stream.msg.Headers.Rank) > 0 {
		x.stream.headers.Remove(names.HeaderRank)
	}
}
