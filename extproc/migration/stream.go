package migration

import (
	"bytes"
	"cmp"
	"slices"

	"tandem/extproc/openai"
)

// Stream is one answer on its way from an engine to the client, and what is needed to continue it on another engine.
// It is for one answer, and for one goroutine.
type Stream struct {
	// Cached is the number of the prompt's tokens that the first prefill found in its cache, for usage; -1: unknown, or
	// not wanted, then the engine's own count stays.
	Cached int64

	of     terms
	in     splitter
	head   head
	seen   seen
	prompt []uint32 // nil: not known, or not kept any more
	length int      // of the prompt, in tokens
	ids    []uint32 // of the answer. Those from tokens on are of a previous attempt, and should be generated again
	base   int      // tokens of the answer that the present attempt got with its prompt
	tokens int      // tokens of the answer up to the present event
	chars  int      // characters that the present attempt has written, with those of its base
	sent   int      // characters that the client has
	shown  int      // tokens of the answer whose events the client has
	marks  marks
	repeat repeat
	joined bool   // the client has a part of the answer from an attempt before
	proven bool   // the present attempt, which continues it, had the prompt that it was asked with
	hushed bool   // comments of the present attempt are left out, until its first event
	reason Reason // why it cannot be continued
	broken Reason // why the present attempt is not followed any more
	rest   []byte // what a broken attempt wrote from there on
}

// terms are what the request demands of its answer.
type terms struct {
	chat, showIDs, usage, greedy bool
	messages, responses          bool  // these APIs, whose events have names
	repeatable                   bool  // another engine would write the same answer again
	own                          bool  // the limit is max_completion_tokens
	most, least                  int64 // max_tokens (0: none) and min_tokens
	hold                         int   // characters that the engine holds back, because a stop string may begin there
	back                         int   // characters that it does not hold back, though a stop string may begin there
	maxBytes                     int
}

// named reports whether events have a line with their name.
func (t *terms) named() bool { return t.messages || t.responses }

// head has the members of the first event that all events repeat, as JSON text.
type head struct{ id, object, created, model []byte }

// seen is what the client has got.
type seen struct{ event, comment, role, progress, finish, usage, done bool }

// NewStream returns the stream of the answer to a request for which [Refusal] had no reason. It does not keep r.
func NewStream(r *openai.Request, policy Policy) Stream {
	s := Stream{Cached: -1, of: terms{
		chat: r.API() == openai.Chat, showIDs: r.True(openai.FieldReturnTokenIDs), usage: r.WantsUsage(),
		greedy: greedy(r), messages: r.API() == openai.Messages, responses: r.API() == openai.Responses,
		maxBytes: policy.MaxBytes,
	}}
	if byIDs(r, policy) != "" {
		s.repeat.on = true
		if !greedy(r) && !seeded(r) {
			s.repeat.seed = newSeed()
		}
	}
	s.of.repeatable = repeatable(r, Policy{}) == ""
	if s.of.maxBytes <= 0 {
		s.of.maxBytes = defaultMaxBytes
	}
	s.of.most, _ = r.TokenLimit()
	s.of.least, _ = r.Int(openai.FieldMinTokens)
	own := r.Raw(openai.FieldMaxCompletionTokens)
	s.of.own = s.of.chat && own != nil && string(own) != "null"
	if n, _ := longestStop(r.Raw(openai.FieldStop)); n > 1 && r.True(openai.FieldIncludeStop) {
		s.of.back = n - 1
	} else if n > 1 {
		s.of.hold = n - 1 // vLLM 0.32.0, v1/engine/detokenizer.py:88
	}
	s.marks.keep = s.of.hold + s.of.back + 1
	return s
}

// Reason returns why the answer cannot be continued if its engine dies now, "" if it can.
func (s *Stream) Reason() Reason { return s.reason }

// Broken returns why the engine's answer is not passed on any further, "" if it is: the engine reported an error, or
// ended the answer too soon. [Stream.Continue] or [Stream.Release] come next.
func (s *Stream) Broken() Reason { return s.broken }

// Empty reports whether the client has no text yet, and nothing else of the answer.
func (s *Stream) Empty() bool { return s.sent == 0 && len(s.repeat.parts) == 0 }

// Done reports whether the client has the end of the answer.
func (s *Stream) Done() bool { return s.seen.done }

