package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// ErrNotStreamable means that an answer cannot be turned into a stream.
var ErrNotStreamable = errors.New("not an answer that can be streamed")

// WantsUsage reports whether a streaming client wants usage at the stream's end (stream_options.include_usage).
func (r *Request) WantsUsage() bool {
	for key, value := range pairs(r.Raw(FieldStreamOptions)) {
		if string(key) == "include_usage" {
			return isTrue(value)
		}
	}
	return false
}

// OneShot turns an engine's complete answer to chat or completions into the stream that a client asked for: one event
// with everything, one with usage if requested, and the end. Members keep their text and order. Tool calls are refused
// ([ErrNotStreamable]): in a stream they need an index that the answer does not have.
func OneShot(answer []byte, usage bool) ([]byte, error) {
	if bytes.ContainsAny(answer, "\n\r") { // between its tokens; an event must be one line
		var line bytes.Buffer
		if err := json.Compact(&line, answer); err != nil {
			return nil, fmt.Errorf("reading an engine's answer: %w", err)
		}
		answer = line.Bytes()
	}
	var d document
	if err := d.scan(answer, Limits{}); err != nil {
		return nil, fmt.Errorf("reading an engine's answer: %w", err)
	}
	head := []byte("data: {") // of every event: all members but choices and usage
	chat := false
	var choices, counted []byte
	for i := range d.members[scopeTop] {
		m := &d.members[scopeTop][i]
		value := d.text(m)
		switch string(d.key(m)) {
		case "choices":
			choices = value
			continue
		case "usage":
			counted = value
			continue
		case "object":
			if chat = string(value) == `"chat.completion"`; chat {
				value = []byte(`"chat.completion.chunk"`)
			} else if string(value) != `"text_completion"` {
				return nil, fmt.Errorf("%w: it is a %.40q", ErrNotStreamable, value)
			}
		}
		head = appendPair(head, d.body[m.key:m.keyEnd], value)
	}
	out, err := appendChunkChoices(append(append([]byte(nil), head...), `"choices":[`...), choices, chat)
	if err != nil {
		return nil, err
	}
	out = append(out, "]}\n\n"...)
	if usage && present(counted) {
		out = append(append(append(append(out, head...), `"choices":[],"usage":`...), counted...), "}\n\n"...)
	}
	return append(out, "data: [DONE]\n\n"...), nil
}

// appendPair appends a member and a comma; key has its quotes.
func appendPair(dst, key, value []byte) []byte {
	dst = append(append(dst, key...), ':')
	return append(append(dst, value...), ',')
}

// appendChunkChoices appends choices in the form of a chunk: a chat's message becomes a delta.
func appendChunkChoices(dst, choices []byte, chat bool) ([]byte, error) {
	n := 0
	if !present(choices) || choices[0] != '[' {
		return nil, fmt.Errorf("%w: it has no choices", ErrNotStreamable)
	}
	for choice := range elements(choices) {
		if n++; n > 1 {
			dst = append(dst, ',')
		}
		if choice[0] != '{' {
			return nil, fmt.Errorf("%w: a choice that is no object", ErrNotStreamable)
		}
		dst = append(dst, '{')
		for key, value := range pairs(choice) {
			if chat && string(key) == "message" {
				if key = []byte("delta"); callsTools(value) {
					return nil, fmt.Errorf("%w: it calls tools", ErrNotStreamable)
				}
			}
			quoted, _ := json.Marshal(string(key)) // pairs unescapes it
			dst = appendPair(dst, quoted, value)
		}
		if dst[len(dst)-1] == ',' {
			dst = dst[:len(dst)-1]
		}
		dst = append(dst, '}')
	}
	if n == 0 {
		return nil, fmt.Errorf("%w: it has no choices", ErrNotStreamable)
	}
	return dst, nil
}

func callsTools(message []byte) bool {
	for key, value := range pairs(message) {
		if string(key) == "tool_calls" && present(value) {
			for range elements(value) {
				return true
			}
		}
	}
	return false
}
