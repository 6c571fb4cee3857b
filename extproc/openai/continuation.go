package openai

import (
	"errors"
	"fmt"
	"strconv"
)

// Continuation joins the answers of two engines into one answer to chat or completions: prefill's first token, and the
// rest that decode wrote as a completion of the prompt with that token at its end. The client gets an answer as one
// engine would write it: one id, the length of its own prompt, and in a chat a message or deltas in place of decode's
// text. Members that neither API has, and those meant for Tandem (token ids of the prompt, KV parameters), are left
// out; all others keep their text.
//
// It is for one answer, and for one goroutine.
type Continuation struct {
	Chat    bool   // the client asked for a chat; else for a completion
	ID      []byte // of the answer, as JSON text
	Created []byte // likewise
	Model   []byte // likewise; nil: absent
	Text    []byte // prefill's token: a JSON string, with its quotes
	Cached  int64  // tokens of the prompt that prefill found in its cache; -1: unknown

	d document
}

// errNotCompletion means that decode's answer is not a completion.
var errNotCompletion = errors.New("decode did not answer a completion")

// Whole appends the client's answer to dst. answer is decode's, which must be a completion.
func (c *Continuation) Whole(dst, answer []byte) ([]byte, error) {
	if err := c.d.scan(answer, Limits{}); err != nil {
		return dst, fmt.Errorf("reading decode's answer: %w", err)
	}
	if !c.isCompletion() {
		return dst, errNotCompletion
	}
	if c.Chat {
		return c.appendAnswer(dst, `"chat.completion"`, c.appendMessage), nil
	}
	return c.appendAnswer(dst, `"text_completion"`, c.appendText), nil
}

// Begin appends the events that precede decode's stream: prefill's token.
func (c *Continuation) Begin(dst []byte) []byte {
	if c.Chat {
		return c.appendFirst(dst, `"chat.completion.chunk"`)
	}
	return c.appendFirst(dst, `"text_completion"`)
}

// Event appends to dst the client's version of an event of decode's stream, with the empty line behind it. An event
// that is not a chunk of a completion, such as an error or [DONE], is copied unchanged.
func (c *Continuation) Event(dst, event []byte) []byte {
	data := EventData(nil, event)
	if len(data) == 0 || data[0] != '{' || c.d.scan(data, Limits{}) != nil || !c.isCompletion() {
		return append(append(dst, event...), "\n\n"...)
	}
	object, choice := `"text_completion"`, c.appendSame
	if c.Chat {
		object, choice = `"chat.completion.chunk"`, c.appendDelta
	}
	return append(c.appendAnswer(append(dst, "data: "...), object, choice), "\n\n"...)
}

// isCompletion reports whether the scanned document is a completion, or a chunk of one.
func (c *Continuation) isCompletion() bool {
	choices := c.d.topValue("choices")
	return len(choices) > 0 && choices[0] == '[' && string(c.d.topValue("object")) == `"text_completion"`
}

// appendFirst appends chunks with prefill's token. The role comes first, as in vLLM's chats.
func (c *Continuation) appendFirst(dst []byte, object string) []byte {
	chunk := func(choice string, text []byte, rest string) {
		dst = c.appendHead(append(dst, "data: "...), object)
		if c.Model != nil {
			dst = append(append(dst, `,"model":`...), c.Model...)
		}
		dst = append(append(dst, `,"choices":[{"index":0,`...), choice...)
		dst = append(append(append(dst, text...), rest...), `,"logprobs":null,"finish_reason":null}]}`+"\n\n"...)
	}
	if !c.Chat {
		chunk(`"text":`, c.Text, "")
		return dst
	}
	chunk(`"delta":{"role":"assistant","content":`, []byte(`""`), "}")
	chunk(`"delta":{"content":`, c.Text, "}")
	return dst
}

// appendHead begins an answer or a chunk.
func (c *Continuation) appendHead(dst []byte, object string) []byte {
	dst = append(append(append(dst, `{"id":`...), c.ID...), `,"object":`...)
	dst = append(append(dst, object...), `,"created":`...)
	return append(dst, c.Created...)
}

