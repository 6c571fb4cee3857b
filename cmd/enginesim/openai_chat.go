package main

import "strconv"

// chatAPI is POST /v1/chat/completions.
type chatAPI struct{}

// fingerprint is system_fingerprint: vLLM's release and a hash of its configuration.
const fingerprint = "vllm-0.32.0-46f24c18"

func (chatAPI) whole(c *call) []byte {
	params := c.handOver()
	dst := c.appendHead(make([]byte, 0, 2048+len(params)), "chat.completion")
	dst = append(dst, `,"choices":[`...)
	for i, q := range c.seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = c.appendChatChoice(dst, q)
	}
	dst = append(dst, `],"service_tier":null,"system_fingerprint":"`+fingerprint+`","usage":`...)
	dst = c.usage().appendOpenAI(dst, true, false)
	dst = append(dst, `,"prompt_logprobs":null`...)
	dst = appendRaw(dst, "prompt_token_ids", c.promptIDs())
	dst = append(dst, `,"prompt_text":null`...)
	dst = appendRaw(dst, "kv_transfer_params", params)
	return append(dst, `,"ec_transfer_params":null,"metrics":null}`...)
}

// appendHead begins an answer or a chunk: everything up to its choices.
func (c *call) appendHead(dst []byte, object string) []byte {
	dst = append(dst, `{"id":`...)
	dst = appendQuoted(dst, c.id)
	dst = appendStr(dst, "object", object)
	dst = appendInt(dst, "created", c.created)
	return appendStr(dst, "model", c.modelName())
}

// modelName is what the client called the model.
func (c *call) modelName() string {
	if c.req.model != "" {
		return c.req.model
	}
	return c.s.cfg.models[0]
}

func (c *call) promptIDs() []byte {
	if !c.req.returnIDs && !c.req.kv.context {
		return nil
	}
	return appendIDs(nil, c.seqs[0].p.ids)
}

// appendDisagg writes disaggregated_params of a choice, if this is a TensorRT-LLM.
func (c *call) appendDisagg(dst []byte, q *sequence) []byte {
	if c.s.cfg.connector != connectorTRTLLM || q.handOver == nil {
		return dst
	}
	return appendRaw(dst, "disaggregated_params", q.handOver)
}

func (c *call) appendChatChoice(dst []byte, q *sequence) []byte {
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(q.choice), 10)
	dst = append(dst, `,"message":{"role":"assistant","content":`...)
	if q.out.tool != "" {
		dst = append(dst, `null,"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[{"id":`...)
		dst = appendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		dst = append(dst, `,"type":"function","function":{"name":`...)
		dst = appendQuoted(dst, q.out.tool)
		dst = appendStr(dst, "arguments", q.out.text)
		dst = append(dst, `}}]`...)
	} else {
		dst = appendQuoted(dst, q.out.whole())
		dst = append(dst, `,"refusal":null,"annotations":null,"audio":null,"function_call":null`...)
	}
	dst = append(dst, `,"reasoning":null},"logprobs":`...)
	dst = c.appendChatLogprobs(dst, q, 0, q.out.n)
	dst = appendStr(dst, "finish_reason", q.out.finish)
	dst = appendRaw(dst, "stop_reason", []byte(q.out.stopReason))
	dst = c.appendTokenIDs(dst, q, 0, q.out.n)
	dst = c.appendDisagg(dst, q)
	return append(dst, `,"routed_experts":null}`...)
}

func (c *call) toolID(q *sequence) string {
	return strconv.FormatUint(mix(q.out.digest^k1, uint64(c.created)^k0), 16)
}

func (c *call) appendTokenIDs(dst []byte, q *sequence, from, to int) []byte {
	if !c.req.returnIDs {
		return append(dst, `,"token_ids":null`...)
	}
	return appendIDs(appendKey(dst, "token_ids"), q.out.tokenIDs(from, to))
}

// appendChatLogprobs invents a logprob for each token, and as many alternatives as were asked for.
func (c *call) appendChatLogprobs(dst []byte, q *sequence, from, to int) []byte {
	if c.req.logprobs < 0 {
		return append(dst, "null"...)
	}
	dst = append(dst, `{"content":[`...)
	for i := from; i < to; i++ {
		if i > from {
			dst = append(dst, ',')
		}
		dst = appendLogprob(dst, q.out.token(i), 0)
		dst = append(dst, `,"top_logprobs":[`...)
		for alt := range c.req.logprobs {
			if alt > 0 {
				dst = append(dst, ',')
			}
			token := q.out.token(i)
			if alt > 0 {
				other := output{digest: mix(q.out.digest, uint64(alt))}
				token = other.token(i)
			}
			dst = append(appendLogprob(dst, token, alt), '}')
		}
		dst = append(dst, "]}"...)
	}
	return append(dst, "]}"...)
}

