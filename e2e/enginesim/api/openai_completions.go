package api

import (
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// completionsAPI is POST /v1/completions.
type completionsAPI struct{}

func (completionsAPI) whole(c *answer) []byte {
	dst := c.appendHead(make([]byte, 0, 2048), "text_completion")
	dst = append(dst, `,"choices":[`...)
	for i, q := range c.Seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"index":`...)
		dst = strconv.AppendInt(dst, int64(i), 10)
		dst = jsontext.AppendStr(dst, "text", c.echoed(q)+q.Out.Whole())
		dst = append(dst, `,"logprobs":`...)
		dst = c.appendLogprobs(dst, q, 0, q.Out.N)
		dst = jsontext.AppendStr(dst, "finish_reason", q.Out.Finish)
		dst = jsontext.AppendRaw(dst, "stop_reason", []byte(q.Out.StopReason))
		dst = c.appendTokenIDs(dst, q, 0, q.Out.N)
		dst = append(dst, `,"prompt_logprobs":null`...)
		if c.req.ReturnIDs {
			dst = jsontext.AppendIDs(jsontext.AppendKey(dst, "prompt_token_ids"), q.P.Ids)
		} else {
			dst = append(dst, `,"prompt_token_ids":null`...)
		}
		dst = c.appendDisagg(dst, q)
		dst = append(dst, `,"routed_experts":null}`...)
	}
	dst = append(dst, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	dst = c.usage().appendOpenAI(dst, false, false)
	if c.req.Kv.Context {
		dst = jsontext.AppendRaw(dst, "prompt_token_ids", c.promptIDs())
	}
	dst = jsontext.AppendRaw(dst, "kv_transfer_params", c.handOver())
	return append(dst, `,"ec_transfer_params":null,"metrics":null}`...)
}

// echoed returns the prompt's text if the client asked for it.
func (c *answer) echoed(q *engine.Sequence) string {
	if !c.req.Echo {
		return ""
	}
	var b []byte
	for _, id := range q.P.Ids {
		b = engine.AppendToken(b, id)
	}
	return string(b)
}

func (c *answer) appendLogprobs(dst []byte, q *engine.Sequence, from, to int) []byte {
	if c.req.Logprobs < 0 {
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
	list("text_offset", func(dst []byte, i int) []byte {
		return strconv.AppendInt(dst, int64(i*engine.TokenBytes), 10)
	})
	dst = append(dst, ',')
	list("token_logprobs", func(dst []byte, _ int) []byte { return append(dst, "-0.5"...) })
	dst = append(dst, ',')
	list("tokens", func(dst []byte, i int) []byte { return jsontext.AppendQuoted(dst, q.Out.Token(i)) })
	dst = append(dst, ',')
	list("top_logprobs", func(dst []byte, i int) []byte {
		return append(jsontext.AppendQuoted(append(dst, '{'), q.Out.Token(i)), ":-0.5}"...)
	})
	return append(dst, '}')
}

func (completionsAPI) open(_ *answer, dst []byte) []byte { return dst }

func (completionsAPI) begin(_ *answer, dst []byte) []byte { return dst }

func (completionsAPI) token(c *answer, dst []byte, q *engine.Sequence, i int) []byte {
	index := q.Index*int(c.req.N) + q.Choice
	text := q.Out.Delta(i)
	if i == 0 {
		text = c.echoed(q) + text
	}
	dst = c.appendHead(append(dst, "data: "...), "text_completion")
	dst = append(dst, `,"choices":[{"index":`...)
	dst = strconv.AppendInt(dst, int64(index), 10)
	dst = jsontext.AppendStr(dst, "text", text)
	dst = append(dst, `,"logprobs":`...)
	dst = c.appendLogprobs(dst, q, i, i+1)
	if i < q.Out.N-1 {
		dst = append(dst, `,"finish_reason":null,"stop_reason":null`...)
	} else {
		dst = jsontext.AppendStr(dst, "finish_reason", q.Out.Finish)
		dst = jsontext.AppendRaw(dst, "stop_reason", []byte(q.Out.StopReason))
	}
	if dst = jsontext.AppendKey(dst, "prompt_token_ids"); i == 0 && c.req.ReturnIDs {
		dst = jsontext.AppendIDs(dst, q.P.Ids)
	} else {
		dst = append(dst, "null"...)
	}
	dst = c.appendTokenIDs(dst, q, i, i+1)
	dst = append(dst, "}]"...)
	if i == q.Out.N-1 && !c.req.IncludeUsage {
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	if i == q.Out.N-1 {
		dst = c.appendTurnEvent(dst, q)
	}
	return append(dst, "}\n\n"...)
}

func (completionsAPI) end(c *answer, dst []byte) []byte {
	if c.req.IncludeUsage {
		dst = c.appendHead(append(dst, "data: "...), "text_completion")
		dst = append(dst, `,"choices":[],"usage":`...)
		dst = c.usage().appendOpenAI(dst, false, true)
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"}`+"\n\n"...)
	}
	return append(dst, done...)
}

func (completionsAPI) fail(_ *answer, dst []byte, e *engine.Error) []byte { return failEvent(dst, e) }
