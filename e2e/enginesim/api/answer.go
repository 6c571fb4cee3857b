package api

import (
	"errors"
	"net/http"
	"slices"
	"strconv"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// prepare creates the call's sequences. The answers' lengths depend only on the text, so they are known before the KV
// is.
func (c *answer) prepare(prompts []*engine.Prompt) {
	for i, p := range prompts {
		for choice := range int(c.req.N) {
			room := c.cfg.MaxModelLen - p.N
			q := &engine.Sequence{P: p, Index: i, Choice: choice, Out: c.req.Answer(p.Digest, choice, room, 0)}
			if digest, given := c.continues(p); given > 0 {
				q.Out = c.req.Answer(digest, choice, room, given)
			}
			if c.req.Kv.Context {
				connector.StopAfterContext(q)
			}
			if c.cfg.Reasoning && c.req.Stream && q.Out.Tool == "" {
				q.Out.Reasoning = int(q.Out.Digest % 9)
			}
			c.Seqs = append(c.Seqs, q)
		}
	}
}

// internalID returns vLLM's name for a sequence, without its random tail.
func (c *answer) internalID(q *engine.Sequence) string {
	id := c.id
	switch c.req.API {
	case request.Completions:
		id += "-" + strconv.Itoa(q.Index)
	case request.Responses:
		id += "_0"
	case request.Generate:
		id = "generate-tokens-" + id
	}
	if c.req.N > 1 {
		id = strconv.Itoa(q.Choice) + "_" + id
	}
	return id
}

// continues returns the digest of the prompt whose answer a prompt of token ids continues, and how many tokens of it
// were given already; 0: none. It is searched for only where a router may ask for it.
func (c *answer) continues(p *engine.Prompt) (digest uint64, given int) {
	ids := c.req.ReturnIDs && c.req.N == 1 && c.req.ByIDs()
	if ids || c.req.API == request.Completions && c.leg.Node.TakesFirstTokens() {
		return engine.Continued(p.Ids, c.cfg.BlockSize)
	}
	return 0, 0
}

// usage is the token counts of an answer.
type usage struct {
	prompt, completion int
	cached             int
	created            int // tokens of blocks that were added to the prefix cache
}

// usage adds up the call's tokens. On a decode engine that fetched its KV, cached is the number of tokens that the
// *prefill* engine had in its cache (remote_prefill_cached_tokens), or all if that is absent.
func (c *answer) usage() usage {
	var u usage
	blockSize := c.cfg.BlockSize
	for _, q := range c.Seqs {
		u.completion += q.Out.N
		if q.Choice > 0 {
			continue
		}
		u.prompt += q.P.N
		switch {
		case q.External == 0:
			u.cached += q.Local(blockSize)
			u.created += (len(q.P.Full) - q.Grant.Hits) * blockSize
		case c.req.Kv.Present && c.req.Kv.CachedOnP >= 0:
			u.cached += int(c.req.Kv.CachedOnP)
		default:
			u.cached += q.P.N
		}
	}
	return u
}

// handOver returns the call's kv_transfer_params: those of the first prompt, and of its last choice.
func (c *answer) handOver() []byte {
	if c.cfg.Connector == connector.TRTLLM {
		return []byte("null")
	}
	for _, q := range slices.Backward(c.Seqs) {
		if q.Index == 0 && q.HandOver != nil {
			return q.HandOver
		}
	}
	return []byte("null")
}

// errorBody writes an error in the form of an API.
func errorBody(e *engine.Error, api request.API) []byte {
	if api == request.Messages {
		b := append([]byte(`{"type":"error","error":{"type":`), jsontext.AppendQuoted(nil, e.Typ)...)
		b = append(b, `,"message":`...)
		return append(jsontext.AppendQuoted(b, e.Message), "}}"...)
	}
	b := append([]byte(`{"error":{"message":`), jsontext.AppendQuoted(nil, e.Message)...)
	b = append(b, `,"type":`...)
	b = jsontext.AppendQuoted(b, e.Typ)
	b = append(b, `,"param":`...)
	if e.Param == "" {
		b = append(b, "null"...)
	} else {
		b = jsontext.AppendQuoted(b, e.Param)
	}
	b = append(b, `,"code":`...)
	b = strconv.AppendInt(b, int64(e.Status), 10)
	return append(b, "}}"...)
}

// asAPIError turns an error of the engine into the client's.
func asAPIError(err error) *engine.Error {
	if e, ok := errors.AsType[*engine.Error](err); ok {
		return e
	}
	if v, ok := errors.AsType[*engine.Violation](err); ok {
		return &engine.Error{Status: http.StatusInternalServerError, Typ: "EngineSimViolation", Message: v.Error()}
	}
	return engine.InternalError("Internal server error") // vLLM says no more about a failed KV load
}