// Feed appends to dst what the client gets of the next bytes of the engine's answer. Whole events pass, unchanged but
// for token ids that the client did not ask for; the beginning of an event waits for its end.
func (s *Stream) Feed(dst, chunk []byte) []byte {
	for len(chunk) > 0 {
		end, whole := s.in.next(chunk)
		piece := chunk[:end]
		chunk = chunk[end:]
		switch {
		case s.in.over:
			if dst = s.unread(dst, piece, s.reason); whole {
				s.in.over = false
			}
		case whole && len(s.in.held) == 0:
			dst = s.pass(dst, piece)
		case whole:
			s.in.held = append(s.in.held, piece...)
			dst = s.pass(dst, s.in.held)
			s.in.drop()
		default:
			s.in.held = append(s.in.held, piece...)
			if reason := s.unreadable(); reason != "" {
				dst = s.unread(dst, s.in.held, reason)
				s.in.drop()
				s.in.over = true
			}
		}
	}
	return dst
}

// unreadable returns why the beginning of an event is not kept until its end has come, "" if it is.
func (s *Stream) unreadable() Reason {
	const most = 4 << 10 // more does not arrive in one piece that was read before
	if !framed(s.in.held[:min(len(s.in.held), most)], s.of.named()) {
		return Format
	}
	if s.bytes() > s.of.maxBytes && s.joined {
		s.give(TooLong)
	}
	if s.bytes() > s.of.maxBytes {
		return TooLong
	}
	return ""
}

// unread passes bytes of an event that is not read.
func (s *Stream) unread(dst, piece []byte, reason Reason) []byte {
	if s.joined {
		s.breakOff(cmp.Or(reason, Format), nil)
		return dst
	}
	s.give(reason)
	s.seen.event, s.hushed = true, false
	return append(dst, piece...)
}

// End appends what the client gets when the engine's answer has ended in the regular way. An answer without its end is
// broken.
func (s *Stream) End(dst []byte) []byte {
	if held := s.in.held; len(held) > 0 {
		if s.readable(held) {
			dst = s.pass(dst, held)
		} else if s.following() {
			s.breakOff(Failed, held)
		} else {
			dst = append(dst, held...)
		}
		s.in = splitter{}
	}
	switch {
	case !s.following() || s.broken != "" || s.seen.done:
	case !s.joined && !s.seen.event: // it has ended without an error: that is no reason to ask another engine
		s.give(Format)
	default:
		s.breakOff(Failed, nil)
	}
	return dst
}

// readable reports whether the bytes of an event without its empty line are whole.
func (s *Stream) readable(held []byte) bool {
	data, ok := dataLine(held, s.of.named())
	p := parser{b: held[:max(data.to, data.from)], i: data.from}
	switch {
	case !ok || data.none() || string(p.text(data)) == "[DONE]":
	case s.of.messages:
		_, ok = p.message()
	case s.of.responses:
		_, ok = p.output()
	default:
		_, ok = p.event()
	}
	return ok
}

// Release appends what the engine wrote after its answer was broken, for a client whose answer is not continued.
func (s *Stream) Release(dst []byte) []byte {
	dst = append(append(dst, s.rest...), s.in.held...)
	s.rest, s.in = nil, splitter{}
	return dst
}

// following reports whether the answer can still be continued, or has been.
func (s *Stream) following() bool { return s.reason == "" || s.joined }

// give gives up the possibility to continue the answer, and frees its memory. It passes on.
func (s *Stream) give(reason Reason) {
	if s.reason == "" {
		s.reason = reason
	}
	s.marks = marks{}
	s.free()
}

// free frees what an answer that cannot be continued does not need. One that has been continued still needs the prompt,
// until the present attempt has proven that it had that, and the ids of what was sent already.
func (s *Stream) free() {
	if s.joined && (!s.proven || s.repeat.behind()) {
		return
	}
	s.repeat.parts, s.repeat.size, s.repeat.scratch = nil, 0, nil
	if s.prompt = nil; !s.joined || s.tokens >= len(s.ids) {
		s.ids = nil
	}
}

// breakOff stops following the present attempt.
func (s *Stream) breakOff(reason Reason, event []byte) {
	if s.broken == "" {
		s.broken = reason
	}
	if s.bytes()+len(event) <= s.of.maxBytes {
		s.rest = append(s.rest, event...)
	}
}

// Forget gives up the possibility to continue the answer, for a reason of the caller's. It passes on.
func (s *Stream) Forget(reason Reason) { s.give(reason) }

// Bytes returns the memory that the stream holds.
func (s *Stream) Bytes() int { return s.bytes() }

