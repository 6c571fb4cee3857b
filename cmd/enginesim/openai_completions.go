package main

import "strconv"

// completionsAPI is POST /v1/completions.
type completionsAPI struct{}

func (completionsAPI) whole(c *call) []byte {
	dst := c.appendHead(make([]byte, 0, 2048), "text_completion")
	dst = append(dst, `,"choices":[`...)
	for i, q := range c.seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = appendStr(dst, "text", c.echoed(q)+q.out.whole())
		dst = append(dst, `,"logprobs":`...)
		dst = c.appendLogprobs(dst, q, 0, q.out.n)
		dst = appendStr(dst, "finish_reason", q.out.finish)
		dst = appendRaw(dst, "stop_reason", []byte(q.out.stopReason))
		dst = c.appendTokenIDs(dst, q, 0, q.out.n)
		dst = append(dst, `,"prompt_logprobs":null`...)
		if c.req.returnIDs {
			dst = appendIDs(appendKey(dst, "prompt_token_ids"), q.p.ids)
		} else {
			dst = append(dst, `,"prompt_token_ids":null`...)
		}
		dst = c.appendDisagg(dst, q)
		dst = append(dst, `,"routed_experts":null}`...)
	}
	dst = append(dst, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	dst = c.usage().appendOpenAI(dst, false, false)
	if c.req.kv.context {
		dst = appendRaw(dst, "prompt_token_ids", c.promptIDs())
	}
	dst = appendRaw(dst, "kv_transfer_params", c.handOver())
	return append(dst, `,"ec_transfer_params":null,"metrics":null}`...)
}

// echoed is the prompt's text where the client wants it back.
func (c *call) echoed(q *sequence) string {
	if !c.req.echo {
		return ""
	}
	var b []byte
	for _, id := range q.p.ids {
		b = appendToken(b, id)
	}
	return string(b)
}

func (c *call) appendLogprobs(dst []byte, q *sequence, from, to int) []byte {
	if c.req.logprobs < 0 {
		return append(dst, "null"...)
	}
	list := func(key string, item func(dst []byte, i int) []byte) {
		dst = append(dst, '"')
		dst = append(dst, key...)
		dst = append(dst, `":[`...)
		for i := from; i < to; i++ {
			if i > from {
				dst = append(dst, ',')
			}
			dst = item(dst, i)
		}
		dst = append(dst, ']')
	}
	dst = append(dst, '{')
	list("text_offset", func(dst []byte, i int) []byte { return strconv.AppendInt(dst, int64(i*tokenBytes), 10) })
	dst = append(dst, ',')
	list("token_logprobs", func(dst []byte, _ int) []byte { return append(dst, "-0.5"...) })
	dst = append(dst, ',')
	list("tokens", func(dst []byte, i int) []byte { return appendQuoted(dst, q.out.token(i)) })
	dst = append(dst, ',')
	list("top_logprobs", func(dst []byte, i int) []byte {
		return append(appendQuoted(append(dst, '{'), q.out.token(i)), ":-0.5}"...)
	})
	return append(dst, '}')
}

func (completionsAPI) open(_ *call, dst []byte) []byte { return dst }

func (completionsAPI) begin(_ *call, dst []byte) []byte { return dst }

func (completionsAPI) token(c *call, dst []byte, q *sequence, i int) []byte {
	index := q.index*int(c.req.n) + q.choice
	text := q.out.token(i)
	if i == 0 {
		text = c.echoed(q) + text
	}
	dst = c.appendHead(append(dst, "data: "...), "text_completion")
	dst = append(dst, `,"choices":[{"index":`...)
	dst = strconv.AppendInt(dst, int64(index), 10)
	dst = appendStr(dst, "text", text)
	dst = append(dst, `,"logprobs":`...)
	dst = c.appendLogprobs(dst, q, i, i+1)
	if i < q.out.n-1 {
		dst = append(dst, `,"finish_reason":null,"stop_reason":null`...)
	} else {
		dst = appendStr(dst, "finish_reason", q.out.finish)
		dst = appendRaw(dst, "stop_reason", []byte(q.out.stopReason))
	}
	dst = c.appendTokenIDs(dst, q, i, i+1)
	if i == 0 && c.req.returnIDs {
		dst = appendIDs(appendKey(dst, "prompt_token_ids"), q.p.ids)
	}
	dst = append(dst, "}]"...)
	if i == q.out.n-1 && !c.req.includeUsage {
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	if i == q.out.n-1 {
		dst = c.appendTurnEvent(dst, q)
	}
	return append(dst, "}\n\n"...)
}

func (completionsAPI) end(c *call, dst []byte) []byte {
	if c.req.includeUsage {
		dst = c.appendHead(append(dst, "data: "...), "text_completion")
		dst = append(dst, `,"choices":[],"usage":`...)
		dst = c.usage().appendOpenAI(dst, false, true)
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"}`+"\n\n"...)
	}
	return append(dst, done...)
}

func (completionsAPI) fail(_ *call, dst []byte, e *apiError) []byte { return failEvent(dst, e) }