func appendLogprob(dst []byte, token string, rank int64) []byte {
	dst = append(dst, `{"token":`...)
	dst = appendQuoted(dst, token)
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
	dst = appendInt(dst, "total_tokens", int64(u.prompt+u.completion))
	dst = appendInt(dst, "completion_tokens", int64(u.completion))
	dst = append(dst, `,"prompt_tokens_details":{"cached_tokens":`...)
	dst = strconv.AppendInt(dst, int64(u.cached), 10)
	if created {
		dst = appendInt(dst, "created_cache_tokens", int64(u.created))
	} else if !streamed {
		dst = append(dst, `,"created_cache_tokens":null`...)
	}
	if streamed {
		return append(dst, "}}"...)
	}
	return append(dst, `,"multimodal_tokens":null},"completion_tokens_details":null}`...)
}

func (chatAPI) begin(_ *call, dst []byte) []byte { return dst }

func (chatAPI) open(c *call, dst []byte) []byte {
	for _, q := range c.seqs {
		dst = c.appendHead(append(dst, "data: "...), "chat.completion.chunk")
		dst = append(dst, `,"choices":[{"index":`...)
		dst = strconv.AppendInt(dst, int64(q.choice), 10)
		dst = append(dst, `,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`...)
		dst = appendRaw(dst, "prompt_token_ids", c.promptIDs())
		dst = append(dst, `,"prompt_text":null}`+"\n\n"...)
	}
	return dst
}

func (chatAPI) token(c *call, dst []byte, q *sequence, i int) []byte {
	dst = c.appendHead(append(dst, "data: "...), "chat.completion.chunk")
	dst = append(dst, `,"choices":[{"index":`...)
	dst = strconv.AppendInt(dst, int64(q.choice), 10)
	if q.out.tool != "" {
		dst = c.appendToolDelta(dst, q, i)
	} else {
		dst = append(dst, `,"delta":{"content":"`...)
		dst = append(appendEscaped(dst, q.out.token(i)), `"}`...)
	}
	dst = append(dst, `,"logprobs":`...)
	dst = c.appendChatLogprobs(dst, q, i, i+1)
	if i < q.out.n-1 {
		dst = append(dst, `,"finish_reason":null`...)
		dst = c.appendTokenIDs(dst, q, i, i+1)
		return append(dst, "}]}\n\n"...)
	}
	dst = appendStr(dst, "finish_reason", q.out.finish)
	dst = appendRaw(dst, "stop_reason", []byte(q.out.stopReason))
	dst = c.appendTokenIDs(dst, q, i, i+1)
	dst = append(dst, "}]"...)
	if !c.req.includeUsage {
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"`...)
	}
	dst = c.appendTurnEvent(dst, q)
	return append(dst, "}\n\n"...)
}

func (c *call) appendToolDelta(dst []byte, q *sequence, i int) []byte {
	dst = append(dst, `,"delta":{"tool_calls":[{`...)
	if i == 0 {
		dst = append(dst, `"id":`...)
		dst = appendQuoted(dst, "chatcmpl-tool-"+c.toolID(q))
		dst = append(dst, `,"type":"function","index":0,"function":{"name":`...)
		dst = appendQuoted(dst, q.out.tool)
		dst = appendStr(dst, "arguments", q.out.token(i))
	} else {
		dst = append(dst, `"index":0,"function":{"arguments":`...)
		dst = appendQuoted(dst, q.out.token(i))
	}
	return append(dst, "}}]}"...)
}

func (chatAPI) end(c *call, dst []byte) []byte {
	if c.req.includeUsage {
		dst = c.appendHead(append(dst, "data: "...), "chat.completion.chunk")
		dst = append(dst, `,"choices":[],"usage":`...)
		dst = c.usage().appendOpenAI(dst, true, true)
		dst = append(dst, `,"system_fingerprint":"`+fingerprint+`"}`+"\n\n"...)
	}
	return append(dst, done...)
}

func (chatAPI) fail(_ *call, dst []byte, e *apiError) []byte { return failEvent(dst, e) }
