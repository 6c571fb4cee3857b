package main

import "strconv"

// sglangAPI is POST /generate, SGLang's own: text or ids in, text out (srt/entrypoints/http_server.py, 0.5.23). A list of
// prompts, or several choices, is answered with a list.
type sglangAPI struct{}

func (sglangAPI) whole(c *call) []byte {
	dst := make([]byte, 0, 1024)
	batch := len(c.seqs) > 1 || isArray(c.req.raw("text"))
	if batch {
		dst = append(dst, '[')
	}
	for i, q := range c.seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(c.appendMeta(append(dst, '{'), q, q.out.n, q.out.whole()), '}')
	}
	if batch {
		dst = append(dst, ']')
	}
	return dst
}

// appendMeta writes the text so far and its meta_info. finish_reason is null before the end.
func (c *call) appendMeta(dst []byte, q *sequence, tokens int, text string) []byte {
	dst = appendQuoted(append(dst, `"text":`...), text)
	dst = appendQuoted(append(dst, `,"meta_info":{"id":`...), c.id)
	if tokens < q.out.n {
		dst = append(dst, `,"finish_reason":null`...)
	} else {
		dst = appendQuoted(append(dst, `,"finish_reason":{"type":`...), q.out.finish)
		dst = append(appendInt(dst, "length", int64(q.out.n)), '}')
	}
	dst = appendInt(dst, "prompt_tokens", int64(q.p.n))
	dst = appendInt(dst, "completion_tokens", int64(tokens))
	dst = appendInt(dst, "cached_tokens", int64(q.local(c.s.cfg.blockSize)))
	if isTrue(c.req.raw("return_logprob")) {
		dst = c.appendMetaLogprobs(dst, q, tokens)
	}
	return append(dst, '}')
}

// appendMetaLogprobs writes what return_logprob asks for. The prompt's are those of the engine that computed it: a decode
// engine has none (mini_lb.py puts prefill's in front).
func (c *call) appendMetaLogprobs(dst []byte, q *sequence, tokens int) []byte {
	list := func(key string, ids []uint32) {
		dst = append(append(append(dst, `,"`...), key...), `":[`...)
		for i, id := range ids {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = append(dst, "[-0.5,"...)
			dst = append(strconv.AppendUint(dst, uint64(id), 10), ",null]"...)
		}
		dst = append(dst, ']')
	}
	prompt := q.p.ids
	if c.s.cfg.role == roleDecode {
		prompt = nil
	}
	list("input_token_logprobs", prompt)
	list("output_token_logprobs", q.out.tokenIDs(0, tokens))
	return dst
}

func (sglangAPI) open(_ *call, dst []byte) []byte { return dst }

func (sglangAPI) begin(_ *call, dst []byte) []byte { return dst }

// token writes an event; SGLang's texts are cumulative.
func (sglangAPI) token(c *call, dst []byte, q *sequence, i int) []byte {
	text := ""
	for k := range i + 1 {
		text += q.out.token(k)
	}
	dst = c.appendMeta(append(dst, "data: {"...), q, i+1, text)
	if len(c.seqs) > 1 {
		dst = append(dst, `,"index":`...)
		dst = strconv.AppendInt(dst, int64(q.index*int(c.req.n)+q.choice), 10)
	}
	return append(dst, "}\n\n"...)
}

func (sglangAPI) end(_ *call, dst []byte) []byte { return append(dst, done...) }

func (sglangAPI) fail(_ *call, dst []byte, e *apiError) []byte { return failEvent(dst, e) }
