package main

import "bytes"

// render turns a request into the prompts that the model would see. The chat template keeps the order of every
// object's members, as the usual Jinja templates do with tools: who re-serialises a body out of order gets different tokens, and so KV that does not fit.
func (q *request) render(blockSize int) ([]*prompt, *apiError) {
	keep := q.returnIDs || q.echo || q.keepIDs || q.kv.context
	one := func(fill func(t *tokenizer)) []*prompt {
		t := newTokenizer(blockSize, keep)
		t.p.full = make([]uint64, 0, q.size/t.blockBytes+1)
		fill(t)
		return []*prompt{t.finish(q.salt)}
	}
	switch q.api {
	case apiCompletions:
		return q.renderPrompts(blockSize, keep, q.raw("prompt"))
	case apiSGLang:
		if raw := q.raw("text"); !isNull(raw) {
			return q.renderPrompts(blockSize, keep, raw)
		}
		return q.renderPrompts(blockSize, keep, q.raw("input_ids"))
	case apiGenerate:
		ids, ok := tokenIDs(q.raw("token_ids"))
		if !ok {
			return nil, pydantic("list_type", "token_ids", "Input should be a valid list of integers", q.raw("token_ids"))
		}
		return one(func(t *tokenizer) { t.tokens(ids) }), nil
	case apiResponses:
		return one(q.renderResponses), nil
	}
	if q.kv.promptIDs != nil && !q.echo && q.api == apiChat {
		return one(func(t *tokenizer) { t.tokens(q.kv.promptIDs) }), nil
	}
	messages := q.raw("messages")
	if !isArray(messages) {
		return nil, pydantic("list_type", "messages", "Input should be a valid list", messages)
	}
	if messages[next(messages, 1)] == ']' {
		return nil, badRequest("list object has no element 0")
	}
	var bad *apiError
	prompts := one(func(t *tokenizer) { bad = q.renderChat(t, messages) })
	return prompts, bad
}

func (t *tokenizer) tokens(ids []uint32) {
	for _, id := range ids {
		t.token(id)
	}
}

var (
	imStart = []byte("<|im_start|>")
	imEnd   = []byte("<|im_end|>\n")
	newline = []byte("\n")
)

func (t *tokenizer) turn(role []byte, fill func()) {
	t.piece(imStart)
	t.piece(role)
	t.piece(newline)
	fill()
	t.piece(imEnd)
}

func (q *request) renderChat(t *tokenizer, messages []byte) (bad *apiError) {
	if system := q.raw("system"); q.api == apiMessages && !isNull(system) {
		t.turn([]byte("system"), func() { t.content(system) })
	}
	first := true
	eachElement(messages, func(m []byte) bool {
		role := text(get(m, "role"))
		if !isObject(m) || role == nil {
			bad = pydantic("missing", "messages.role", "Field required", m)
			return false
		}
		if first && string(role) != "system" { // tools and the like come after the system prompt, where there is one
			q.renderExtras(t)
		}
		t.turn(role, func() { t.message(m) })
		if first && string(role) == "system" {
			q.renderExtras(t)
		}
		first = false
		return true
	})
	t.piece(imStart)
	t.piece([]byte("assistant"))
	t.piece(newline)
	return bad
}

// renderExtras writes what else a chat template is given.
func (q *request) renderExtras(t *tokenizer) {
	for _, name := range []string{"tools", "documents", "chat_template", "chat_template_kwargs"} {
		if raw := q.raw(name); !isNull(raw) {
			t.turn([]byte(name), func() { t.piece(compact(raw)) })
		}
	}
}

func (t *tokenizer) message(m []byte) {
	eachMember(m, func(key, val []byte) {
		switch string(key) {
		case "role":
		case "content":
			t.content(val)
		default:
			t.piece(key)
			t.piece(compact(val))
		}
	})
}

// content is a string, or a list of parts of which the text counts and everything else goes in as it is.
func (t *tokenizer) content(raw []byte) {
	switch {
	case isString(raw):
		t.piece(unquote(raw))
	case isArray(raw):
		eachElement(raw, func(part []byte) bool {
			if txt := get(part, "text"); isString(txt) {
				t.piece(unquote(txt))
			} else {
				t.piece(compact(part))
			}
			return true
		})
	case !isNull(raw):
		t.piece(compact(raw))
	}
}

func (q *request) renderResponses(t *tokenizer) {
	if raw := q.raw("instructions"); !isNull(raw) {
		t.turn([]byte("system"), func() { t.content(raw) })
	}
	if q.transcript != nil {
		t.turn([]byte("previous"), func() { t.piece(q.transcript) })
	}
	if !isNull(q.tools) {
		t.turn([]byte("tools"), func() { t.piece(compact(q.tools)) })
	}
	input := q.raw("input")
	if !isArray(input) {
		t.turn([]byte("user"), func() { t.content(input) })
	} else {
		eachElement(input, func(item []byte) bool {
			if role := get(item, "role"); isString(role) {
				t.turn(text(role), func() { t.content(get(item, "content")) })
			} else {
				t.turn([]byte("item"), func() { t.piece(compact(item)) })
			}
			return true
		})
	}
	t.piece(imStart)
	t.piece([]byte("assistant"))
	t.piece(newline)
}

// renderPrompts reads the four forms of /v1/completions' prompt: text, ids, and lists of either.
func (q *request) renderPrompts(blockSize int, keep bool, raw []byte) (prompts []*prompt, bad *apiError) {
	add := func(raw []byte) bool {
		t := newTokenizer(blockSize, keep)
		if isString(raw) {
			t.piece(unquote(raw))
		} else if ids, ok := tokenIDs(raw); ok {
			t.tokens(ids)
		} else {
			bad = pydantic("string_type", "prompt", "Input should be a valid string", raw)
			return false
		}
		prompts = append(prompts, t.finish(q.salt))
		return true
	}
	if isArray(raw) && !isNumber(raw[next(raw, 1):]) {
		eachElement(raw, add)
		if prompts == nil && bad == nil {
			bad = badRequest("Either prompt or prompt_embeds must be provided and non-empty.")
		}
		return prompts, bad
	}
	add(raw)
	return prompts, bad
}

// compact drops the space between tokens of JSON, as json.dumps in a chat template would, and nothing else.
func compact(raw []byte) []byte {
	if !bytes.ContainsAny(raw, " \n\r\t") {
		return raw
	}
	out := make([]byte, 0, len(raw))
	for i := 0; i < len(raw); {
		switch raw[i] {
		case ' ', '\n', '\r', '\t':
			i++
		case '"':
			end := skipString(raw, i)
			out = append(out, raw[i:end]...)
			i = end
		default:
			out = append(out, raw[i])
			i++
		}
	}
	return out
}
