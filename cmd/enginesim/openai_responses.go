package main

import (
	"bytes"
	"strconv"
)

// responsesAPI is POST /v1/responses. One value per call: the events of a stream are numbered.
type responsesAPI struct{ sequence int }

func (a *responsesAPI) whole(c *call) []byte {
	return c.appendResponse(nil, true)
}

// messageID is the id of the answer's one output item.
func (c *call) messageID() string { return "msg_" + c.id[len("resp_"):] }

// appendResponse writes the response object, finished or as it stands at the start of a stream.
func (c *call) appendResponse(dst []byte, finished bool) []byte {
	q := c.seqs[0]
	status := "completed"
	dst = append(dst, `{"id":`...)
	dst = appendQuoted(dst, c.id)
	dst = appendInt(dst, "created_at", c.created)
	switch {
	case !finished:
		status = "in_progress"
		dst = append(dst, `,"incomplete_details":null`...)
	case q.out.finish == "length":
		status = "incomplete"
		dst = append(dst, `,"incomplete_details":{"reason":"max_output_tokens"}`...)
	default:
		dst = append(dst, `,"incomplete_details":null`...)
	}
	dst = appendRaw(dst, "instructions", c.req.raw("instructions"))
	dst = appendRaw(dst, "metadata", c.req.raw("metadata"))
	dst = appendStr(dst, "model", c.modelName())
	dst = append(dst, `,"object":"response","output":[`...)
	if finished {
		dst = c.appendOutputItem(dst, q, true)
	}
	dst = append(dst, `],"parallel_tool_calls":true,"temperature":`...)
	dst = appendFloat(dst, c.req.temperature)
	dst = append(dst, `,"tool_choice":`...)
	if isNull(c.req.tools) {
		dst = appendOr(dst, c.req.toolChoice, `"none"`)
	} else {
		dst = appendOr(dst, c.req.toolChoice, `"auto"`)
	}
	dst = append(dst, `,"tools":`...)
	dst = appendOr(dst, c.req.tools, "[]")
	dst = append(dst, `,"top_p":`...)
	dst = appendFloat(dst, c.req.topP)
	dst = append(dst, `,"background":false,"max_output_tokens":`...)
	dst = appendOr(dst, c.req.raw("max_output_tokens"), "null")
	dst = append(dst, `,"max_tool_calls":null,"previous_response_id":`...)
	dst = appendOr(dst, c.req.raw("previous_response_id"), "null")
	dst = append(dst, `,"prompt":null,"reasoning":null,"service_tier":"auto","status":"`+status+`","text":null,"top_logprobs":null,"truncation":"disabled","usage":`...)
	if finished {
		dst = c.usage().appendResponses(dst)
	} else {
		dst = append(dst, "null"...)
	}
	dst = append(dst, `,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0`...)
	dst = appendRaw(dst, "kv_transfer_params", c.handOverIf(finished && !c.req.stream))
	return append(dst, `,"ec_transfer_params":null,"input_messages":null,"output_messages":null}`...)
}

func (c *call) handOverIf(yes bool) []byte {
	if yes {
		return c.handOver()
	}
	return nil
}

func appendOr(dst, raw []byte, otherwise string) []byte {
	if isNull(raw) {
		return append(dst, otherwise...)
	}
	return append(dst, raw...)
}

// appendFloat writes a number as Python writes a float; 1.0 where none was given.
func appendFloat(dst, raw []byte) []byte {
	if isNull(raw) {
		return append(dst, "1.0"...)
	}
	dst = append(dst, raw...)
	if !bytes.ContainsAny(raw, ".eE") {
		dst = append(dst, ".0"...)
	}
	return dst
}

// appendOutputItem writes a message, or a function call where tool_choice forced one.
func (c *call) appendOutputItem(dst []byte, q *sequence, finished bool) []byte {
	status := "in_progress"
	if finished {
		status = "completed"
	}
	if q.out.tool != "" {
		dst = append(dst, `{"arguments":`...)
		if finished {
			dst = appendQuoted(dst, q.out.text)
		} else {
			dst = append(dst, `""`...)
		}
		dst = appendStr(dst, "call_id", "call_"+c.toolID(q))
		dst = appendStr(dst, "name", q.out.tool)
		dst = append(dst, `,"type":"function_call"`...)
		dst = appendStr(dst, "id", "fc_"+c.toolID(q))
		return append(appendStr(dst, "status", status), '}')
	}
	dst = append(dst, `{"id":`...)
	dst = appendQuoted(dst, c.messageID())
	dst = append(dst, `,"content":[`...)
	if finished {
		dst = appendTextPart(dst, q.out.whole())
	}
	dst = append(dst, `],"role":"assistant"`...)
	dst = appendStr(dst, "status", status)
	return append(dst, `,"type":"message","phase":null}`...)
}

