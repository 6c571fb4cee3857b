package api

import (
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// generateAPI is POST /inference/v1/generate: token ids in, token ids out.
type generateAPI struct{}

func (generateAPI) whole(c *answer) []byte {
	dst := append([]byte(nil), `{"request_id":`...)
	dst = append(jsontext.AppendQuoted(dst, c.id), `,"choices":[`...)
	for i, q := range c.Seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(q.Choice), 10)
		dst = append(dst, `,"logprobs":`...)
		dst = c.appendChatLogprobs(dst, q, 0, q.Out.N)
		dst = jsontext.AppendStr(dst, "finish_reason", q.Out.Finish)
		dst = append(jsontext.AppendIDs(jsontext.AppendKey(dst, "token_ids"), q.Out.TokenIDs(0, q.Out.N)), '}')
	}
	dst = append(dst, `],"prompt_logprobs":null`...)
	return append(jsontext.AppendRaw(dst, "kv_transfer_params", c.handOver()), '}')
}

func (generateAPI) open(_ *answer, dst []byte) []byte { return dst }

func (generateAPI) begin(_ *answer, dst []byte) []byte { return dst }

func (generateAPI) token(c *answer, dst []byte, q *engine.Sequence, i int) []byte {
	dst = append(dst, `data: {"request_id":`...)
	dst = append(jsontext.AppendQuoted(dst, c.id), `,"choices":[{"index":`...)
	dst = strconv.AppendInt(dst, int64(q.Choice), 10)
	dst = append(dst, `,"logprobs":`...)
	dst = c.appendChatLogprobs(dst, q, i, i+1)
	if i == q.Out.N-1 {
		dst = jsontext.AppendStr(dst, "finish_reason", q.Out.Finish)
	} else {
		dst = append(dst, `,"finish_reason":null`...)
	}
	return append(jsontext.AppendIDs(jsontext.AppendKey(dst, "token_ids"), q.Out.TokenIDs(i, i+1)), "}]}\n\n"...)
}

func (generateAPI) end(c *answer, dst []byte) []byte {
	if c.req.IncludeUsage {
		dst = append(dst, `data: {"request_id":`...)
		dst = append(jsontext.AppendQuoted(dst, c.id), `,"choices":[],"usage":`...)
		dst = append(c.usage().appendOpenAI(dst, true, true), "}\n\n"...)
	}
	return append(dst, done...)
}

func (generateAPI) fail(_ *answer, dst []byte, e *engine.Error) []byte { return failEvent(dst, e) }
