package openai

import (
	"bytes"
	"errors"
	"strconv"
)

// Rewriter turns an engine's answer into the client's, if the two differ. It is for one answer, and for one goroutine.
type Rewriter interface {
	// Begin appends the events that precede the first event of a stream.
	Begin(dst []byte) []byte
	// Whole appends the client's answer to dst. answer is not streamed.
	Whole(dst, answer []byte) ([]byte, error)
	// Event appends the client's version of one event of a stream, with the empty line behind it.
	Event(dst, event []byte) []byte
}

// Both chains two rewriters: Second rewrites First's output.
type Both struct{ First, Second Rewriter }

// Begin implements [Rewriter].
func (b Both) Begin(dst []byte) []byte { return b.Second.Begin(b.First.Begin(dst)) }

// Whole implements [Rewriter].
func (b Both) Whole(dst, answer []byte) ([]byte, error) {
	first, err := b.First.Whole(nil, answer)
	if err != nil {
		return dst, err
	}
	return b.Second.Whole(dst, first)
}

// Event implements [Rewriter].
func (b Both) Event(dst, event []byte) []byte {
	first := bytes.TrimRight(b.First.Event(nil, event), "\n")
	if len(first) == 0 {
		return dst
	}
	return b.Second.Event(dst, first)
}

// eventObject returns an event's data if it is a JSON object, else nil.
func eventObject(event []byte) []byte {
	data := EventData(nil, event)
	if len(data) == 0 || data[0] != '{' || !valid(data) {
		return nil
	}
	return data
}

// valid reports whether b is one JSON value.
func valid(b []byte) bool {
	end, f := skipValue(b, skipSpace(b, 0), maxNesting)
	return f == noFault && skipSpace(b, end) == len(b)
}

// appendEvent appends an event with other data. Its other fields stay.
func appendEvent(dst, event, data []byte) []byte {
	done := false
	for len(event) > 0 {
		line := event
		if end := bytes.IndexAny(event, "\r\n"); end >= 0 {
			line, event = event[:end], event[end+1:]
		} else {
			event = nil
		}
		switch {
		case len(line) == 0:
			continue
		case !bytes.HasPrefix(line, []byte("data:")):
			dst = append(dst, line...)
		case done:
			continue
		default:
			dst, done = append(append(dst, "data: "...), data...), true
		}
		dst = append(dst, '\n')
	}
	return append(dst, '\n')
}

// CachedTokens puts prefill's counts of cached tokens into the answer: those found in its cache and those written to
// it. Decode's own counts are misleading: it counts the KV that came from prefill, mostly all of the prompt, as
// cached. An answer without such counts gets none.
type CachedTokens struct {
	N       int64 // found
	Written int64 // written to the cache; -1: prefill reported none, and decode's count stays
}

// Begin implements [Rewriter].
func (CachedTokens) Begin(dst []byte) []byte { return dst }

// Whole implements [Rewriter].
func (c CachedTokens) Whole(dst, answer []byte) ([]byte, error) {
	if !valid(answer) {
		return dst, errors.New("decode's answer is not JSON")
	}
	return c.appendObject(dst, answer[skipSpace(answer, 0):]), nil
}

// Event implements [Rewriter].
func (c CachedTokens) Event(dst, event []byte) []byte {
	data := eventObject(event)
	if data == nil || !countsCached(data) {
		return append(append(dst, event...), "\n\n"...)
	}
	return appendEvent(dst, event, c.appendObject(nil, data))
}

// appendObject appends an object with the counts in its usage, or in the usage of its response member
// (response.completed).
func (c CachedTokens) appendObject(dst, object []byte) []byte {
	if len(object) == 0 || object[0] != '{' {
		return append(dst, object...)
	}
	return appendMembers(dst, object, func(key string, value []byte) []byte {
		switch key {
		case "response", "message", "usage", "prompt_tokens_details", "input_tokens_details":
			if usage, ok := c.messagesUsage(value); ok && key == "usage" {
				return usage
			}
			return c.appendObject(nil, value)
		case "cached_tokens":
			return replaceCount(value, c.N)
		case "created_cache_tokens", "cache_write_tokens":
			return replaceCount(value, c.Written)
		}
		return value
	})
}

// messagesUsage rewrites the usage of /v1/messages. Its input_tokens counts only tokens that were neither found in the
// cache nor written to it. ok is false for the usage of other APIs.
func (c CachedTokens) messagesUsage(usage []byte) (out []byte, ok bool) {
	if len(usage) == 0 || usage[0] != '{' || !bytes.Contains(usage, []byte(`"cache_read_input_tokens"`)) {
		return nil, false
	}
	total, written := int64(0), int64(0)
	for key, value := range pairs(usage) {
		n := count(value)
		switch string(key) {
		case "input_tokens", "cache_read_input_tokens":
			total += max(n, 0)
		case "cache_creation_input_tokens":
			total += max(n, 0)
			if written = n; n >= 0 && c.Written >= 0 {
				written = c.Written
			}
		}
	}
	return appendMembers(nil, usage, func(key string, value []byte) []byte {
		switch key {
		case "input_tokens":
			return replaceCount(value, max(total-c.N-max(written, 0), 0))
		case "cache_read_input_tokens":
			return replaceCount(value, c.N)
		case "cache_creation_input_tokens":
			return replaceCount(value, c.Written)
		}
		return value
	}), true
}

