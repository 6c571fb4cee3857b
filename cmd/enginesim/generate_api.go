package main

import "strconv"

// generateAPI is POST /inference/v1/generate: token ids in, token ids out.
type generateAPI struct{}

func (generateAPI) whole(c *call) []byte {
	dst := append([]byte(nil), `{"request_id":`...)
	dst = append(appendQuoted(dst, c.id), `,"choices":[`...)
	for i, q := range c.seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(q.choice), 10)
		dst = append(dst, `,"logprobs":`...)
		dst = c.appendChatLogprobs(dst, q, 0, q.out.n)
		dst = appendStr(dst, "finish_reason", q.out.finish)
		dst = append(appendIDs(appendKey(dst, "token_ids"), q.out.tokenIDs(0, q.out.n)), '}')
	}
	dst = append(dst, `],"prompt_logprobs":null`...)
	return append(appendRaw(dst, "kv_transfer_params", c.handOver()), '}')
}

func (generateAPI) open(_ *call, dst []byte) []byte { return dst }

func (generateAPI) begin(_ *call, dst []byte) []byte { return dst }

func (generateAPI) token(c *call, dst []byte, q *sequence, i int) []byte {
	dst = append(dst, `data: {"request_id":`...)
	dst = append(appendQuoted(dst, c.id), `,"choices":[{"index":`...)
	dst = strconv.AppendInt(dst, int64(q.choice), 10)
	dst = append(dst, `,"logprobs":`...)
	dst = c.appendChatLogprobs(dst, q, i, i+1)
	if i == q.out.n-1 {
		dst = appendStr(dst, "finish_reason", q.out.finish)
	} else {
		dst = append(dst, `,"finish_reason":null`...)
	}
	return append(appendIDs(appendKey(dst, "token_ids"), q.out.tokenIDs(i, i+1)), "}]}\n\n"...)
}

func (generateAPI) end(c *call, dst []byte) []byte {
	if c.req.includeUsage {
		dst = append(dst, `data: {"request_id":`...)
		dst = append(appendQuoted(dst, c.id), `,"choices":[],"usage":`...)
		dst = append(c.usage().appendOpenAI(dst, true, true), "}\n\n"...)
	}
	return append(dst, done...)
}

func (generateAPI) fail(_ *call, dst []byte, e *apiError) []byte { return failEvent(dst, e) }
