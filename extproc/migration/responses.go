package migration

import (
	"bytes"
	"slices"

	"tandem/extproc/openai"
)

// output is an event of /v1/responses (vLLM 0.32.0, entrypoints/openai/responses/serving.py, streaming_events.py).
type output struct {
	error    event  // what it says of an error
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
			o.index = p.place(&o)
		case "content_index":
			o.content = p.place(&o)
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

// place reads the index of an item or of a part.
func (p *parser) place(o *output) int64 {
	n, err := p.number(p.value())
	o.unknown = o.unknown || err != nil
	return n
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
	if s.reason != "" && !(s.joined && r.behind()) {
		return true, ""
	}
	part := r.find(block, o.index)
	switch {
	case o.index < 0 || o.content != 0:
		return false, Format
	case o.typ == "response.output_item.added":
		return s.beginItem(part, p, o)
	case part == nil || !part.begun:
		return false, Format
	}
	if fresh, reason = s.takeItem(out, part, p, o); fresh && s.joined && r.behind() {
		return false, Different
	}
	return fresh, reason
}

// beginItem takes the beginning of an item, which part is if the client has that.
func (s *Stream) beginItem(part *part, p *parser, o *output) (fresh bool, reason Reason) {
	x := &o.item
	switch x.kind {
	case "message", "reasoning", "function_call", "custom_tool_call":
	default: // what the engine itself does, such as a search
		return false, Format
	}
	name := slices.Concat([]byte(x.kind+" "), p.text(x.namespace), []byte(" "), p.text(x.name))
	switch {
	case x.filled, part != nil && part.begun:
		return false, Format
	case part != nil:
		part.begun = true
		if !bytes.Equal(part.name, name) {
			return false, Different
		}
		s.repeat.rename(p.quoted(x.id), part.id)
		s.repeat.rename(p.quoted(x.call), part.call)
		return false, ""
	case s.joined && s.repeat.behind():
		return false, Different
	}
	if part = s.repeat.begin(block, o.index, name); part == nil {
		return false, Format
	}
	part.id, part.call = bytes.Clone(p.quoted(x.id)), bytes.Clone(p.quoted(x.call))
	s.repeat.size += len(part.id) + len(part.call)
	return true, ""
}

// takeItem takes what is added to an item, or one of the events of its end.
func (s *Stream) takeItem(out *edits, part *part, p *parser, o *output) (fresh bool, reason Reason) {
	switch o.typ {
	case "response.content_part.added":
		return part.ends.take(itemBegun), ""
	case "response.output_text.done", "response.reasoning_text.done", "response.function_call_arguments.done",
		"response.custom_tool_call_input.done":
		return part.ends.take(itemText), ""
	case "response.content_part.done":
		return part.ends.take(itemPart), ""
	case "response.output_item.done":
		return part.ends.take(itemDone), ""
	case "response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta",
		"response.custom_tool_call_input.delta":
	default:
		return false, Format
	}
	if !p.isString(o.delta) {
		return false, Format
	}
	fresh, reason = s.repeat.takeOut(out, part, p, o.delta)
	return fresh || !p.hasText(o.delta) && !s.joined, reason
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