// replaceCount returns n as JSON text in place of a count. The value stays if it is not a number or n is unknown.
func replaceCount(value []byte, n int64) []byte {
	if _, ok := integer(value); !ok || n < 0 {
		return value
	}
	return strconv.AppendInt(nil, n, 10)
}

// InputLogprobs inserts prefill's log probabilities of the prompt in front of decode's, in answers to SGLang's
// /generate: meta_info.input_token_logprobs of the answer, of each of a batch, and of each event (sgl-project/sglang,
// srt/disaggregation/mini_lb.py, 0.4.9.post6).
type InputLogprobs struct {
	Prefill []byte // of [ReadInputLogprobs]; nil: unknown
}

// inputLogprobs is the member's name.
const inputLogprobs = "input_token_logprobs"

// ReadInputLogprobs returns the log probabilities of the prompt in prefill's answer: a list with one list for each
// answer of a batch; nil if there are none.
func ReadInputLogprobs(answer []byte) []byte {
	if !bytes.Contains(answer, []byte(inputLogprobs)) || !valid(answer) {
		return nil
	}
	out, found := []byte{'['}, false
	add := func(one []byte) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		list := metaLogprobs(one)
		found = found || list != nil
		if list == nil {
			list = []byte("[]")
		}
		out = append(out, list...)
	}
	answer = answer[skipSpace(answer, 0):]
	if answer[0] == '[' {
		for one := range elements(answer) {
			add(one)
		}
	} else {
		add(answer)
	}
	if !found {
		return nil
	}
	return append(out, ']')
}

// metaLogprobs returns meta_info.input_token_logprobs of one answer, nil if it is not a list.
func metaLogprobs(answer []byte) (list []byte) {
	for key, meta := range pairs(answer) {
		if string(key) != "meta_info" {
			continue
		}
		for key, value := range pairs(meta) {
			if string(key) == inputLogprobs && value[0] == '[' {
				list = value
			}
		}
	}
	return list
}

// Begin implements [Rewriter].
func (InputLogprobs) Begin(dst []byte) []byte { return dst }

// Whole implements [Rewriter].
func (l InputLogprobs) Whole(dst, answer []byte) ([]byte, error) {
	if !valid(answer) {
		return dst, errors.New("decode's answer is not JSON")
	}
	answer = answer[skipSpace(answer, 0):]
	if answer[0] != '[' {
		return l.appendAnswer(dst, answer, 0), nil
	}
	dst = append(dst, '[')
	i := 0
	for one := range elements(answer) {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = l.appendAnswer(dst, one, i)
		i++
	}
	return append(dst, ']'), nil
}

// Event implements [Rewriter]. Events of a batch have the index of their answer.
func (l InputLogprobs) Event(dst, event []byte) []byte {
	data := eventObject(event)
	if data == nil {
		return append(append(dst, event...), "\n\n"...)
	}
	index := int64(0)
	for key, value := range pairs(data) {
		if string(key) == "index" {
			index, _ = integer(value)
		}
	}
	return appendEvent(dst, event, l.appendAnswer(nil, data, int(index)))
}

// appendAnswer appends answer i with the lists of both engines joined.
func (l InputLogprobs) appendAnswer(dst, answer []byte, i int) []byte {
	prefill := l.of(i)
	if prefill == nil || answer[0] != '{' {
		return append(dst, answer...)
	}
	return appendMembers(dst, answer, func(key string, value []byte) []byte {
		if key != "meta_info" || value[0] != '{' {
			return value
		}
		there := false
		meta := appendMembers(nil, value, func(key string, value []byte) []byte {
			if key != inputLogprobs {
				return value
			}
			there = true
			return joinLists(prefill, value)
		})
		if !there {
			meta = appendMember(meta[:len(meta)-1], inputLogprobs, prefill)
		}
		return meta
	})
}

// of returns prefill's list for answer i.
func (l InputLogprobs) of(i int) []byte {
	n := 0
	for list := range elements(l.Prefill) {
		if n == i {
			return list
		}
		n++
	}
	return nil
}

// appendMember appends a member to an object without its closing brace.
func appendMember(object []byte, key string, value []byte) []byte {
	if len(object) > 1 {
		object = append(object, ',')
	}
	object = append(append(append(object, '"'), key...), `":`...)
	return append(append(object, value...), '}')
}

// joinLists joins two JSON lists. Anything but a list counts as empty.
func joinLists(a, b []byte) []byte {
	empty := func(list []byte) bool { return len(list) < 2 || list[0] != '[' || list[skipSpace(list, 1)] == ']' }
	switch {
	case empty(b):
		return a
	case empty(a):
		return b
	}
	out := append(append([]byte(nil), a[:len(a)-1]...), ',')
	return append(out, b[1:]...)
}
