package api

import (
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
	"tandem/e2e/enginesim/request"
)

// messagesAPI is POST /v1/messages, Anthropic's API.
type messagesAPI struct{}

func stopReason(o *engine.Output) string {
	switch {
	case o.Finish == "length":
		return "max_tokens"
	case o.Finish == "tool_calls":
		return "tool_use"
	case o.StopReason != "null":
		return "stop_sequence"
	}
	return "end_turn"
}

func (messagesAPI) whole(c *answer) []byte {
	q := c.Seqs[0]
	dst := append([]byte(nil), `{"id":`...)
	dst = jsontext.AppendQuoted(dst, c.id)
	dst = append(dst, `,"type":"message","role":"assistant","content":[`...)
	if q.Out.Tool != "" {
		dst = append(dst, `{"type":"tool_use","id":`...)
		dst = jsontext.AppendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		dst = jsontext.AppendStr(dst, "name", q.Out.Tool)
		dst = append(jsontext.AppendRaw(dst, "input", []byte(q.Out.Text)), '}')
	} else {
		dst = append(dst, `{"type":"text","text":`...)
		dst = append(jsontext.AppendQuoted(dst, q.Out.Whole()), '}')
	}
	dst = jsontext.AppendStr(append(dst, ']'), "model", c.modelName())
	dst = jsontext.AppendStr(dst, "stop_reason", stopReason(&q.Out))
	dst = c.usage().appendAnthropic(jsontext.AppendKey(dst, "usage"))
	if params := c.handOver(); !jsontext.IsNull(params) {
		dst = jsontext.AppendRaw(dst, "kv_transfer_params", params)
	}
	return append(dst, '}')
}

// appendAnthropic counts as Anthropic does: input_tokens are those that were neither read from the cache nor written
// to it.
func (u usage) appendAnthropic(dst []byte) []byte {
	dst = append(dst, `{"input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(max(0, u.prompt-u.cached-u.created)), 10)
	dst = jsontext.AppendInt(dst, "output_tokens", int64(u.completion))
	dst = jsontext.AppendInt(dst, "cache_creation_input_tokens", int64(u.created))
	return append(jsontext.AppendInt(dst, "cache_read_input_tokens", int64(u.cached)), '}')
}

func (messagesAPI) open(c *answer, dst []byte) []byte {
	return event(dst, "message_start", func(dst []byte) []byte {
		dst = append(dst, `{"type":"message_start","message":{"id":`...)
		dst = jsontext.AppendQuoted(dst, c.id)
		dst = append(dst, `,"type":"message","role":"assistant","content":[]`...)
		dst = jsontext.AppendStr(dst, "model", c.modelName())
		dst = append(dst, `,"stop_reason":null,"stop_sequence":null,"usage":`...)
		dst = append(dst, `{"input_tokens":`...)
		dst = strconv.AppendInt(dst, int64(c.usage().prompt), 10)
		return append(dst, `,"output_tokens":0}}}`...)
	})
}

func (messagesAPI) begin(c *answer, dst []byte) []byte {
	q := c.Seqs[0]
	return event(dst, "content_block_start", func(dst []byte) []byte {
		dst = append(dst, `{"type":"content_block_start","index":0,"content_block":`...)
		if q.Out.Reasoning > 0 {
			return append(dst, `{"type":"thinking","thinking":""}}`...)
		}
		if q.Out.Tool == "" {
			return append(dst, `{"type":"text","text":""}}`...)
		}
		dst = append(dst, `{"type":"tool_use","id":`...)
		dst = jsontext.AppendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		return append(jsontext.AppendStr(dst, "name", q.Out.Tool), `,"input":{}}}`...)
	})
}

func (messagesAPI) token(c *answer, dst []byte, q *engine.Sequence, i int) []byte {
	if i == q.Out.Reasoning && i > 0 {
		dst = c.endThinking(dst)
		dst = event(dst, "content_block_start", func(dst []byte) []byte {
			return append(dst, `{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}`...)
		})
	}
	return event(dst, "content_block_delta", func(dst []byte) []byte {
		dst = append(dst, `{"type":"content_block_delta","index":`...)
		switch thinks := i < q.Out.Reasoning; {
		case thinks:
			dst = append(dst, `0,"delta":{"type":"thinking_delta","thinking":`...)
		case q.Out.Tool != "":
			dst = append(dst, `0,"delta":{"type":"input_json_delta","partial_json":`...)
		case q.Out.Reasoning > 0:
			dst = append(dst, `1,"delta":{"type":"text_delta","text":`...)
		default:
			dst = append(dst, `0,"delta":{"type":"text_delta","text":`...)
		}
		return append(jsontext.AppendQuoted(dst, q.Out.Token(i)), "}}"...)
	})
}

// endThinking ends the block of reasoning. Its signature is another one for each answer.
func (c *answer) endThinking(dst []byte) []byte {
	dst = event(dst, "content_block_delta", func(dst []byte) []byte {
		dst = append(dst, `{"type":"content_block_delta","index":0,"delta":{"type":"signature_delta","signature":`...)
		return append(jsontext.AppendQuoted(dst, c.tool), "}}"...)
	})
	return event(dst, "content_block_stop", func(dst []byte) []byte {
		return append(dst, `{"type":"content_block_stop","index":0}`...)
	})
}

func (messagesAPI) end(c *answer, dst []byte) []byte {
	q := c.Seqs[0]
	if thinks := q.Out.Reasoning > 0; thinks && q.Out.N <= q.Out.Reasoning {
		dst = c.endThinking(dst)
	} else {
		dst = event(dst, "content_block_stop", func(dst []byte) []byte {
			dst = append(dst, `{"type":"content_block_stop","index":`...)
			if thinks {
				return append(dst, "1}"...)
			}
			return append(dst, "0}"...)
		})
	}
	dst = event(dst, "message_delta", func(dst []byte) []byte {
		dst = append(dst, `{"type":"message_delta","delta":{"stop_reason":`...)
		dst = append(jsontext.AppendQuoted(dst, stopReason(&q.Out)), `},"usage":`...)
		return append(c.usage().appendAnthropic(dst), '}')
	})
	return event(dst, "message_stop", func(dst []byte) []byte { return append(dst, `{"type":"message_stop"}`...) })
}

// fail writes an error event. A failed KV load reaches vLLM's converter as a chunk that it cannot parse, and what it
// reports is that.
func (messagesAPI) fail(_ *answer, dst []byte, e *engine.Error) []byte {
	if e.Load {
		const missing = `\n  Field required [type=missing, input_value={'error': {'message': 'In...am': None, ` +
			`'code': 500}}, input_type=dict]` +
			`\n    For further information visit https://errors.pydantic.dev/2.14/v/missing`
		const message = `2 validation errors for ChatCompletionStreamResponse\nmodel` + missing + `\nchoices` + missing
		return event(dst, "error", func(dst []byte) []byte {
			return append(dst, `{"type":"error","error":{"type":"internal_error","message":"`+message+`"}}`...)
		})
	}
	return event(dst, "error", func(dst []byte) []byte { return append(dst, errorBody(e, request.Messages)...) })
}
