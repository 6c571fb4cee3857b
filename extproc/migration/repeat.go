package migration

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"strconv"
	"unsafe"
)

// repeat is what the client has of an answer that the next engine writes again from its beginning, because its parsers,
// its grammar or its sampler have to see all of it. The client's part is compared with that, byte by byte, and taken
// out: so the joined answer is the whole answer of the last engine, whatever its parsers do.
type repeat struct {
	on    bool
	seed  int64 // of a request that is sampled and has none; 0: none is set
	parts []part
	// finish is the finish reason that the client has.
	finish []byte
	size   int // of what is kept, in bytes
	// ids are what the present engine calls by other ids than the client, and events is how many events the client has:
	// both of responses, whose events have them.
	ids    []sameID
	events int64
	// scratch has the tool calls of an event that are written anew.
	scratch []byte
}

// kind is what a part of an answer is.
type kind byte

const (
	content kind = iota
	reasoning
	call  // a tool call, by its index
	block // of messages, or an item of responses, by its index
)

// part is a part of an answer that grows by itself: the content, the reasoning, a tool call or a block.
type part struct {
	kind  kind
	index int64
	name  []byte // of a call's function, or what a block or an item is
	id    []byte // of an item, and of its call: JSON strings
	call  []byte
	text  []byte // that the client has: JSON strings without their quotes
	ends  ends
	at    int  // bytes of text that the present engine has written
	begun bool // the present engine has begun it
}

// find returns a part of the answer; nil: the client has nothing of it.
func (r *repeat) find(k kind, index int64) *part {
	for i := range r.parts {
		if p := &r.parts[i]; p.kind == k && p.index == index {
			return p
		}
	}
	return nil
}

// mostParts bounds the parts of an answer. Beyond it is no answer of a model's.
const mostParts = 1024

// begin begins a part that the client does not have; nil: there are too many.
func (r *repeat) begin(k kind, index int64, name []byte) *part {
	if len(r.parts) == mostParts {
		return nil
	}
	r.parts = append(r.parts, part{kind: k, index: index, name: bytes.Clone(name), begun: true})
	r.size += int(unsafe.Sizeof(part{})) + len(name)
	return &r.parts[len(r.parts)-1]
}

// of returns a part, and begins it if the client does not have it.
func (r *repeat) of(k kind) *part {
	p := r.find(k, 0)
	if p == nil {
		p = r.begin(k, 0, nil)
	}
	return p
}

// behind reports whether the present engine has not written all yet that the client has.
func (r *repeat) behind() bool {
	return slices.ContainsFunc(r.parts, func(p part) bool { return !p.begun || p.at < len(p.text) })
}

// take takes the next text of a part, the inside of a JSON string, and keeps it. It returns how much of it the client
// has. same is false if that is another text.
func (r *repeat) take(p *part, text []byte) (has int, same bool) {
	p.begun = true
	has = min(len(p.text)-p.at, len(text))
	if !bytes.Equal(p.text[p.at:p.at+has], text[:has]) {
		return has, false
	}
	p.text = append(p.text, text[has:]...)
	p.at, r.size = p.at+len(text), r.size+len(text)-has
	return has, true
}

// takeOut takes the next text of a part, a string of an event, and plans to take out what the client has of it. fresh:
// it lacks some of it.
func (r *repeat) takeOut(out *edits, part *part, p *parser, at span) (fresh bool, reason Reason) {
	text := p.inside(at)
	has, same := r.take(part, text)
	if !same {
		return false, Different
	}
	if has > 0 {
		out.add(edit{span: span{at.from + 1, at.from + 1 + has}})
	}
	return has < len(text), ""
}

// beginPart takes the beginning of a block of messages, or of an item of responses. fresh: the client does not have it.
func (s *Stream) beginPart(index int64, name []byte) (p *part, fresh bool, reason Reason) {
	switch p = s.repeat.find(block, index); {
	case index < 0, p != nil && p.begun:
		return nil, false, Format
	case p != nil:
		if p.begun = true; !bytes.Equal(p.name, name) {
			return nil, false, Different
		}
		return p, false, ""
	case s.joined && s.repeat.behind():
		return nil, false, Different
	}
	if p = s.repeat.begin(block, index, name); p == nil {
		return nil, false, Format
	}
	return p, true, ""
}

