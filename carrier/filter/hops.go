package filter

import (
	"bytes"
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"tandem/extproc/journey"
	"tandem/extproc/names"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/kvstate/enginehttp"
)

// schemeOf names the protocol of an endpoint; "": plain HTTP/1.1. An https engine behind a name gets it as Host, of
// which Envoy makes SNI.
func schemeOf(e *kvstate.Endpoint) string {
	switch {
	case e.Scheme == "http":
		return ""
	case e.Scheme == "https" && e.ServerNameSent() != "":
		return "https-named"
	}
	return e.Scheme
}

// cluster returns the cluster that connects to an endpoint (envoy-configs, inside.go).
func cluster(e *kvstate.Endpoint) string {
	if s := schemeOf(e); s != "" {
		return "tandem-pod-" + s
	}
	return "tandem-pod"
}

// legCall returns the call of a leg to an endpoint, which gets the body. rank is the data-parallel rank; "": none.
func legCall(
	f *Filter, e *kvstate.Endpoint, path string, body []byte, limit time.Duration, rank, id string,
) *Call {
	x := &f.m.pass
	path = cmp.Or(path, string(x.Head.Path))
	c := &Call{
		Cluster: f.callCluster(e), Body: body, Timeout: limit,
		Set: []Header{
			{":path", path}, {":authority", f.callHost(e)}, {names.HeaderEndpoint, e.HostPort()},
			{"content-length", strconv.Itoa(len(body))}, {"accept-encoding", "identity"},
			{"accept", names.ContentTypeJSON}, {names.HeaderRequestID, id},
		},
	}
	if rank != "" {
		c.Set = append(c.Set, Header{names.HeaderRank, rank})
	}
	if via := f.head.Extra("x-forwarded-for"); via != nil {
		c.Set = append(c.Set, Header{names.HeaderForwarded, string(via)})
	}
	c.Set = append(c.Set, f.hop.trace.headers()...)
	return c
}

// prefillCall is legCall for P, which is asked to report its load.
func prefillCall(
	f *Filter, e *kvstate.Endpoint, path string, body []byte, limit time.Duration, rank, id string,
) *Call {
	c := legCall(f, e, path, body, limit, rank, id)
	c.Set = append(c.Set, Header{enginehttp.ORCARequestHeader, "JSON"})
	return c
}

// notSent is the answer of a call that could not be made.
func notSent() *prefilled {
	return &prefilled{Answer: pass.Answer{Code: 503, Details: []byte("no_call")}}
}

// callPrefill sends P its leg.
func (f *Filter) callPrefill(r *pass.Routed, body []byte) {
	f.state = journey.Prefilling
	f.reach(r.Endpoint, func() {
		if !f.envoy.Call(prefillCall(f, r.Endpoint, r.Path, body, r.PerTry, r.Endpoint.RankName(), f.m.pass.ID)) {
			f.prefillAnswers(notSent())
		}
	})
}

// prefillAnswers settles P's leg.
func (f *Filter) prefillAnswers(a *prefilled) {
	f.state = journey.Waiting
	f.offWorker("prefill answer", false, func(p passing, ctx context.Context) onWorker { return p.settle(ctx, a) })
}

// CallDone is called when the call of a leg has ended: P's, or that of an endpoint that encodes.
func (f *Filter) CallDone(answer *Answer) {
	f.guarded("call done", func() Status {
		if then := f.hop.first; then != nil {
			if f.hop.first = nil; f.m != nil { // else the request has been answered meanwhile
				then()
			}
			return Continue
		}
		if p := f.hop.pair; p != nil {
			a, _ := readAnswer(answer, nil)
			p.called(a)
			return Continue
		}
		var a *prefilled
		a, f.m.answer = readAnswer(answer, f.m.answer)
		a.Unsure = f.unsure()
		if e := f.hop.encode; e != nil {
			e.called(a)
			return Continue
		}
		f.prefillAnswers(a)
		return Continue
	})
}