func (s *Stream) bytes() int {
	return 4*(cap(s.prompt)+cap(s.ids)) + len(s.in.held) + len(s.rest) + s.repeat.size
}

// pass appends the client's version of one event, which ends with its empty line.
func (s *Stream) pass(dst, raw []byte) []byte {
	data, ok := dataLine(raw, s.of.named())
	switch {
	case s.broken != "":
		s.breakOff(s.broken, raw)
		return dst
	case ok && data.none(): // a comment
		if s.seen.comment = true; s.hushed {
			return dst
		}
		return append(dst, raw...)
	case ok && s.of.messages:
		return s.passMessage(dst, raw, data)
	case ok && s.of.responses:
		return s.passOutput(dst, raw, data)
	case ok && string(raw[data.from:data.to]) == "[DONE]":
		if s.following() && !s.seen.finish {
			s.breakOff(Failed, raw)
			return dst
		}
		s.seen.done, s.seen.event = true, true
		return append(dst, raw...)
	}
	p := parser{b: raw[:max(data.to, data.from)], i: data.from}
	e, valid := event{}, false
	if ok {
		e, valid = p.event()
	}
	if reason := s.check(&p, &e, valid); reason != "" {
		switch {
		case s.joined, reason == Failed && s.reason == "":
			s.breakOff(reason, raw)
			return dst
		case !valid:
			return s.unread(dst, raw, reason)
		case reason != Failed:
			s.give(reason)
		}
	}
	if s.joined && !s.proven {
		if reason := s.prove(&p, &e); reason != "" {
			s.breakOff(reason, raw)
			return dst
		}
	}
	s.hushed = false
	return s.write(dst, raw, &p, &e)
}

// prove checks that an engine which was asked to continue the answer had the prompt that it was asked with: vLLM's
// first event has its ids. An engine that ignores the ids (another release) begins the answer anew.
func (s *Stream) prove(p *parser, e *event) Reason {
	if p.isNull(e.prompt) || !sameIDs(p.text(e.prompt), s.prompt, s.ids[:s.base]) {
		return OtherStart
	}
	s.proven = true
	return ""
}

// check returns the reason why an event's answer cannot be continued, or must not be joined.
func (s *Stream) check(p *parser, e *event, valid bool) Reason {
	switch {
	case !valid:
		return Format
	case e.failed && e.code >= 400 && e.code < 500 && e.code != 408 && e.code != 429 && !s.joined:
		return Refused
	case e.failed, !p.isNull(e.finish) && string(p.text(e.finish)) == `"abort"`:
		return Failed
	case e.other, e.parsed(p) && !s.turn():
		return NotContent
	case e.unknown, e.choices > 1, e.choices == 1 && !e.choice:
		return Format
	case !p.isNull(e.text) && !p.isString(e.text), p.isNull(e.id), p.isNull(e.created):
		return Format
	case !p.isNull(e.reasoning) && !p.isString(e.reasoning), !p.isNull(e.tools) && p.b[e.tools.from] != '[':
		return Format
	case !s.repeat.on && s.joined && s.seen.role && e.role && (p.hasText(e.text) || !p.isNull(e.finish)):
		return secondRole
	}
	return ""
}

// hasText reports whether a value is a string that is not empty.
func (p *parser) hasText(s span) bool { return p.isString(s) && s.to-s.from > 2 }

// write appends an event that was understood.
func (s *Stream) write(dst, raw []byte, p *parser, e *event) []byte {
	if s.repeat.on {
		return s.writeAgain(dst, raw, p, e)
	}
	var out edits
	if s.joined {
		s.unify(&out, p, e)
	}
	if (s.joined || s.Cached >= 0) && !p.isNull(e.usage) && p.b[e.usage.from] == '{' {
		q := parser{b: p.b[:e.usage.to], i: e.usage.from}
		s.countUsage(&out, &q)
	}
	if s.reason == "" && s.prompt == nil && !p.isNull(e.prompt) {
		s.remember(p, e)
	}
	if !s.of.showIDs || s.joined {
		out.null(p, e.prompt)
	}
	count, reason := s.take(p, e)
	again := min(max(s.shown-s.tokens, 0), count) // of them, the client has these
	if s.joined && again > 0 && again < count && !p.isNull(e.logprobs) {
		reason = Different // no log probabilities for half an event
	}
	if reason != "" {
		if s.joined {
			s.breakOff(reason, raw)
			return dst
		}
		s.give(reason)
	}
	drop := s.advance(p, e, count)
	if s.needless(p, e, count, drop, again) {
		return dst
	}
	s.cut(&out, p, e, drop, again)
	s.noteSeen(p, e)
	return out.apply(dst, raw)
}

