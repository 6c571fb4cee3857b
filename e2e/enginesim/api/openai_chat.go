package api

import (
	"strconv"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// chatAPI is POST /v1/chat/completions.
type chatAPI struct{}

// fingerprint is system_fingerprint: vLLM's release and a hash of its configuration.
const fingerprint = "vllm-0.32.0-46f24c18"

func (chatAPI) whole(c *answer) []byte {
	params := c.handOver()
	dst := c.appendHead(make([]byte, 0, 2048+len(params)), "chat.completion")
	dst = append(dst, `,"choices":[`...)
	for i, q := range c.Seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = c.appendChatChoice(dst, q)
	}
	dst = append(dst, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	dst = c.usage().appendOpenAI(dst, true, false)
	dst = append(dst, `,"prompt_logprobs":null`...)
	dst = jsontext.AppendRaw(dst, "prompt_token_ids", c.promptIDs())
	dst = append(dst, `,"prompt_text":null`...)
	dst = jsontext.AppendRaw(dst, "kv_transfer_params", params)
	return append(dst, `,"ec_transfer_params":null,"metrics":null}`...)
}

// appendHead begins an answer or a chunk: everything up to its choices.
func (c *answer) appendHead(dst []byte, object string) []byte {
	dst = append(dst, `{"id":`...)
	dst = jsontext.AppendQuoted(dst, c.id)
	dst = jsontext.AppendStr(dst, "object", object)
	dst = jsontext.AppendInt(dst, "created", c.created)
	return jsontext.AppendStr(dst, "model", c.modelName())
}

// modelName returns the model's name in the client's spelling.
func (c *answer) modelName() string {
	if c.req.Model != "" {
		return c.req.Model
	}
	return c.cfg.Models[0]
}

func (c *answer) promptIDs() []byte {
	if !c.req.ReturnIDs && !c.req.Kv.Context {
		return nil
	}
	return jsontext.AppendIDs(nil, c.Seqs[0].P.Ids)
}

// appendDisagg writes disaggregated_params of a choice, if this is a TensorRT-LLM.
func (c *answer) appendDisagg(dst []byte, q *engine.Sequence) []byte {
	if c.cfg.Connector != connector.TRTLLM || q.HandOver == nil {
		return dst
	}
	return jsontext.AppendRaw(dst, "disaggregated_params", q.HandOver)
}

func (c *answer) appendChatChoice(dst []byte, q *engine.Sequence) []byte {
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(q.Choice), 10)
	dst = append(dst, `,"message":{"role":"assistant","content":`...)
	if q.Out.Tool != "" {
		dst = append(dst, `null,"refusal":null,"annotations":null,"audio":null,"function_call":null,`+
			`"tool_calls":[{"id":`...)
		dst = jsontext.AppendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		dst = append(dst, `,"type":"function","function":{"name":`...)
		dst = jsontext.AppendQuoted(dst, q.Out.Tool)
		dst = jsontext.AppendStr(dst, "arguments", q.Out.Text)
		dst = append(dst, `}}]`...)
	} else {
		dst = jsontext.AppendQuoted(dst, q.Out.Whole())
		dst = append(dst, `,"refusal":null,"annotations":null,"audio":null,"function_call":null`...)
	}
	dst = append(dst, `,"reasoning":null},"logprobs":`...)
	dst = c.appendChatLogprobs(dst, q, 0, q.Out.N)
	dst = jsontext.AppendStr(dst, "finish_reason", q.Out.Finish)
	dst = jsontext.AppendRaw(dst, "stop_reason", []byte(q.Out.StopReason))
	dst = c.appendTokenIDs(dst, q, 0, q.Out.N)
	dst = c.appendDisagg(dst, q)
	return append(dst, `,"routed_experts":null}`...)
}

func (c *answer) toolID(q *engine.Sequence) string {
	if q.Choice == 0 {
		return c.tool
	}
	return c.tool + strconv.Itoa(q.Choice)
}

func (c *answer) appendTokenIDs(dst []byte, q *engine.Sequence, from, to int) []byte {
	if !c.req.ReturnIDs {
		return append(dst, `,"token_ids":null`...)
	}
	return jsontext.AppendIDs(jsontext.AppendKey(dst, "token_ids"), q.Out.TokenIDs(from, to))
}