// readAnswer copies what an endpoint, or Envoy in its place, answered to a call; the body to memory, which it returns.
func readAnswer(answer *Answer, memory []byte) (*prefilled, []byte) {
	a := &prefilled{}
	size := 0
	for _, piece := range answer.Body {
		size += len(piece)
	}
	var engine bool
	if answer.Headers != nil {
		a.Code, engine = a.read(answer.Headers)
	}
	a.Over = size > maxAnswer
	memory = slices.Grow(memory[:0], min(size, maxAnswer))
	for _, piece := range answer.Body {
		memory = append(memory, piece[:min(len(piece), maxAnswer-len(memory))]...)
	}
	a.Body = memory
	switch {
	case !answer.OK:
		a.Code, a.Details, a.Cut = 503, []byte("upstream_reset"), true
	case !engine:
		a.Details, a.Overdue = details(a.Code, a.Body), a.Code == 504
	}
	return a, memory
}

// details names the cause of an answer that Envoy's client gave by itself, as Envoy's response code details do.
func details(status int, body []byte) []byte {
	switch {
	case status == 504:
		return []byte("response_timeout")
	case bytes.Contains(body, []byte("connection failure")):
		return []byte("upstream_reset_before_response_started{connection_failure}")
	}
	return []byte("upstream_reset_before_response_started")
}

// sendOn lets the request go on to D, or to the one endpoint that it needs.
func (f *Filter) sendOn(r *pass.Routed) {
	x, e, b := &f.m.pass, r.Endpoint, &f.m.body
	set := f.envoy.SetHeader
	rank := e.RankName()
	f.hop.other = r.Leg == plan.LegOther
	f.target(r)
	if r.Ticket.Stage != 0 { // the answer is read
		set("accept-encoding", "identity")
	}
	if r.Pair != nil {
		rank = r.Pair.Plan.DecodeRank
		set(names.HeaderRequestID, cmp.Or(r.Pair.Plan.RequestID, x.ID))
	}
	f.setHost(e.ServerNameSent())
	if rank != "" {
		set(names.HeaderRank, rank)
	} else if f.head.Extra(names.HeaderRank) != nil {
		f.envoy.RemoveHeader(names.HeaderRank)
	}
	if path := cmp.Or(r.Path, string(x.Head.Path)); path != f.head.get(":path") {
		set(":path", path)
	}
	if r.PerTry > 0 {
		set(names.HeaderPerTry, strconv.FormatInt(r.PerTry.Milliseconds(), 10))
	} else {
		f.envoy.RemoveHeader(names.HeaderPerTry)
	}
	if f.head.Extra(names.HeaderExplain) != nil {
		f.envoy.RemoveHeader(names.HeaderExplain)
	}
	if len(b.data) > 0 { // otherwise there is no body, or Envoy passes it on unread
		if b.changed || len(r.Edits) > 0 {
			f.envoy.ReplaceBody(pieces(b.data, r.Edits)...)
		}
		f.sent = r.Edits.Len(len(b.data))
		set("content-length", strconv.Itoa(f.sent))
	}
	for _, h := range f.hop.trace.headers() {
		set(h.Name, h.Value)
	}
	switch {
	case r.Leg == plan.LegPass || f.hop.other:
		f.state = journey.Answering
	case f.hop.pair != nil:
		f.state = journey.BothLegs
	default:
		f.state = journey.Decoding
	}
	f.hop.ticket.Path, f.hop.ticket.Authority = string(x.Head.Path), string(x.Head.Authority)
	f.m.meter.Processed(names.RoleMain)
	f.drop()
	f.s.watch(f, true)
	f.envoy.Continue(f.route == nil)
}

// target has the request go on to its endpoint: on a route of Tandem's by headers, and on another's in that route's
// cluster.
func (f *Filter) target(r *pass.Routed) {
	e, set := r.Endpoint, f.envoy.SetHeader
	if f.route != nil {
		f.envoy.SendTo(e.HostPort())
		return
	}
	set(names.HeaderEndpoint, e.HostPort())
	leg := r.Leg
	if f.hop.other || leg == plan.LegAnswer {
		leg = plan.LegDecode // Envoy keeps the body
	}
	set(names.HeaderLeg, leg)
	if s := schemeOf(e); s != "" {
		set(names.HeaderScheme, s)
	} else {
		f.envoy.RemoveHeader(names.HeaderScheme)
	}
}

// explanation is the key in [names.Decisions] of an explanation, which Envoy's header mutation makes a header of.
const explanation = "explanation"