// cut plans what is taken out of an event: characters and ids that the client has, and ids that it did not ask for.
func (s *Stream) cut(out *edits, p *parser, e *event, drop, again int) {
	if drop > 0 {
		at := e.text.from + afterCharacters(p.text(e.text), drop)
		out.add(edit{span: span{e.text.from + 1, at}})
	}
	switch {
	case !s.of.showIDs:
		out.null(p, e.ids)
	case again > 0:
		out.add(edit{span: span{e.ids.from + 1, e.ids.from + elementsEnd(p.text(e.ids), again)}})
	}
}

// remember keeps the members of the first event: the prompt, and what all events repeat.
func (s *Stream) remember(p *parser, e *event) {
	ids, ok := openai.TokenIDs(make([]uint32, 0, (e.prompt.to-e.prompt.from)/5), p.text(e.prompt))
	if !ok || len(ids) == 0 {
		s.give(NoIDs)
		return
	}
	s.keepHead(p, e)
	if s.prompt, s.length = ids, len(ids); s.bytes() > s.of.maxBytes {
		s.give(TooLong)
	}
}

// keepHead keeps what all events repeat.
func (s *Stream) keepHead(p *parser, e *event) {
	all := slices.Concat(p.text(e.id), p.text(e.object), p.text(e.created), p.text(e.model))
	cut := func(m span) (text []byte) {
		n := m.to - m.from
		text, all = all[:n:n], all[n:]
		return text
	}
	s.head = head{id: cut(e.id), object: cut(e.object), created: cut(e.created), model: cut(e.model)}
}

// take adds an event's token ids to the answer's, or compares them with those that an attempt before has generated. It
// returns a reason if ids are missing, or if the client has text of other ids already.
func (s *Stream) take(p *parser, e *event) (count int, reason Reason) {
	if s.reason != "" && (!s.joined || s.tokens >= len(s.ids)) { // nothing is kept, and nothing to compare with
		return numbers(p.text(e.ids)), ""
	}
	if p.isNull(e.ids) {
		if p.hasText(e.text) {
			return 0, NoIDs
		}
		return 0, ""
	}
	if s.length == 0 {
		return 0, NoIDs
	}
	old := len(s.ids)
	all, ok := openai.TokenIDs(s.ids, p.text(e.ids))
	if count = len(all) - old; !ok {
		return 0, NoIDs
	}
	from := s.tokens
	again := min(count, old-from)
	if slices.Equal(all[from:from+again], all[old:old+again]) {
		s.ids = append(all[:old], all[old+again:]...)
	} else {
		if s.chars < s.sent || (s.of.showIDs || !p.isNull(e.logprobs)) && from < s.shown {
			return 0, Different
		}
		s.ids = append(all[:from:from], all[old:]...) // a copy of the stream may still need the others
		s.shown = from
	}
	if s.reason != "" {
		s.ids = s.ids[:min(len(s.ids), old)] // no more is kept
	} else if s.bytes() > s.of.maxBytes {
		s.give(TooLong)
	}
	return count, ""
}

// advance counts an event, marks the place behind it, and returns how many characters of it the client has.
func (s *Stream) advance(p *parser, e *event, count int) (drop int) {
	n := 0
	if p.isString(e.text) {
		n = characters(p.text(e.text))
	}
	drop = min(max(s.sent-s.chars, 0), n)
	s.chars, s.tokens = s.chars+n, s.tokens+count
	s.sent, s.shown = max(s.sent, s.chars), max(s.shown, s.tokens)
	if s.reason != "" {
		s.free()
	} else if n > 0 {
		s.marks.add(mark{s.tokens, s.chars}, count, p.text(e.text), s.of.hold == 0)
	}
	return drop
}

// needless reports whether a client needs nothing of an event: it exists only because Tandem asked for ids, or a client
// has all of it.
func (s *Stream) needless(p *parser, e *event, count, drop, again int) bool {
	if !p.isNull(e.finish) || e.choices == 0 {
		return false
	}
	switch {
	case s.joined && s.seen.role && e.role:
		return true
	case s.joined && (drop > 0 || again > 0):
		return again == count && !p.hasMore(e.text, drop)
	}
	return e.empty && !p.isNull(e.ids) && !s.of.showIDs && p.isNull(e.logprobs)
}

// hasMore reports whether a string has more than n characters.
func (p *parser) hasMore(s span, n int) bool { return p.isString(s) && characters(p.text(s)) > n }

