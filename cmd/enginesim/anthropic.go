package main

import "strconv"

// messagesAPI is POST /v1/messages, Anthropic's API.
type messagesAPI struct{}

func stopReason(o *output) string {
	switch {
	case o.finish == "length":
		return "max_tokens"
	case o.finish == "tool_calls":
		return "tool_use"
	case o.stopReason != "null":
		return "stop_sequence"
	}
	return "end_turn"
}

func (messagesAPI) whole(c *call) []byte {
	q := c.seqs[0]
	dst := append([]byte(nil), `{"id":`...)
	dst = appendQuoted(dst, c.id)
	dst = append(dst, `,"type":"message","role":"assistant","content":[`...)
	if q.out.tool != "" {
		dst = append(dst, `{"type":"tool_use","id":`...)
		dst = appendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		dst = appendStr(dst, "name", q.out.tool)
		dst = append(appendRaw(dst, "input", []byte(q.out.text)), '}')
	} else {
		dst = append(dst, `{"type":"text","text":`...)
		dst = append(appendQuoted(dst, q.out.whole()), '}')
	}
	dst = appendStr(append(dst, ']'), "model", c.modelName())
	dst = appendStr(dst, "stop_reason", stopReason(&q.out))
	dst = c.usage().appendAnthropic(appendKey(dst, "usage"))
	if params := c.handOver(); !isNull(params) {
		dst = appendRaw(dst, "kv_transfer_params", params)
	}
	return append(dst, '}')
}

// appendAnthropic counts as Anthropic does: input_tokens are those that were neither read from the cache nor put there.
func (u usage) appendAnthropic(dst []byte) []byte {
	dst = append(dst, `{"input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(0, u.prompt-u.cached-u.created)), 10)
	dst = appendInt(dst, "output_tokens", int64(u.completion))
	dst = appendInt(dst, "cache_creation_input_tokens", int64(u.created))
	return append(appendInt(dst, "cache_read_input_tokens", int64(u.cached)), '}')
}

func (messagesAPI) open(c *call, dst []byte) []byte {
	return event(dst, "message_start", func(dst []byte) []byte {
		dst = append(dst, `{"type":"message_start","message":{"id":`...)
		dst = appendQuoted(dst, c.id)
		dst = append(dst, `,"type":"message","role":"assistant","content":[]`...)
		dst = appendStr(dst, "model", c.modelName())
		dst = append(dst, `,"stop_reason":null,"stop_sequence":null,"usage":`...)
		dst = append(dst, `{"input_tokens":`...)
		dst = strconv.AppendInt(dst, int64(c.usage().prompt), 10)
		return append(dst, `,"output_tokens":0}}}`...)
	})
}

func (messagesAPI) begin(c *call, dst []byte) []byte {
	q := c.seqs[0]
	return event(dst, "content_block_start", func(dst []byte) []byte {
		dst = append(dst, `{"type":"content_block_start","index":0,"content_block":`...)
		if q.out.tool == "" {
			return append(dst, `{"type":"text","text":""}}`...)
		}
		dst = append(dst, `{"type":"tool_use","id":`...)
		dst = appendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		return append(appendStr(dst, "name", q.out.tool), `,"input":{}}}`...)
	})
}

func (messagesAPI) token(_ *call, dst []byte, q *sequence, i int) []byte {
	return event(dst, "content_block_delta", func(dst []byte) []byte {
		dst = append(dst, `{"type":"content_block_delta","index":0,"delta":{"type":`...)
		if q.out.tool != "" {
			dst = append(dst, `"input_json_delta","partial_json":`...)
		} else {
			dst = append(dst, `"text_delta","text":`...)
		}
		return append(appendQuoted(dst, q.out.token(i)), "}}"...)
	})
}

func (messagesAPI) end(c *call, dst []byte) []byte {
	q := c.seqs[0]
	dst = event(dst, "content_block_stop", func(dst []byte) []byte {
		return append(dst, `{"type":"content_block_stop","index":0}`...)
	})
	dst = event(dst, "message_delta", func(dst []byte) []byte {
		dst = append(dst, `{"type":"message_delta","delta":{"stop_reason":`...)
		dst = append(appendQuoted(dst, stopReason(&q.out)), `},"usage":`...)
		return append(c.usage().appendAnthropic(dst), '}')
	})
	return event(dst, "message_stop", func(dst []byte) []byte { return append(dst, `{"type":"message_stop"}`...) })
}

// fail writes an error event. A failed KV load reaches vLLM's converter as a chunk that it cannot parse, and what it reports is that.
func (messagesAPI) fail(_ *call, dst []byte, e *apiError) []byte {
	if e.load {
		const missing = `\n  Field required [type=missing, input_value={'error': {'message': 'In...am': None, 'code': 500}}, input_type=dict]` +
			`\n    For further information visit https://errors.pydantic.dev/2.14/v/missing`
		const message = `2 validation errors for ChatCompletionStreamResponse\nmodel` + missing + `\nchoices` + missing
		return event(dst, "error", func(dst []byte) []byte {
			return append(dst, `{"type":"error","error":{"type":"internal_error","message":"`+message+`"}}`...)
		})
	}
	return event(dst, "error", func(dst []byte) []byte { return append(dst, e.json(apiMessages)...) })
}
