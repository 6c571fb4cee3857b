package filter

import (
	"bytes"
	"cmp"
	"context"
	"strconv"
	"time"

	"tandem/extproc/envoywire"
	"tandem/extproc/openai"
	"tandem/extproc/pass"
	"tandem/extproc/plan"
	"tandem/kvstate"
)

// cluster returns the cluster that connects to an endpoint (envoy-configs, inside.go).
func cluster(scheme string) string {
	if scheme == "" || scheme == "http" {
		return "tandem-pod"
	}
	return "tandem-pod-" + scheme
}

// legCall returns the call of a leg to an endpoint, which gets the body. rank is the data-parallel rank; "": none.
func legCall(
	x *pass.Pass, e *kvstate.Endpoint, path string, body []byte, limit time.Duration, rank, id string,
) *Call {
	host, path := cmp.Or(e.ServerNameSent(), string(x.Head.Authority)), cmp.Or(path, string(x.Head.Path))
	c := &Call{
		Cluster: cluster(e.Scheme), Body: body, Timeout: limit,
		Set: []Header{
			{":path", path}, {":authority", host}, {envoywire.HeaderEndpoint, e.HostPort()},
			{"content-length", strconv.Itoa(len(body))}, {"accept-encoding", "identity"},
			{"accept", envoywire.ContentTypeJSON}, {envoywire.HeaderRequestID, id},
		},
	}
	if rank != "" {
		c.Set = append(c.Set, Header{envoywire.HeaderRank, rank})
	}
	return c
}

// callPrefill sends P its leg.
func (f *Filter) callPrefill(r *pass.Routed, body []byte) {
	x := &f.m.pass
	if !f.envoy.Call(legCall(x, r.Endpoint, r.Path, body, r.PerTry, r.Endpoint.RankName(), x.ID)) {
		f.beside("prefill answer", false, func(ctx context.Context) func() {
			return f.settle(ctx, &prefilled{Answer: pass.Answer{Code: 503, Details: []byte("no_call")}})
		})
	}
}

// CallDone is called when P's leg has ended.
func (f *Filter) CallDone(answer *Answer) {
	f.guarded("call done", func() Status {
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
		f.m.answer = f.m.answer[:0]
		for _, piece := range answer.Body {
			f.m.answer = append(f.m.answer, piece[:min(len(piece), maxAnswer-len(f.m.answer))]...)
		}
		a.Body = f.m.answer
		switch {
		case !answer.OK:
			a.Code, a.Details, a.Cut = 502, []byte("upstream_reset"), true
		case !engine:
			a.Details, a.Overdue = details(a.Code, a.Body), a.Code == 504
		}
		f.beside("prefill answer", false, func(ctx context.Context) func() { return f.settle(ctx, a) })
		return Continue
	})
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
	set(envoywire.HeaderEndpoint, e.HostPort())
	set(envoywire.HeaderLeg, r.Leg)
	if s := e.Scheme; s != "" && s != "http" {
		set(envoywire.HeaderScheme, s)
	} else {
		f.envoy.RemoveHeader(envoywire.HeaderScheme)
	}
	f.setHost(e.ServerNameSent())
	if rank := e.RankName(); rank != "" {
		set(envoywire.HeaderRank, rank)
	} else if f.head.Extra(envoywire.HeaderRank) != nil {
		f.envoy.RemoveHeader(envoywire.HeaderRank)
	}
	if path := cmp.Or(r.Path, string(x.Head.Path)); path != f.head.get(":path") {
		set(":path", path)
	}
	if r.PerTry > 0 {
		set(envoywire.HeaderPerTry, strconv.FormatInt(r.PerTry.Milliseconds(), 10))
	} else {
		f.envoy.RemoveHeader(envoywire.HeaderPerTry)
	}
	if f.head.Extra(envoywire.HeaderExplain) != nil {
		f.envoy.RemoveHeader(envoywire.HeaderExplain)
	}
	if x.Explanation != nil {
		set(envoywire.HeaderExplanation, string(x.Explanation))
	}
	if f.whole {
		if b.changed || len(r.Edits) > 0 {
			f.envoy.ReplaceBody(pieces(b.data, r.Edits)...)
		}
		set("content-length", strconv.Itoa(r.Edits.Len(len(b.data))))
	}
	f.hop.sent, f.hop.replan = true, r.Leg == plan.LegDecode
	f.hop.ticket.Path, f.hop.ticket.Authority = string(x.Head.Path), string(x.Head.Authority)
	f.m.meter.Processed(envoywire.RoleMain)
	f.drop()
	f.s.watch(f, true)
	f.envoy.Continue()
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
	if in := InsuredOf(f); in.continues() {
		in.giveUp(e)
		return
	}
	if f.hop.answered || f.hop.sent {
		return
	}
	f.hop.answered = true
	if f.hop.ticket.Stage == 0 && f.resumed == nil {
		f.s.Passes.Observer.Refused(e)
	} else {
		f.s.Passes.Observer.GivenUp(e)
	}
	headers := []Header{{"content-type", envoywire.ContentTypeJSON}}
	if e.RetryAfter > 0 {
		headers = append(headers, Header{envoywire.HeaderRetryAfter, strconv.Itoa(e.RetrySeconds())})
	}
	f.envoy.Respond(e.Status, headers, e.JSON(), envoywire.DetailsPrefix+"_"+e.Code)
}

// answerList answers with the list of models.
func (f *Filter) answerList(body []byte) {
	f.hop.answered = true
	kind := []Header{{"content-type", envoywire.ContentTypeJSON}}
	f.envoy.Respond(200, kind, body, envoywire.DetailsPrefix+"_models")
}

// answerRefused passes P's refusal on, without the members that Tandem added for P.
func (f *Filter) answerRefused(a *prefilled) {
	if a.Over {
		f.refuse(openai.BadRequest("prefill_refused", "", "the prefill endpoint refused this request"))
		return
	}
	f.answer(a.headers, openai.CutEcho(nil, a.Body))
}

// answerFinal answers the client with what is made of P's answer.
func (f *Filter) answerFinal(a *prefilled, body []byte, stream bool) {
	if stream {
		for i := range a.headers {
			if a.headers[i].Name == "content-type" {
				a.headers[i].Value = "text/event-stream; charset=utf-8"
			}
		}
	}
	f.answer(a.headers, body)
}

func (f *Filter) answer(headers []Header, body []byte) {
	if in := InsuredOf(f); in.continues() {
		in.giveUp(openai.Unavailable("prefill_failed", "prefill answered the rest of a stream", time.Second))
		return
	}
	f.hop.answered = true
	headers = append(headers, Header{"content-length", strconv.Itoa(len(body))})
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
