package api

import (
	"bytes"
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// responsesAPI is POST /v1/responses. One value per call: the events of a stream are numbered.
type responsesAPI struct{ sequence int }

func (a *responsesAPI) whole(c *answer) []byte {
	return c.appendResponse(nil, true)
}

// messageID returns the id of the answer's one output item.
func (c *answer) messageID() string { return "msg_" + c.id[len("resp_"):] }

// appendResponse writes the response object, finished or as it stands at the start of a stream.
func (c *answer) appendResponse(dst []byte, finished bool) []byte {
	q := c.Seqs[0]
	status := "completed"
	dst = append(dst, `{"id":`...)
	dst = jsontext.AppendQuoted(dst, c.id)
	dst = jsontext.AppendInt(dst, "created_at", c.created)
	switch {
	case !finished:
		status = "in_progress"
		dst = append(dst, `,"incomplete_details":null`...)
	case q.Out.Finish == "length":
		status = "incomplete"
		dst = append(dst, `,"incomplete_details":{"reason":"max_output_tokens"}`...)
	default:
		dst = append(dst, `,"incomplete_details":null`...)
	}
	dst = jsontext.AppendRaw(dst, "instructions", c.req.Raw("instructions"))
	dst = jsontext.AppendRaw(dst, "metadata", c.req.Raw("metadata"))
	dst = jsontext.AppendStr(dst, "model", c.modelName())
	dst = append(dst, `,"object":"response","output":[`...)
	if finished {
		dst = c.appendOutputItem(dst, q, true)
	}
	dst = append(dst, `],"parallel_tool_calls":true,"temperature":`...)
	dst = appendFloat(dst, c.req.Temperature)
	dst = append(dst, `,"tool_choice":`...)
	if jsontext.IsNull(c.req.Tools) {
		dst = appendOr(dst, c.req.ToolChoice, `"none"`)
	} else {
		dst = appendOr(dst, c.req.ToolChoice, `"auto"`)
	}
	dst = append(dst, `,"tools":`...)
	dst = appendOr(dst, c.req.Tools, "[]")
	dst = append(dst, `,"top_p":`...)
	dst = appendFloat(dst, c.req.TopP)
	dst = append(dst, `,"background":false,"max_output_tokens":`...)
	dst = appendOr(dst, c.req.Raw("max_output_tokens"), "null")
	dst = append(dst, `,"max_tool_calls":null,"previous_response_id":`...)
	dst = appendOr(dst, c.req.Raw("previous_response_id"), "null")
	dst = append(dst, `,"prompt":null,"reasoning":null,"service_tier":"auto","status":"`+status+`","text":null,`+
		`"top_logprobs":null,"truncation":"disabled","usage":`...)
	if finished {
		dst = c.usage().appendResponses(dst)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0`...)
	dst = jsontext.AppendRaw(dst, "kv_transfer_params", c.handOverIf(finished && !c.req.Stream))
	return append(dst, `,"ec_transfer_params":null,"input_messages":null,"output_messages":null}`...)
}

func (c *answer) handOverIf(yes bool) []byte {
	if yes {
		return c.handOver()
	}
	return nil
}

func appendOr(dst, raw []byte, otherwise string) []byte {
	if jsontext.IsNull(raw) {
		return append(dst, otherwise...)
	}
	return append(dst, raw...)
}

// appendFloat writes a number as Python writes a float; 1.0 if it is absent.
func appendFloat(dst, raw []byte) []byte {
	if jsontext.IsNull(raw) {
		return append(dst, "1.0"...)
	}
	dst = append(dst, raw...)
	if !bytes.ContainsAny(raw, ".eE") {
		dst = append(dst, ".0"...)
	}
	return dst
}

// appendOutputItem writes a message, or a function call if tool_choice forced one.
func (c *answer) appendOutputItem(dst []byte, q *engine.Sequence, finished bool) []byte {
	status := "in_progress"
	if finished {
		status = "completed"
	}
	if q.Out.Tool != "" {
		dst = append(dst, `{"arguments":`...)
		if finished {
			dst = jsontext.AppendQuoted(dst, q.Out.Text)
		} else {
			dst = append(dst, `""`...)
		}
		dst = jsontext.AppendStr(dst, "call_id", "call_"+c.toolID(q))
		dst = jsontext.AppendStr(dst, "name", q.Out.Tool)
		dst = append(dst, `,"type":"function_call"`...)
		dst = jsontext.AppendStr(dst, "id", "fc_"+c.toolID(q))
		return append(jsontext.AppendStr(dst, "status", status), '}')
	}
	dst = append(dst, `{"id":`...)
	dst = jsontext.AppendQuoted(dst, c.messageID())
	dst = append(dst, `,"content":[`...)
	if finished {
		dst = appendTextPart(dst, q.Out.Whole())
	}
	dst = append(dst, `],"role":"assistant"`...)
	dst = jsontext.AppendStr(dst, "status", status)
	return append(dst, `,"type":"message","phase":null}`...)
}

func appendTextPart(dst []byte, text string) []byte {
	dst = append(dst, `{"annotations":[]`...)
	dst = jsontext.AppendStr(dst, "text", text)
	return append(dst, `,"type":"output_text","logprobs":null}`...)
}

func (u usage) appendResponses(dst []byte) []byte {
	dst = append(dst, `{"input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.prompt), 10)
	dst = append(dst, `,"input_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.cached), 10)
	dst = jsontext.AppendInt(dst, "cache_write_tokens", int64(u.created))
	dst = append(dst, `,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}`...)
	dst = jsontext.AppendInt(dst, "output_tokens", int64(u.completion))
	dst = append(dst, `,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,`+
		`"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}`...)
	return append(jsontext.AppendInt(dst, "total_tokens", int64(u.prompt+u.completion)), '}')
}

// event appends one event with its running number.
func (a *responsesAPI) event(dst []byte, name string, rest func(dst []byte) []byte) []byte {
	return event(dst, name, func(dst []byte) []byte {
		dst = append(dst, `{"type":"`...)
		dst = append(dst, name...)
		dst = append(dst, '"')
		dst = jsontext.AppendInt(dst, "sequence_number", int64(a.sequence))
		a.sequence++
		return append(rest(dst), '}')
	})
}

func (a *responsesAPI) open(c *answer, dst []byte) []byte {
	for _, name := range []string{"response.created", "response.in_progress"} {
		dst = a.event(dst, name, func(dst []byte) []byte {
			return c.appendResponse(jsontext.AppendKey(dst, "response"), false)
		})
	}
	return dst
}

func (a *responsesAPI) begin(c *answer, dst []byte) []byte {
	q := c.Seqs[0]
	dst = a.event(dst, "response.output_item.added", func(dst []byte) []byte {
		dst = append(dst, `,"output_index":0,"item":`...)
		return c.appendOutputItem(dst, q, false)
	})
	if q.Out.Tool != "" {
		return dst
	}
	return a.event(dst, "response.content_part.added", func(dst []byte) []byte {
		return appendTextPart(append(c.appendItemRef(dst), `,"part":`...), "")
	})
}

func (c *answer) appendItemRef(dst []byte) []byte {
	dst = jsontext.AppendStr(dst, "item_id", c.messageID())
	return append(dst, `,"output_index":0,"content_index":0`...)
}

func (a *responsesAPI) token(c *answer, dst []byte, q *engine.Sequence, i int) []byte {
	if q.Out.Tool != "" {
		return a.event(dst, "response.function_call_arguments.delta", func(dst []byte) []byte {
			dst = jsontext.AppendStr(dst, "item_id", "fc_"+c.toolID(q))
			return jsontext.AppendStr(append(dst, `,"output_index":0`...), "delta", q.Out.Token(i))
		})
	}
	return a.event(dst, "response.output_text.delta", func(dst []byte) []byte {
		dst = jsontext.AppendStr(c.appendItemRef(dst), "delta", q.Out.Token(i))
		return append(dst, `,"logprobs":[]`...)
	})
}

func (a *responsesAPI) end(c *answer, dst []byte) []byte {
	q := c.Seqs[0]
	if q.Out.Tool != "" {
		dst = a.event(dst, "response.function_call_arguments.done", func(dst []byte) []byte {
			dst = jsontext.AppendStr(dst, "item_id", "fc_"+c.toolID(q))
			dst = jsontext.AppendStr(append(dst, `,"output_index":0`...), "name", q.Out.Tool)
			return jsontext.AppendStr(dst, "arguments", q.Out.Text)
		})
	} else {
		dst = a.event(dst, "response.output_text.done", func(dst []byte) []byte {
			return append(jsontext.AppendStr(c.appendItemRef(dst), "text", q.Out.Whole()), `,"logprobs":[]`...)
		})
		dst = a.event(dst, "response.content_part.done", func(dst []byte) []byte {
			return appendTextPart(append(c.appendItemRef(dst), `,"part":`...), q.Out.Whole())
		})
	}
	dst = a.event(dst, "response.output_item.done", func(dst []byte) []byte {
		return c.appendOutputItem(append(dst, `,"output_index":0,"item":`...), q, true)
	})
	return a.event(dst, "response.completed", func(dst []byte) []byte {
		return c.appendResponse(jsontext.AppendKey(dst, "response"), true)
	})
}

// fail writes an error event. After a failed KV load vLLM 0.32 ends such a stream without an event.
func (a *responsesAPI) fail(_ *answer, dst []byte, e *engine.Error) []byte {
	if e.Load {
		return dst
	}
	return failEvent(dst, e)
}
