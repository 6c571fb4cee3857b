package migration

import (
	"bytes"

	"tandem/extproc/openai"
)

// message is an event of /v1/messages (vLLM 0.32.0, entrypoints/anthropic/serving.py).
type message struct {
	error   event  // the error that it reports
	typ     string // what it is
	index   int64  // of the block
	block   span   // what begins
	name    span   // of the tool that is called
	is      string // what the block or the delta is
	text    span
	signed  bool // a delta with the signature of reasoning
	reason  span // why the answer ends
	unknown bool
}

// What else a client has of a block, as bits of [part.ends].
const (
	blockSigned = 1 << iota
	blockStopped
)

// message reads an event's data, which begins at p.i.
func (p *parser) message() (m message, ok bool) {
	m.index = -1
	for more := p.open('{'); more; more = p.more('}') {
		switch string(p.key()) {
		case "type":
			m.typ = p.word()
		case "index":
			m.index = p.index(&m.unknown)
		case "content_block":
			p.once(&m.block)
			q := parser{b: p.b[:m.block.to], i: m.block.from}
			q.content(&m)
			p.bad = p.bad || q.bad
		case "delta":
			p.content(&m)
		case "message", "usage":
			p.value()
		case "error":
			p.failure(&m.error)
		default:
			m.unknown = !p.isNull(p.value()) || m.unknown
		}
	}
	return m, !p.bad && p.i == len(p.b)
}

// content reads a block as it begins, or what is added to one.
func (p *parser) content(m *message) {
	for more := p.open('{'); more; more = p.more('}') {
		switch key := string(p.key()); key {
		case "type":
			m.is = p.word()
		case "name":
			p.once(&m.name)
		case "text", "thinking", "partial_json":
			p.once(&m.text)
		case "signature":
			m.signed = !p.isNull(p.value())
		case "stop_reason":
			p.once(&m.reason)
		case "id", "input", "stop_sequence", "container":
			p.value()
		default:
			m.unknown = !p.isNull(p.value()) || m.unknown
		}
	}
}

// word reads a string that says what something is.
func (p *parser) word() string {
	s := p.value()
	if p.bad || !p.isString(s) {
		return ""
	}
	return string(p.inside(s))
}

// passMessage appends the client's version of an event of messages. data is its place in raw.
func (s *Stream) passMessage(dst, raw []byte, data span) []byte {
	p := parser{b: raw[:max(data.to, data.from)], i: data.from}
	m, valid := p.message()
	var out edits
	fresh, reason := false, Format
	switch {
	case !valid:
	case m.error.failed || m.typ == "error":
		reason = Failed
	case !m.unknown:
		fresh, reason = s.takeMessage(&out, &p, &m)
	}
	dst, passes := s.settle(dst, raw, valid, reason)
	if !passes || s.joined && !fresh {
		return dst
	}
	s.seen.event = true
	if s.Cached >= 0 && (m.typ == "message_start" || m.typ == "message_delta") { // whose usage has prefill's counts
		return openai.CachedTokens{N: s.Cached, Written: -1}.Event(dst, bytes.TrimRight(raw, "\r\n"))
	}
	return out.apply(dst, raw)
}

// settle deals with the reason for which an event of messages or of responses cannot be followed, if it has one: a
// joined answer, or one whose engine has failed, is broken off; any other one is given up, and passes.
func (s *Stream) settle(dst, raw []byte, valid bool, reason Reason) (_ []byte, passes bool) {
	switch {
	case reason != "" && s.joined, reason == Failed && s.reason == "":
		s.breakOff(reason, raw)
		return dst, false
	case reason != "" && !valid:
		return s.unread(dst, raw, reason), false
	case reason != "":
		s.give(reason)
	case s.bytes() > s.of.maxBytes:
		s.give(TooLong)
	}
	s.hushed = false
	return dst, true
}

// takeMessage takes what an event adds to the answer, and plans to take out what the client has. fresh: it lacks some
// of it, or all.
func (s *Stream) takeMessage(out *edits, p *parser, m *message) (fresh bool, reason Reason) {
	r := &s.repeat
	switch m.typ {
	case "message_start":
		fresh = !s.seen.role
		s.seen.role = true
		return fresh, ""
	case "ping":
		return !s.joined, ""
	case "message_delta":
		switch fresh = !s.seen.finish; {
		case s.joined && r.behind(), !fresh && !bytes.Equal(p.text(m.reason), r.finish):
			return false, Different
		case fresh:
			s.seen.finish, s.seen.usage, r.finish = true, true, bytes.Clone(p.text(m.reason))
		}
		return fresh, ""
	case "message_stop":
		if s.following() && !s.seen.finish {
			return false, Failed
		}
		s.seen.done = true
		return true, ""
	case "content_block_start", "content_block_delta", "content_block_stop":
	default:
		return false, Format
	}
	switch {
	case !s.compared():
		return true, ""
	case m.typ == "content_block_stop":
		return s.takePart(out, p, m.index, blockStopped, span{})
	case m.typ == "content_block_delta" && m.is == "signature_delta" && m.signed:
		return s.takePart(out, p, m.index, blockSigned, span{})
	case m.typ == "content_block_delta":
		return s.takePart(out, p, m.index, 0, m.text)
	case p.hasText(m.text): // a block that begins with a text is not vLLM's
		return false, Format
	}
	_, fresh, reason = s.beginPart(m.index, append([]byte(m.is+" "), p.text(m.name)...))
	return fresh, reason
}
