package extproc

import (
	"bytes"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// completionsPath is where D continues P's answer, whatever the client's API is.
const completionsPath = "/v1/completions"

// continueAt makes D's leg one that continues after P's first token, and defines how the client's answer is made
// from D's. If that is not possible, r stays as it is: D gets the client's own body and generates the whole answer.
//
// x.body is P's body, and becomes the client's. D's body differs little from that.
func (x nextPass) continueAt(r *plan.Decision, t *kvtransfer.Ticket, dialect *kvtransfer.Dialect, params []byte) (answer []byte, undo openai.Edits) {
	h := &x.msg.Headers
	if t.Redirects+1 >= x.s.MaxRedirects {
		return nil, nil
	}
	x.spare.Grow(t.Undo.Len(x.body.Len()))
	x.spare.Data = t.Undo.Apply(x.spare.Data[:0], x.body.Bytes())
	x.swapBody()
	r.Edits = nil
	api := openai.Classify(string(h.Method), string(h.Path))
	err := x.req.Scan(api, x.body.Bytes(), openai.Limits{})
	if err == nil {
		x.patch.Reset(&x.req)
		answer, err = dialect.Continue(&x.req, &x.patch, params)
	}
	if err != nil {
		x.s.Log.Warn("decode cannot go on behind prefill's token: it computes the prompt", "request_id", x.requestID, "err", err)
		return nil, nil
	}
	edits := x.patch.Edits()
	x.undo = edits.Inverse(x.undo[:0], x.body.Bytes())
	if x.undo.Size() > kvtransfer.MaxUndoBytes {
		return nil, nil
	}
	r.Leg, r.Edits = envoywire.LegAnswer, edits
	if api != openai.Completions {
		r.Path = completionsPath
	}
	return answer, x.undo
}

// clientPath returns the path to store in a ticket: the client's, if the leg uses another one or the redirect omits
// a query, else "".
func (x *planning) clientPath(leg string) string {
	if leg == "" && bytes.IndexByte(x.msg.Headers.Path, '?') < 0 {
		return ""
	}
	return string(x.msg.Headers.Path)
}

// addCachedTokens reports P's cached tokens to the client, if the pool wants that and the answer has such a field.
// It returns the numbers to store in the ticket.
func (x nextPass) addCachedTokens(r *plan.Decision, t *kvtransfer.Ticket, policy *Policy) (cached, written int64) {
	if !policy.PrefillCached || t.Cached == 0 || r.Leg != envoywire.LegDecode && r.Leg != envoywire.LegAnswer {
		return 0, 0
	}
	switch openai.Classify(string(x.msg.Headers.Method), string(x.msg.Headers.Path)) {
	case openai.Chat, openai.Completions:
		if t.Stream && !t.StreamUsage {
			return 0, 0
		}
	case openai.Responses, openai.Messages:
	default:
		return 0, 0
	}
	r.Leg = envoywire.LegAnswer
	return t.Cached, t.Written
}