// appendAnswer appends the scanned document with the head of the client's answer. choice writes each choice.
func (c *Continuation) appendAnswer(dst []byte, object string, choice func(dst, choice []byte) []byte) []byte {
	dst = c.appendHead(dst, object)
	for i := range c.d.members[scopeTop] {
		m := &c.d.members[scopeTop][i]
		value := c.d.text(m)
		switch string(c.d.key(m)) {
		case "id", "object", "created", "kv_transfer_params", "ec_transfer_params", "prompt_token_ids":
			continue
		case "choices":
			dst = append(dst, `,"choices":[`...)
			n := 0
			for one := range elements(value) {
				if n++; n > 1 {
					dst = append(dst, ',')
				}
				dst = choice(dst, one)
			}
			dst = append(dst, ']')
			continue
		}
		dst = append(append(append(dst, ','), c.d.body[m.key:m.keyEnd]...), ':')
		if string(c.d.key(m)) == "usage" {
			dst = c.appendUsage(dst, value)
		} else {
			dst = append(dst, value...)
		}
	}
	return append(dst, '}')
}

// appendSame appends a completion's chunk without the members that are not for the client.
func (c *Continuation) appendSame(dst, choice []byte) []byte {
	return appendChoice(dst, choice,
		func(dst, text []byte) []byte { return append(append(dst, `"text":`...), text...) })
}

// appendText appends a completion's choice, whose text is prefill's token and decode's text.
func (c *Continuation) appendText(dst, choice []byte) []byte {
	return appendChoice(dst, choice,
		func(dst, text []byte) []byte { return c.appendJoined(append(dst, `"text":`...), text) })
}

// appendMessage appends a chat's choice.
func (c *Continuation) appendMessage(dst, choice []byte) []byte {
	return appendChoice(dst, choice, func(dst, text []byte) []byte {
		return append(c.appendJoined(append(dst, `"message":{"role":"assistant","content":`...), text), '}')
	})
}

// appendDelta appends a choice of a chat's chunk.
func (c *Continuation) appendDelta(dst, choice []byte) []byte {
	return appendChoice(dst, choice, func(dst, text []byte) []byte {
		return append(append(append(dst, `"delta":{"content":`...), text...), '}')
	})
}

// appendJoined appends prefill's token and decode's text as one JSON string.
func (c *Continuation) appendJoined(dst, text []byte) []byte {
	if len(text) < 2 || text[0] != '"' {
		return append(dst, c.Text...)
	}
	return append(append(dst, c.Text[:len(c.Text)-1]...), text[1:]...)
}

// appendChoice appends a choice of a completion; text writes its text.
func appendChoice(dst, choice []byte, text func(dst, text []byte) []byte) []byte {
	dst = append(dst, '{')
	first := true
	for key, value := range pairs(choice) {
		switch string(key) {
		case "prompt_token_ids", "prompt_logprobs", "token_ids", "disaggregated_params":
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		if string(key) == "text" {
			dst = text(dst, value)
			continue
		}
		dst = append(append(AppendQuoted(dst, key), ':'), value...)
	}
	return append(dst, '}')
}

// appendUsage appends usage as a single engine would count it: prefill's token counts as a completion token, and not
// as a prompt token.
func (c *Continuation) appendUsage(dst, usage []byte) []byte {
	if len(usage) == 0 || usage[0] != '{' {
		return append(dst, usage...)
	}
	return appendMembers(dst, usage, func(key string, value []byte) []byte {
		n, ok := integer(value)
		switch {
		case key == "prompt_tokens" && ok:
			return strconv.AppendInt(nil, n-1, 10)
		case key == "completion_tokens" && ok:
			return strconv.AppendInt(nil, n+1, 10)
		case key == "prompt_tokens_details" && c.Cached >= 0 && value[0] == '{':
			return appendMembers(nil, value, func(key string, value []byte) []byte {
				if key == "cached_tokens" {
					return strconv.AppendInt(nil, c.Cached, 10)
				}
				return value
			})
		}
		return value
	})
}

// appendMembers appends an object whose members have the values that change returns; nil: the member goes.
func appendMembers(dst, object []byte, change func(key string, value []byte) []byte) []byte {
	dst = append(dst, '{')
	first := true
	for key, value := range pairs(object) {
		if value = change(string(key), value); value == nil {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(append(AppendQuoted(dst, key), ':'), value...)
	}
	return append(dst, '}')
}
