package migration

import (
	"bytes"
	"slices"

	"tandem/extproc/openai"
)

// output is an event of /v1/responses (vLLM 0.32.0, entrypoints/openai/responses/serving.py, streaming_events.py).
type output struct {
	error    event  // the error that it reports
	typ      string // what it is
	sequence span   // its number in the stream
	index    int64  // of the item
	content  int64  // of the part of the item
	delta    span
	item     item
	response item // the answer as a whole
	unknown  bool
}

// item is an item of the answer, or the answer itself.
type item struct {
	kind                               string
	id, call, name, namespace, created span
	filled                             bool // it has a text
}

// What else a client has of an item, as bits of [part.ends].
const (
	itemBegun = 1 << iota // its part has begun
	itemText              // the text of its part, as a whole
	itemPart              // its part, as a whole
	itemDone
)

// output reads an event's data, which begins at p.i.
func (p *parser) output() (o output, ok bool) {
	o.index = -1
	for more := p.open('{'); more; more = p.more('}') {
		switch string(p.key()) {
		case "type":
			o.typ = p.word()
		case "sequence_number":
			p.once(&o.sequence)
		case "output_index":
			o.index = p.index(&o.unknown)
		case "content_index":
			o.content = p.index(&o.unknown)
		case "delta":
			p.once(&o.delta)
		case "item":
			p.item(&o.item)
		case "response":
			p.item(&o.response)
		case "error":
			p.failure(&o.error)
		case "item_id", "part", "text", "arguments", "input", "name", "logprobs":
			p.value()
		default:
			o.unknown = !p.isNull(p.value()) || o.unknown
		}
	}
	return o, !p.bad && p.i == len(p.b)
}

func (p *parser) item(x *item) {
	for more := p.open('{'); more; more = p.more('}') {
		switch key := string(p.key()); key {
		case "type":
			x.kind = p.word()
		case "id":
			p.once(&x.id)
		case "call_id":
			p.once(&x.call)
		case "name":
			p.once(&x.name)
		case "namespace":
			p.once(&x.namespace)
		case "created_at":
			p.once(&x.created)
		case "arguments", "input":
			x.filled = p.hasText(p.value()) || x.filled
		case "content":
			v := p.value()
			x.filled = !p.isNull(v) && string(p.text(v)) != "[]" || x.filled
		default:
			p.value()
		}
	}
}

// passOutput appends the client's version of an event of responses. data is its place in raw.
func (s *Stream) passOutput(dst, raw []byte, data span) []byte {
	p := parser{b: raw[:max(data.to, data.from)], i: data.from}
	o, valid := p.output()
	var out edits
	fresh, reason := false, Format
	switch {
	case !valid:
	case o.error.failed || o.typ == "error" || o.typ == "response.failed":
		reason = Failed
	case !o.unknown && !p.isNull(o.sequence):
		fresh, reason = s.takeOutput(&out, &p, &o)
	}
	dst, passes := s.settle(dst, raw, valid, reason)
	if !passes || s.joined && !fresh {
		return dst
	}
	if s.joined {
		out.number(o.sequence, s.repeat.events)
	}
	s.seen.event = true
	s.repeat.events++
	from := len(dst)
	dst = out.apply(dst, raw)
	for _, id := range s.repeat.ids {
		dst = append(dst[:from], bytes.ReplaceAll(dst[from:], id.engine, id.client)...)
	}
	if s.Cached >= 0 && s.seen.done { // its usage has prefill's count
		event := bytes.TrimRight(bytes.Clone(dst[from:]), "\r\n")
		dst = openai.CachedTokens{N: s.Cached, Written: -1}.Event(dst[:from], event)
	}
	return dst
}

// takeOutput takes what an event adds to the answer, and plans to take out what the client has. fresh: it lacks some
// of it, or all.
func (s *Stream) takeOutput(out *edits, p *parser, o *output) (fresh bool, reason Reason) {
	r := &s.repeat
	if s.joined {
		out.set(p, o.response.created, s.head.created)
	}
	switch o.typ {
	case "response.created":
		if fresh = !s.seen.role; fresh {
			s.head = head{id: bytes.Clone(p.quoted(o.response.id)), created: bytes.Clone(p.text(o.response.created))}
		}
		r.rename(p.quoted(o.response.id), s.head.id)
		s.seen.role = true
		return fresh, ""
	case "response.in_progress":
		fresh = !s.seen.progress
		s.seen.progress = true
		return fresh, ""
	case "response.completed", "response.incomplete":
		if s.joined && r.behind() {
			return false, Different
		}
		s.seen.finish, s.seen.usage, s.seen.done = true, true, true
		return true, ""
	}
	once, known := outputEvents[o.typ]
	switch {
	case !s.compared():
		return true, ""
	case o.content != 0: // no item of vLLM's has two parts
		return false, Format
	case o.typ == "response.output_item.added":
		return s.beginItem(p, o)
	case !known:
		return false, Format
	}
	return s.takePart(out, p, o.index, once, o.delta)
}

// outputEvents are the events of an item behind its beginning: those that a client has once, and its text (0).
var outputEvents = map[string]ends{
	"response.content_part.added":            itemBegun,
	"response.output_text.delta":             0,
	"response.reasoning_text.delta":          0,
	"response.function_call_arguments.delta": 0,
	"response.custom_tool_call_input.delta":  0,
	"response.output_text.done":              itemText,
	"response.reasoning_text.done":           itemText,
	"response.function_call_arguments.done":  itemText,
	"response.custom_tool_call_input.done":   itemText,
	"response.content_part.done":             itemPart,
	"response.output_item.done":              itemDone,
}

// beginItem takes the beginning of an item.
func (s *Stream) beginItem(p *parser, o *output) (fresh bool, reason Reason) {
	x := &o.item
	switch x.kind {
	case "message", "reasoning", "function_call", "custom_tool_call":
	default: // what the engine itself does, such as a search
		return false, Format
	}
	if x.filled {
		return false, Format
	}
	name := slices.Concat([]byte(x.kind+" "), p.text(x.namespace), []byte(" "), p.text(x.name))
	part, fresh, reason := s.beginPart(o.index, name)
	switch {
	case reason != "":
	case fresh:
		part.id, part.call = bytes.Clone(p.quoted(x.id)), bytes.Clone(p.quoted(x.call))
		s.repeat.size += len(part.id) + len(part.call)
	default:
		s.repeat.rename(p.quoted(x.id), part.id)
		s.repeat.rename(p.quoted(x.call), part.call)
	}
	return fresh, reason
}

// sameID is the client's id of something that the present engine calls by another one. Both are JSON strings with their
// quotes: no text of an answer has these, for its quotes are escaped.
type sameID struct{ engine, client []byte }

// rename notes the client's id of something.
func (r *repeat) rename(engine, client []byte) {
	if len(engine) > 0 && len(client) > 0 && !bytes.Equal(engine, client) {
		r.ids = append(r.ids, sameID{bytes.Clone(engine), client})
	}
}

// quoted returns a string with its quotes; nil: it is none.
func (p *parser) quoted(s span) []byte {
	if !p.isString(s) {
		return nil
	}
	return p.text(s)
}