// tellDecision has the decision of a pass written into Envoy's dynamic metadata, without empty fields, before the next
// step.
func tellDecision(e Envoy, x *pass.Pass, then onWorker) onWorker {
	told := x.Told()
	if told == nil {
		return then
	}
	return func() {
		for _, m := range told {
			switch {
			case m.Text != "":
				e.SetMetadata(names.Decisions, m.Name, m.Text)
			case m.Number != 0:
				e.SetMetadataNumber(names.Decisions, m.Name, m.Number)
			}
		}
		then()
	}
}

// setHost sets the Host: the engine's name, if it has one, or the client's.
func (f *Filter) setHost(name string) {
	switch {
	case name != "":
		f.envoy.SetHeader(":authority", name)
	case f.resumed != nil && f.resumed.ticket.Authority != "": // an earlier pass may have set one
		f.envoy.SetHeader(":authority", f.resumed.ticket.Authority)
	}
}

// pieces cuts an edited body into what stays and what is new.
func pieces(body []byte, edits openai.Edits) (out [][]byte) {
	from := 0
	for _, e := range edits {
		if e.Start > from {
			out = append(out, body[from:e.Start])
		}
		if len(e.New) > 0 {
			out = append(out, e.New)
		}
		from = e.End
	}
	return append(out, body[from:])
}

// drop gives the memory of the request back: what a later pass needs is in hop.ticket.
func (f *Filter) drop() {
	if m := f.m; m != nil {
		f.m = nil
		f.s.release(m)
	}
}

// refuse answers with an error in OpenAI's format.
func (f *Filter) refuse(e *openai.Error) {
	if in := InsuredOf(f); in.hasPart() {
		in.giveUp(e)
		return
	}
	if f.state.IsAnswered() || f.state.IsSent() {
		return
	}
	if f.hop.ticket.Stage == 0 && f.resumed == nil {
		f.s.Passes.Observer.Refused(e)
	} else {
		f.s.Passes.Observer.GivenUp(e)
	}
	f.respond(e)
}

// respond answers with an error in the form of the API that was asked.
func (f *Filter) respond(e *openai.Error) {
	f.state = journey.Answered
	headers := []Header{{"content-type", names.ContentTypeJSON}}
	if e.RetryAfter > 0 {
		headers = append(headers, Header{names.HeaderRetryAfter, strconv.Itoa(e.RetrySeconds())})
	}
	body := e.For([]byte(f.head.get(":path"))).JSON()
	f.envoy.Respond(e.Status, f.withID(headers), body, names.DetailsPrefix+"_"+e.Code)
}

// answerList answers with the list of models.
func (f *Filter) answerList(body []byte) {
	f.state = journey.Answered
	kind := []Header{{"content-type", names.ContentTypeJSON}}
	f.envoy.Respond(200, f.withID(kind), body, names.DetailsPrefix+"_models")
}

// answerSettled answers the client in P's place, or with P's refusal. stream: as a stream of events.
func (f *Filter) answerSettled(a *prefilled, settled *journey.Settled, stream bool) {
	if settled.Err != nil {
		f.refuse(settled.Err)
		return
	}
	if stream {
		for i := range a.headers {
			if a.headers[i].Name == "content-type" {
				a.headers[i].Value = openai.EventStream + "; charset=utf-8"
			}
		}
	}
	f.answer(a.headers, settled.Answer)
}

func (f *Filter) answer(headers []Header, body []byte) {
	if in := InsuredOf(f); in.hasPart() {
		in.giveUp(openai.Unavailable("prefill_failed", "prefill answered the rest of a stream", time.Second))
		return
	}
	f.state = journey.Answered
	headers = f.got.sends(f, append(headers, Header{"content-length", strconv.Itoa(len(body))}))
	f.got.tokens.Give(body, f.envoy.SetMetadataNumber)
	f.envoy.Answer(headers, body)
}

// hopByHop reports whether a header of P's answer is of its connection, of its length, or of Envoy's own.
func hopByHop(name []byte) bool {
	switch string(name) {
	case "connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade", "content-length", "te",
		"trailer":
		return true
	}
	return bytes.HasPrefix(name, []byte("x-envoy-")) || bytes.HasPrefix(name, []byte("x-tandem-"))
}
