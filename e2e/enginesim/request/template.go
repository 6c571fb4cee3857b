package request

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// template writes a chat's pieces.
type template struct{ *engine.Tokenizer }

// Render turns a request into the prompts that the model would see. The chat template keeps the order of every
// object's members, as the usual Jinja templates do with tools: a router that re-serialises a body in another order
// gets different tokens, and so KV that does not fit.
func (q *Request) Render(blockSize int) ([]*engine.Prompt, *engine.Error) {
	keep := q.ReturnIDs || q.Echo || q.KeepIDs || q.Kv.Context
	one := func(fill func(t template)) []*engine.Prompt {
		t := engine.NewTokenizer(blockSize, keep)
		t.Expect(q.size)
		fill(template{t})
		return []*engine.Prompt{t.Finish(q.salt)}
	}
	switch q.API {
	case Completions:
		return q.renderPrompts(blockSize, keep, q.Raw("prompt"))
	case SGLang:
		if raw := q.Raw("text"); !jsontext.IsNull(raw) {
			return q.renderPrompts(blockSize, keep, raw)
		}
		return q.renderPrompts(blockSize, keep, q.Raw("input_ids"))
	case Generate:
		ids, ok := jsontext.TokenIDs(q.Raw("token_ids"))
		if !ok {
			return nil, engine.Pydantic("list_type", "token_ids", "Input should be a valid list of integers",
				q.Raw("token_ids"))
		}
		return one(func(t template) { t.Tokens(ids) }), nil
	case Responses:
		return one(q.renderResponses), nil
	}
	if q.Kv.PromptIDs != nil && !q.Echo && q.API == Chat {
		return one(func(t template) { t.Tokens(q.Kv.PromptIDs) }), nil
	}
	messages := q.Raw("messages")
	if !jsontext.IsArray(messages) {
		return nil, engine.Pydantic("list_type", "messages", "Input should be a valid list", messages)
	}
	if messages[jsontext.Next(messages, 1)] == ']' {
		return nil, engine.BadRequest("list object has no element 0")
	}
	var bad *engine.Error
	prompts := one(func(t template) { bad = q.renderChat(t, messages) })
	return prompts, bad
}

var (
	imStart = []byte("<|im_start|>")
	imEnd   = []byte("<|im_end|>\n")
	newline = []byte("\n")
)

func (t template) turn(role []byte, fill func()) {
	t.Piece(imStart)
	t.Piece(role)
	t.Piece(newline)
	fill()
	t.Piece(imEnd)
}

func (q *Request) renderChat(t template, messages []byte) (bad *engine.Error) {
	if system := q.Raw("system"); q.API == Messages && !jsontext.IsNull(system) {
		t.turn([]byte("system"), func() { t.content(system) })
	}
	first := true
	jsontext.EachElement(messages, func(m []byte) bool {
		role := jsontext.Text(jsontext.Get(m, "role"))
		if !jsontext.IsObject(m) || role == nil {
			bad = engine.Pydantic("missing", "messages.role", "Field required", m)
			return false
		}
		if first && string(role) != "system" { // tools and the like follow the system prompt, if there is one
			q.renderExtras(t)
		}
		t.turn(role, func() { t.message(m) })
		if first && string(role) == "system" {
			q.renderExtras(t)
		}
		first = false
		return true
	})
	t.Piece(imStart)
	t.Piece([]byte("assistant"))
	t.Piece(newline)
	return bad
}

// renderExtras writes the other inputs of a chat template.
func (q *Request) renderExtras(t template) {
	for _, name := range []string{"tools", "documents", "chat_template", "chat_template_kwargs"} {
		if raw := q.Raw(name); !jsontext.IsNull(raw) {
			t.turn([]byte(name), func() { t.Piece(jsontext.Compact(raw)) })
		}
	}
}

func (t template) message(m []byte) {
	jsontext.EachMember(m, func(key, val []byte) {
		switch string(key) {
		case "role":
		case "content":
			t.content(val)
		default:
			t.Piece(key)
			t.Piece(jsontext.Compact(val))
		}
	})
}

// mediumTokens is the number of tokens of an image, a sound or a video whose text would have more: what a medium costs
// a real engine depends on its pixels or seconds, and never on its bytes.
const mediumTokens = 1500