// takePart takes another event of such a part: one that a client has once, or more of its text. fresh: it lacks some of
// it.
func (s *Stream) takePart(out *edits, p *parser, index int64, once ends, text span) (fresh bool, reason Reason) {
	part := s.repeat.find(block, index)
	switch {
	case part == nil || !part.begun, once == 0 && !p.isString(text):
		return false, Format
	case once > 0:
		fresh = part.ends.take(once)
	default:
		fresh, reason = s.repeat.takeOut(out, part, p, text)
		fresh = fresh || !p.hasText(text) && !s.joined
	}
	if fresh && s.joined && s.repeat.behind() {
		return false, Different // the client has more than the engine has written
	}
	return fresh, reason
}

// ends says which events a client has of a part, besides its text: a bit each.
type ends byte

// take adds one, and reports whether the client did not have it.
func (e *ends) take(one ends) bool {
	fresh := *e&one == 0
	*e |= one
	return fresh
}

// compared reports whether events are compared with what the client has, or kept for that.
func (s *Stream) compared() bool { return s.reason == "" || s.joined && s.repeat.behind() }

// again makes the stream ready for an engine that writes the answer from its beginning.
func (s *Stream) again() Reason {
	switch {
	case s.reason == Format:
		return Format
	case s.seen.finish && (s.seen.usage || !s.of.usage):
		return Complete
	case s.reason != "":
		return s.reason
	}
	r := &s.repeat
	r.parts = slices.Clone(r.parts)
	for i := range r.parts {
		p := &r.parts[i]
		p.text, p.at, p.begun = slices.Clip(p.text), 0, false // a copy of the stream may go on with the other ones
	}
	s.in, s.broken, s.rest, r.scratch, r.ids = splitter{}, "", nil, nil, nil
	s.joined, s.proven, s.hushed = s.seen.event, true, s.seen.comment
	return ""
}

// Repeats reports whether the next engine writes the answer from its beginning.
func (s *Stream) Repeats() bool { return s.repeat.on }

// turn makes an answer that was to be continued from its tokens one that is repeated: its first text is not content.
func (s *Stream) turn() bool {
	if s.repeat.on || !s.of.repeatable || s.sent > 0 || s.reason != "" {
		return s.repeat.on
	}
	s.repeat.on, s.marks, s.prompt, s.ids, s.length, s.proven = true, marks{}, nil, nil, 0, true
	return true
}

// writeAgain appends an event of a chat or a completion that another engine would write again.
func (s *Stream) writeAgain(dst, raw []byte, p *parser, e *event) []byte {
	var out edits
	if s.joined {
		s.unify(&out, p, e)
	} else if s.head.id == nil {
		s.keepHead(p, e)
	}
	if s.Cached >= 0 && !p.isNull(e.usage) && p.b[e.usage.from] == '{' {
		q := parser{b: p.b[:e.usage.to], i: e.usage.from}
		s.countUsage(&out, &q)
	}
	out.null(p, e.prompt)
	out.null(p, e.ids)
	was := s.joined && s.repeat.behind()
	fresh, reason := true, Reason("")
	if s.reason == "" || was {
		fresh, reason = s.takeParts(&out, p, e)
	}
	finish := p.text(e.finish)
	ends := !p.isNull(e.finish)
	switch {
	case reason != "":
	case ends && s.seen.finish && !bytes.Equal(finish, s.repeat.finish):
		reason = Different
	case (fresh || ends || e.choices == 0 && !p.isNull(e.usage)) && s.repeat.behind():
		reason = Different // the client has more than the engine has written
	case s.joined && s.seen.role && e.role && (fresh || ends && !s.seen.finish):
		reason = secondRole
	}
	if reason != "" && s.joined {
		s.breakOff(reason, raw)
		return dst
	} else if reason != "" {
		s.give(reason)
	}
	if s.bytes() > s.of.maxBytes {
		s.give(TooLong)
	}
	again := was || s.seen.role && e.role || ends && s.seen.finish || e.choices == 0 && s.seen.usage
	has := s.joined && !fresh && again
	if has && !(ends && !s.seen.finish) || !s.joined && e.empty && !p.isNull(e.ids) && !ends {
		return dst
	}
	if ends && !s.seen.finish {
		s.repeat.finish = bytes.Clone(finish)
	}
	s.noteSeen(p, e)
	return out.apply(dst, raw)
}

// noteSeen notes what the client gets with an event.
func (s *Stream) noteSeen(p *parser, e *event) {
	s.seen.event = true
	s.seen.role = s.seen.role || e.role
	s.seen.finish = s.seen.finish || !p.isNull(e.finish)
	s.seen.usage = s.seen.usage || !p.isNull(e.usage) && e.choices == 0
}

