package api

import (
	"strconv"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// sglangAPI is POST /generate, SGLang's own: text or ids in, text out (srt/entrypoints/http_server.py, 0.5.23). A list
// of prompts, or several choices, is answered with a list.
type sglangAPI struct{}

func (sglangAPI) whole(c *answer) []byte {
	dst := make([]byte, 0, 1024)
	batch := len(c.Seqs) > 1 || jsontext.IsArray(c.req.Raw("text"))
	if batch {
		dst = append(dst, '[')
	}
	for i, q := range c.Seqs {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(c.appendMeta(append(dst, '{'), q, q.Out.N, q.Out.Whole()), '}')
	}
	if batch {
		dst = append(dst, ']')
	}
	return dst
}

// appendMeta writes the text so far and its meta_info. finish_reason is null before the end.
func (c *answer) appendMeta(dst []byte, q *engine.Sequence, tokens int, text string) []byte {
	dst = jsontext.AppendQuoted(append(dst, `"text":`...), text)
	dst = jsontext.AppendQuoted(append(dst, `,"meta_info":{"id":`...), c.id)
	if tokens < q.Out.N {
		dst = append(dst, `,"finish_reason":null`...)
	} else {
		dst = jsontext.AppendQuoted(append(dst, `,"finish_reason":{"type":`...), q.Out.Finish)
		dst = append(jsontext.AppendInt(dst, "length", int64(q.Out.N)), '}')
	}
	dst = jsontext.AppendInt(dst, "prompt_tokens", int64(q.P.N))
	dst = jsontext.AppendInt(dst, "completion_tokens", int64(tokens))
	dst = jsontext.AppendInt(dst, "cached_tokens", int64(q.Local(c.cfg.BlockSize)))
	if jsontext.IsTrue(c.req.Raw("return_logprob")) {
		dst = c.appendMetaLogprobs(dst, q, tokens)
	}
	return append(dst, '}')
}

// appendMetaLogprobs writes the log probabilities for return_logprob. Those of the prompt come from the engine that
// computed it: a decode engine has none (mini_lb.py puts prefill's in front).
func (c *answer) appendMetaLogprobs(dst []byte, q *engine.Sequence, tokens int) []byte {
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
	prompt := q.P.Ids
	if c.cfg.Role == engine.RoleDecode {
		prompt = nil
	}
	list("input_token_logprobs", prompt)
	list("output_token_logprobs", q.Out.TokenIDs(0, tokens))
	return dst
}

func (sglangAPI) open(_ *answer, dst []byte) []byte { return dst }

func (sglangAPI) begin(_ *answer, dst []byte) []byte { return dst }

// token writes an event; SGLang's texts are cumulative.
func (sglangAPI) token(c *answer, dst []byte, q *engine.Sequence, i int) []byte {
	text := ""
	for k := range i + 1 {
		text += q.Out.Token(k)
	}
	dst = c.appendMeta(append(dst, "data: {"...), q, i+1, text)
	if len(c.Seqs) > 1 {
		dst = append(dst, `,"index":`...)
		dst = strconv.AppendInt(dst, int64(q.Index*int(c.req.N)+q.Choice), 10)
	}
	return append(dst, "}\n\n"...)
}

func (sglangAPI) end(_ *answer, dst []byte) []byte { return append(dst, done...) }

func (sglangAPI) fail(_ *answer, dst []byte, e *engine.Error) []byte { return failEvent(dst, e) }