// mark is a place from which an answer can be continued: no character is cut in two there.
type mark struct{ tokens, chars int }

// marks are the last of them, the oldest first.
type marks struct {
	keep int
	all  []mark
	open mark // a place that the next text will confirm
}

// add adds the place behind an event with text. An engine writes text only when its last character is complete; if
// that came with the event's only token, the place is good. Behind several tokens the last one may have begun a
// character whose text is held back: it has not, if the next text begins with an ASCII character. atOnce: the engine
// holds no other text back.
func (m *marks) add(at mark, count int, text []byte, atOnce bool) {
	if m.open.tokens > 0 && atOnce && text[1] < 0x80 && (text[1] != '\\' || text[2] != 'u') {
		m.push(m.open)
	}
	m.open = mark{}
	if count == 1 && !endsIncomplete(text) {
		m.push(at)
	} else if count > 1 {
		m.open = at
	}
}

// endsIncomplete reports whether a JSON string ends with what stands for an incomplete character, escaped or not.
func endsIncomplete(text []byte) bool {
	escaped := text[max(len(text)-len(`\ufffd"`), 0):]
	return bytes.HasSuffix(text, []byte("\uFFFD\"")) || bytes.EqualFold(escaped, []byte(`\ufffd"`))
}

func (m *marks) push(at mark) {
	if len(m.all) == m.keep {
		copy(m.all, m.all[1:])
		m.all = m.all[:m.keep-1]
	}
	m.all = append(m.all, at)
}

// splitter cuts a stream into events: each ends with an empty line. Lines end in LF or CR LF.
type splitter struct {
	held []byte // an incomplete event
	line int    // bytes of the incomplete line, 2 if more
	cr   bool   // it is a single CR
	over bool   // the event is too long: its bytes pass
}

// next returns the index behind the first event's end in chunk, or the length of chunk.
func (s *splitter) next(chunk []byte) (end int, whole bool) {
	for end < len(chunk) {
		i := bytes.IndexByte(chunk[end:], '\n')
		if i < 0 {
			rest := chunk[end:]
			s.cr = s.line == 0 && len(rest) == 1 && rest[0] == '\r'
			s.line = min(s.line+len(rest), 2)
			return len(chunk), false
		}
		empty := s.line == 0 && (i == 0 || i == 1 && chunk[end] == '\r') || s.cr && i == 0
		s.line, s.cr = 0, false
		if end += i + 1; empty {
			return end, true
		}
	}
	return end, false
}

// keepHeld is the largest buffer, in bytes, that is kept when its event is complete.
const keepHeld = 64 << 10

func (s *splitter) drop() {
	if s.held = s.held[:0]; cap(s.held) > keepHeld {
		s.held = nil
	}
}

// dataLine returns the place of an event's data; none: it has no data, but comments. ok is false if it has more than
// one line of data, or a line that is neither, or lines that end in a CR alone.
func dataLine(raw []byte, named bool) (data span, ok bool) {
	for from := 0; from < len(raw); {
		end := from + bytes.IndexByte(raw[from:], '\n')
		next := end + 1
		if end < from {
			end, next = len(raw), len(raw)
		}
		if end > from && raw[end-1] == '\r' {
			end--
		}
		switch line := raw[from:end]; {
		case bytes.IndexByte(line, '\r') >= 0:
			return data, false
		case len(line) == 0 || line[0] == ':' || named && bytes.HasPrefix(line, eventField):
		case !bytes.HasPrefix(line, dataField) || !data.none():
			return data, false
		default:
			data = span{from + len(dataField), end}
			if data.from < data.to && raw[data.from] == ' ' {
				data.from++
			}
		}
		from = next
	}
	return data, true
}

var dataField, eventField = []byte("data:"), []byte("event:")

// framed reports whether the beginning of an event may become one that [dataLine] reads.
func framed(held []byte, named bool) bool {
	last := bytes.LastIndexByte(held, '\n') + 1
	if _, ok := dataLine(held[:last], named); !ok {
		return false
	}
	line := bytes.TrimSuffix(held[last:], []byte("\r"))
	return bytes.IndexByte(line, '\r') < 0 &&
		(len(line) == 0 || line[0] == ':' || begins(line, dataField) || named && begins(line, eventField))
}

// begins reports whether a line begins with a field's name, as far as it has come.
func begins(line, field []byte) bool {
	return bytes.HasPrefix(line, field) || bytes.HasPrefix(field, line)
}