// takeParts takes what an event adds to the answer, and plans to take out what the client has. fresh: it lacks some of
// it.
func (s *Stream) takeParts(out *edits, p *parser, e *event) (fresh bool, reason Reason) {
	for _, x := range [...]struct {
		kind kind
		span span
	}{{reasoning, e.reasoning}, {content, e.text}} {
		if !p.hasText(x.span) {
			continue
		}
		part := s.repeat.of(x.kind)
		if part == nil {
			return false, Format
		}
		more, other := s.repeat.takeOut(out, part, p, x.span)
		if other != "" {
			return false, other
		}
		fresh = fresh || more
	}
	if p.isNull(e.tools) {
		return fresh, ""
	}
	calls, reason := s.takeCalls(out, p, e.tools)
	return fresh || calls, reason
}

// inside returns a JSON string without its quotes.
func (p *parser) inside(s span) []byte { return p.b[s.from+1 : s.to-1] }

// takeCalls does that for the tool calls of an event. The client keeps the ids that it has: they are of the engine that
// began the call.
func (s *Stream) takeCalls(out *edits, p *parser, tools span) (fresh bool, reason Reason) {
	q := parser{b: p.b[:tools.to], i: tools.from}
	again, changed := append(s.repeat.scratch[:0], '['), false
	for more := q.open('['); more; more = q.more(']') {
		from := q.i
		c := q.call()
		whole := span{from, q.i}
		if q.bad || c.unknown {
			return false, Format
		}
		rest, has, reason := s.takeCall(&q, &c)
		if reason != "" {
			return false, reason
		}
		changed = changed || has
		fresh = fresh || !q.isNull(c.name) && !has || len(rest) > 0
		if has && len(rest) == 0 {
			continue
		}
		if len(again) > 1 {
			again = append(again, ',')
		}
		if !has {
			again = append(again, bytes.TrimRight(q.b[whole.from:whole.to], " \t\r\n")...)
			continue
		}
		again = strconv.AppendInt(append(again, `{"index":`...), c.index, 10)
		again = append(append(again, `,"function":{"arguments":"`...), rest...)
		again = append(again, `"}}`...)
	}
	s.repeat.scratch = append(again, ']')
	if changed {
		out.add(edit{span: tools, text: s.repeat.scratch})
	}
	return fresh, ""
}

// takeCall takes a part of a tool call. rest is what the client lacks of its arguments, if it has anything of this
// part.
func (s *Stream) takeCall(q *parser, c *toolCall) (rest []byte, has bool, reason Reason) {
	part := s.repeat.find(call, c.index)
	var args []byte
	if q.hasText(c.args) {
		args = q.inside(c.args)
	}
	switch named := !q.isNull(c.name); {
	case part == nil && !named, part != nil && named && part.begun, !q.isNull(c.args) && !q.isString(c.args):
		return nil, false, Format
	case part == nil:
		if part = s.repeat.begin(call, c.index, q.text(c.name)); part == nil {
			return nil, false, Format
		}
	case named && !bytes.Equal(part.name, q.text(c.name)), !named && !part.begun:
		return nil, false, Different
	default:
		has = named // its id and its name
	}
	n, same := s.repeat.take(part, args)
	if !same {
		return nil, false, Different
	}
	return args[n:], has || n > 0 || s.joined && len(args) == 0 && q.isNull(c.name), ""
}

// toolCall has the places of a tool call's members in an event.
type toolCall struct {
	index      int64
	name, args span
	unknown    bool
}

// call reads an element of tool_calls.
func (p *parser) call() (c toolCall) {
	c.index = -1
	for more := p.open('{'); more; more = p.more('}') {
		switch string(p.key()) {
		case "index":
			c.index = p.index(&c.unknown)
		case "id", "type":
			p.value()
		case "function":
			if p.i < len(p.b) && p.b[p.i] != '{' {
				c.unknown = !p.isNull(p.value()) || c.unknown
				continue
			}
			for more := p.open('{'); more; more = p.more('}') {
				switch string(p.key()) {
				case "name":
					p.once(&c.name)
				case "arguments":
					p.once(&c.args)
				default:
					c.unknown = !p.isNull(p.value()) || c.unknown
				}
			}
		default:
			c.unknown = !p.isNull(p.value()) || c.unknown
		}
	}
	c.unknown = c.unknown || c.index < 0
	return c
}

// newSeed returns a seed for one request.
func newSeed() int64 { return 1 + rand.Int64N(1<<31-1) }