func appendTextPart(dst []byte, text string) []byte {
	dst = append(dst, `{"annotations":[]`...)
	dst = appendStr(dst, "text", text)
	return append(dst, `,"type":"output_text","logprobs":null}`...)
}

func (u usage) appendResponses(dst []byte) []byte {
	dst = append(dst, `{"input_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.prompt), 10)
	dst = append(dst, `,"input_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.cached), 10)
	dst = appendInt(dst, "cache_write_tokens", int64(u.created))
	dst = append(dst, `,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]}`...)
	dst = appendInt(dst, "output_tokens", int64(u.completion))
	dst = append(dst, `,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]}`...)
	return append(appendInt(dst, "total_tokens", int64(u.prompt+u.completion)), '}')
}

// event appends one event with its running number.
func (a *responsesAPI) event(dst []byte, name string, rest func(dst []byte) []byte) []byte {
	return event(dst, name, func(dst []byte) []byte {
		dst = append(dst, `{"type":"`...)
		dst = append(dst, name...)
		dst = append(dst, '"')
		dst = appendInt(dst, "sequence_number", int64(a.sequence))
		a.sequence++
		return append(rest(dst), '}')
	})
}

func (a *responsesAPI) open(c *call, dst []byte) []byte {
	for _, name := range []string{"response.created", "response.in_progress"} {
		dst = a.event(dst, name, func(dst []byte) []byte { return c.appendResponse(appendKey(dst, "response"), false) })
	}
	return dst
}

func (a *responsesAPI) begin(c *call, dst []byte) []byte {
	q := c.seqs[0]
	dst = a.event(dst, "response.output_item.added", func(dst []byte) []byte {
		dst = append(dst, `,"output_index":0,"item":`...)
		return c.appendOutputItem(dst, q, false)
	})
	if q.out.tool != "" {
		return dst
	}
	return a.event(dst, "response.content_part.added", func(dst []byte) []byte {
		return appendTextPart(append(c.appendItemRef(dst), `,"part":`...), "")
	})
}

func (c *call) appendItemRef(dst []byte) []byte {
	dst = appendStr(dst, "item_id", c.messageID())
	return append(dst, `,"output_index":0,"content_index":0`...)
}

func (a *responsesAPI) token(c *call, dst []byte, q *sequence, i int) []byte {
	if q.out.tool != "" {
		return a.event(dst, "response.function_call_arguments.delta", func(dst []byte) []byte {
			dst = appendStr(dst, "item_id", "fc_"+c.toolID(q))
			return appendStr(append(dst, `,"output_index":0`...), "delta", q.out.token(i))
		})
	}
	return a.event(dst, "response.output_text.delta", func(dst []byte) []byte {
		dst = appendStr(c.appendItemRef(dst), "delta", q.out.token(i))
		return append(dst, `,"logprobs":[]`...)
	})
}

func (a *responsesAPI) end(c *call, dst []byte) []byte {
	q := c.seqs[0]
	if q.out.tool != "" {
		dst = a.event(dst, "response.function_call_arguments.done", func(dst []byte) []byte {
			dst = appendStr(dst, "item_id", "fc_"+c.toolID(q))
			dst = appendStr(append(dst, `,"output_index":0`...), "name", q.out.tool)
			return appendStr(dst, "arguments", q.out.text)
		})
	} else {
		dst = a.event(dst, "response.output_text.done", func(dst []byte) []byte {
			return append(appendStr(c.appendItemRef(dst), "text", q.out.whole()), `,"logprobs":[]`...)
		})
		dst = a.event(dst, "response.content_part.done", func(dst []byte) []byte {
			return appendTextPart(append(c.appendItemRef(dst), `,"part":`...), q.out.whole())
		})
	}
	dst = a.event(dst, "response.output_item.done", func(dst []byte) []byte {
		return c.appendOutputItem(append(dst, `,"output_index":0,"item":`...), q, true)
	})
	name := "response.completed"
	if q.out.finish == "length" {
		name = "response.incomplete"
	}
	return a.event(dst, name, func(dst []byte) []byte { return c.appendResponse(appendKey(dst, "response"), true) })
}

// fail writes an error event. After a failed KV load vLLM 0.32 ends such a stream without a word.
func (a *responsesAPI) fail(_ *call, dst []byte, e *apiError) []byte {
	if e.load {
		return dst
	}
	return failEvent(dst, e)
}