// appendChatLogprobs invents a logprob for each token, and the requested number of alternatives.
func (c *answer) appendChatLogprobs(dst []byte, q *engine.Sequence, from, to int) []byte {
	if c.req.Logprobs < 0 {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"content":[`...)
	for i := from; i < to; i++ {
		if i > from {
			dst = append(dst, ',')
		}
		dst = appendLogprob(dst, q.Out.Token(i), 0)
		dst = append(dst, `,"top_logprobs":[`...)
		for alt := range c.req.Logprobs {
			if alt > 0 {
				dst = append(dst, ',')
			}
			token := q.Out.Token(i)
			if alt > 0 {
				other := engine.Output{Digest: engine.Mix(q.Out.Digest, uint64(alt))}
				token = other.Token(i)
			}
			dst = append(appendLogprob(dst, token, alt), '}')
		}
		dst = append(dst, "]}"...)
	}
	return append(dst, "]}"...)
}

func appendLogprob(dst []byte, token string, rank int64) []byte {
	dst = append(dst, `{"token":`...)
	dst = jsontext.AppendQuoted(dst, token)
	dst = append(dst, `,"logprob":`...)
	dst = strconv.AppendFloat(dst, -0.5-float64(rank), 'f', 1, 64)
	dst = append(dst, `,"bytes":[`...)
	for i := range len(token) {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(token[i]), 10)
	}
	return append(dst, ']')
}

// appendOpenAI writes usage. created is null on /v1/completions, and multimodal_tokens missing in streams.
func (u usage) appendOpenAI(dst []byte, created, streamed bool) []byte {
	dst = append(dst, `{"prompt_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.prompt), 10)
	dst = jsontext.AppendInt(dst, "total_tokens", int64(u.prompt+u.completion))
	dst = jsontext.AppendInt(dst, "completion_tokens", int64(u.completion))
	dst = append(dst, `,"prompt_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.cached), 10)
	if created {
		dst = jsontext.AppendInt(dst, "created_cache_tokens", int64(u.created))
	} else if !streamed {
		dst = append(dst, `,"created_cache_tokens":null`...)
	}
	if streamed {
		return append(dst, "}}"...)
	}
	return append(dst, `,"multimodal_tokens":null},"completion_tokens_details":null}`...)
}

func (chatAPI) begin(_ *answer, dst []byte) []byte { return dst }

func (chatAPI) open(c *answer, dst []byte) []byte {
	for _, q := range c.Seqs {
		dst = c.appendHead(append(dst, "data: "...), "chat.completion.chunk")
		dst = append(dst, `,"choices":[{"index":`...)
		dst = strconv.AppendInt(dst, int64(q.Choice), 10)
		dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
		dst = jsontext.AppendRaw(dst, "prompt_token_ids", c.promptIDs())
		dst = append(dst, `,"prompt_text":null}`+"\n\n"...)
	}
	return dst
}

func (chatAPI) token(c *answer, dst []byte, q *engine.Sequence, i int) []byte {
	dst = c.appendHead(append(dst, "data: "...), "chat.completion.chunk")
	dst = append(dst, `,"choices":[{"index":`...)
	dst = strconv.AppendInt(dst, int64(q.Choice), 10)
	if q.Out.Tool != "" {
		dst = c.appendToolDelta(dst, q, i)
	} else {
		member := "content"
		if i < q.Out.Reasoning {
			member = "reasoning"
		}
		dst = append(dst, `,"delta":{"`+member+`":"`...)
		dst = append(jsontext.AppendEscaped(dst, q.Out.Delta(i)), `"}`...)
	}
	dst = append(dst, `,"logprobs":`...)
	dst = c.appendChatLogprobs(dst, q, i, i+1)
	if i < q.Out.N-1 {
		dst = append(dst, `,"finish_reason":null`...)
		dst = c.appendTokenIDs(dst, q, i, i+1)
		return append(dst, "}]}\n\n"...)
	}
	dst = jsontext.AppendStr(dst, "finish_reason", q.Out.Finish)
	dst = jsontext.AppendRaw(dst, "stop_reason", []byte(q.Out.StopReason))
	dst = c.appendTokenIDs(dst, q, i, i+1)
	dst = append(dst, "}]"...)
	if !c.req.IncludeUsage {
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	dst = c.appendTurnEvent(dst, q)
	return append(dst, "}\n\n"...)
}

func (c *answer) appendToolDelta(dst []byte, q *engine.Sequence, i int) []byte {
	dst = append(dst, `,"delta":{"tool_calls":[{`...)
	if i == 0 {
		dst = append(dst, `"id":`...)
		dst = jsontext.AppendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		dst = append(dst, `,"type":"function","index":0,"function":{"name":`...)
		dst = jsontext.AppendQuoted(dst, q.Out.Tool)
		dst = jsontext.AppendStr(dst, "arguments", q.Out.Token(i))
	} else {
		dst = append(dst, `"index":0,"function":{"arguments":`...)
		dst = jsontext.AppendQuoted(dst, q.Out.Token(i))
	}
	return append(dst, "}}]}"...)
}

func (chatAPI) end(c *answer, dst []byte) []byte {
	if c.req.IncludeUsage {
		dst = c.appendHead(append(dst, "data: "...), "chat.completion.chunk")
		dst = append(dst, `,"choices":[],"usage":`...)
		dst = c.usage().appendOpenAI(dst, true, true)
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"}`+"\n\n"...)
	}
	return append(dst, done...)
}

func (chatAPI) fail(_ *answer, dst []byte, e *engine.Error) []byte { return failEvent(dst, e) }

// appendTurnEvent appends them to the event with the finish reason (from 0.33).
func (c *answer) appendTurnEvent(dst []byte, q *engine.Sequence) []byte {
	if !q.Kept {
		return dst
	}
	return jsontext.AppendRaw(dst, "kv_transfer_params", q.HandOver)
}
