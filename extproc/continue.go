package extproc

import (
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
)

// completionsPath is where D goes on with what P began, whatever the client's API is.
const completionsPath = "/v1/completions"

// maxKeptPath bounds the client's path where a ticket has to keep it.
const maxKeptPath = 1024

// continueAt makes D's leg one that goes on behind P's first token, and says how the client's answer is made of D's. Where
// that cannot be, r stays as it is: D is sent the client's own body, and writes all of the answer.
//
// The body in x.body is P's, and the client's afterwards: what D is sent differs from that in little.
func (x *exchange) continueAt(r *route, t *kvtransfer.Ticket, c kvtransfer.Continuer, params []byte) (answer []byte, undo openai.Edits) {
	h := &x.msg.headers
	if t.Redirects+1 >= x.s.MaxRedirects || len(h.path) > maxKeptPath {
		return nil, nil
	}
	x.spare.grow(t.Undo.Len(x.body.len()))
	x.spare.data = t.Undo.Apply(x.spare.data[:0], x.body.bytes())
	x.swapBody()
	r.edits = nil
	api := openai.Classify(string(h.method), string(h.path))
	err := x.req.Scan(api, x.body.bytes(), openai.Limits{})
	if err == nil {
		x.patch.Reset(&x.req)
		answer, err = c.Continue(&x.req, &x.patch, params)
	}
	if err != nil {
		x.s.Log.Warn("decode cannot go on behind prefill's token: it computes the prompt", "request_id", x.requestID, "err", err)
		return nil, nil
	}
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		return nil, nil
	}
	r.leg, r.edits = legAnswer, edits
	if api != openai.Completions {
		r.path = completionsPath
	}
	return answer, x.undo
}

// clientPath is what a route's ticket has to keep of the client's path: all of it where the leg has another.
func (x *exchange) clientPath(r *route) string {
	if r.path == "" {
		return ""
	}
	return string(x.msg.headers.path)
}

// tellCached has the client told what P had in its cache, where the pool wants that and the answer says such a thing. It
// returns what the ticket has to keep for it.
func (x *exchange) tellCached(r *route, t *kvtransfer.Ticket, policy *Policy) (cached int64) {
	if !policy.PrefillCached || t.Cached == 0 || r.leg != legDecode && r.leg != legAnswer {
		return 0
	}
	switch openai.Classify(string(x.msg.headers.method), string(x.msg.headers.path)) {
	case openai.Chat, openai.Completions:
		if t.Stream && !t.StreamUsage {
			return 0
		}
	case openai.Responses:
	default:
		return 0
	}
	r.leg = legAnswer
	return t.Cached
}