// medium writes a medium as tokens that depend on all of it, as the KV of real engines does.
func (t template) medium(part []byte) {
	sum := sha256.Sum256(part)
	for i := range uint32(mediumTokens) {
		t.Tokens([]uint32{binary.LittleEndian.Uint32(sum[i%8*4:])%100_000 + i%7})
	}
}

// content writes a string, or a list of parts: the text of text parts, large media, and other parts as JSON.
func (t template) content(raw []byte) {
	switch {
	case jsontext.IsString(raw):
		t.Piece(jsontext.Unquote(raw))
	case jsontext.IsArray(raw):
		jsontext.EachElement(raw, func(part []byte) bool {
			if txt := jsontext.Get(part, "text"); jsontext.IsString(txt) {
				t.Piece(jsontext.Unquote(txt))
			} else if len(part) > 4*mediumTokens {
				t.medium(part)
			} else {
				t.Piece(jsontext.Compact(part))
			}
			return true
		})
	case !jsontext.IsNull(raw):
		t.Piece(jsontext.Compact(raw))
	}
}

func (q *Request) renderResponses(t template) {
	if raw := q.Raw("instructions"); !jsontext.IsNull(raw) {
		t.turn([]byte("system"), func() { t.content(raw) })
	}
	if q.Transcript != nil {
		t.turn([]byte("previous"), func() { t.Piece(q.Transcript) })
	}
	if !jsontext.IsNull(q.Tools) {
		t.turn([]byte("tools"), func() { t.Piece(jsontext.Compact(q.Tools)) })
	}
	input := q.Raw("input")
	if !jsontext.IsArray(input) {
		t.turn([]byte("user"), func() { t.content(input) })
	} else {
		jsontext.EachElement(input, func(item []byte) bool {
			if role := jsontext.Get(item, "role"); jsontext.IsString(role) {
				t.turn(jsontext.Text(role), func() { t.content(jsontext.Get(item, "content")) })
			} else {
				t.turn([]byte("item"), func() { t.Piece(jsontext.Compact(item)) })
			}
			return true
		})
	}
	t.Piece(imStart)
	t.Piece([]byte("assistant"))
	t.Piece(newline)
}

// renderPrompts reads the four forms of /v1/completions' prompt: text, ids, and lists of either.
func (q *Request) renderPrompts(blockSize int, keep bool, raw []byte) (prompts []*engine.Prompt, bad *engine.Error) {
	add := func(raw []byte) bool {
		t := engine.NewTokenizer(blockSize, keep)
		if jsontext.IsString(raw) {
			t.Piece(jsontext.Unquote(raw))
		} else if ids, ok := jsontext.TokenIDs(raw); ok {
			t.Tokens(ids)
		} else {
			bad = engine.Pydantic("string_type", "prompt", "Input should be a valid string", raw)
			return false
		}
		prompts = append(prompts, t.Finish(q.salt))
		return true
	}
	if jsontext.IsArray(raw) && !jsontext.IsNumber(raw[jsontext.Next(raw, 1):]) {
		jsontext.EachElement(raw, add)
		if prompts == nil && bad == nil {
			bad = engine.BadRequest("Either prompt or prompt_embeds must be provided and non-empty.")
		}
		return prompts, bad
	}
	add(raw)
	return prompts, bad
}

// Media returns the hashes of a chat's images, audio and video, in their order, and whether there is text, too.
func (q *Request) Media() (hashes []string, texts bool) {
	jsontext.EachElement(q.Raw("messages"), func(m []byte) bool {
		content := jsontext.Get(m, "content")
		if !jsontext.IsArray(content) {
			texts = texts || jsontext.IsString(content)
			return true
		}
		jsontext.EachElement(content, func(part []byte) bool {
			switch string(jsontext.Text(jsontext.Get(part, "type"))) {
			case "image_url", "audio_url", "video_url", "input_audio":
				sum := sha256.Sum256(jsontext.Compact(part))
				hashes = append(hashes, hex.EncodeToString(sum[:16]))
			default:
				texts = true
			}
			return true
		})
		return true
	})
	return hashes, texts
}
