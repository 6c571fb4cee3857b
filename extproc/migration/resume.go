package migration

import (
	"bytes"
	"slices"
	"strconv"

	"tandem/extproc/openai"
)

// Continue makes the stream ready for the answer of another engine, which is asked for with [Stream.Ask] and fed from
// now on. If it returns a reason, the answer cannot be continued, and nothing has changed. A copy of the stream, made
// before, stays as it is: it can follow the engine before, if no other one answers.
func (s *Stream) Continue() Reason {
	if s.repeat.on {
		return s.again()
	}
	switch {
	case s.reason == Format:
		return Format
	case s.seen.finish:
		return Complete
	case s.reason != "":
		return s.reason
	case s.prompt == nil && s.seen.event:
		return NoIDs
	}
	usable, m, chars := s.place()
	switch {
	case chars < s.sent && !s.of.greedy:
		return Sampled
	case s.of.most > 0 && s.of.most <= int64(m.tokens):
		return NoTokens
	}
	s.base, s.tokens, s.chars = m.tokens, m.tokens, chars
	s.marks.all, s.marks.open = slices.Clone(s.marks.all[:usable]), mark{} // the next engine's come behind
	s.in, s.broken, s.rest = splitter{}, "", nil
	s.joined, s.proven, s.hushed = s.prompt != nil, false, s.seen.comment
	return ""
}

// Continues reports whether the next engine gets token ids of what another one has begun.
func (s *Stream) Continues() bool { return s.joined && !s.repeat.on }

// Ask adds to a patch of r what makes the engine answer token ids and, after [Stream.Continue], go on where the client
// has the answer. r is the client's request, or the leg that a dialect made of it for the engine that answers.
func (s *Stream) Ask(r *openai.Request, p *openai.Patch) {
	if s.repeat.on {
		if s.repeat.seed > 0 {
			p.Set("seed", openai.FieldSeed, strconv.AppendInt(nil, s.repeat.seed, 10))
		}
		return
	}
	p.Set("return_token_ids", openai.FieldReturnTokenIDs, []byte("true"))
	if s.joined {
		s.limit(p)
		s.AskPrompt(r, p)
	}
}

// AskPrompt adds the prompt's ids to a patch of r, and those of the answer if that is continued. An engine that only
// computes the prompt needs no more. A dialect's kv_transfer_params stay. If they have ids, these are the ones that the
// previous engine was asked with.
func (s *Stream) AskPrompt(r *openai.Request, p *openai.Patch) {
	const member = "prompt_token_ids"
	switch params := r.Raw(openai.FieldKVTransferParams); {
	case !s.Continues():
	case !s.of.chat:
		p.Set("prompt", openai.FieldPrompt, s.AppendPrompt(nil))
	case bytes.Contains(params, []byte(`"`+member+`"`)):
	default:
		text := s.AppendPrompt([]byte(`{"` + member + `":`))
		if rest := bytes.TrimLeft(bytes.TrimPrefix(params, []byte("{")), " \t\r\n"); len(rest) > 1 && params[0] == '{' {
			text = append(append(text, ','), rest...)
		} else {
			text = append(text, '}')
		}
		p.Set("kv_transfer_params", openai.FieldKVTransferParams, text)
	}
}

// place returns the last mark from which the next engine sees all that a stop string may begin with, the number of
// marks up to there, and that of characters before it.
func (s *Stream) place() (usable int, m mark, chars int) {
	all := s.marks.all
	for len(all) > 0 && all[len(all)-1].chars+s.of.hold+s.of.back > s.sent {
		all = all[:len(all)-1]
	}
	if len(all) == 0 {
		return 0, mark{}, 0
	}
	m = all[len(all)-1]
	return len(all), m, m.chars + s.of.hold
}

// limit lowers the limits of the answer by the tokens that it has.
func (s *Stream) limit(p *openai.Patch) {
	key, field := "max_tokens", openai.FieldMaxTokens
	if s.of.own {
		key, field = "max_completion_tokens", openai.FieldMaxCompletionTokens
	}
	if s.of.most > 0 {
		p.Set(key, field, strconv.AppendInt(nil, s.of.most-int64(s.base), 10))
	}
	if s.of.least > 0 {
		p.Set("min_tokens", openai.FieldMinTokens, strconv.AppendInt(nil, max(s.of.least-int64(s.base), 0), 10))
	}
}

// PromptTokens returns the number of token ids that the continuing engine gets.
func (s *Stream) PromptTokens() int { return s.length + s.base }

// AppendPrompt appends the token ids that the continuing engine gets, as a JSON array: those of the prompt, and of the
// answer up to the place where [Stream.Continue] goes on.
func (s *Stream) AppendPrompt(dst []byte) []byte {
	dst = append(dst, '[')
	for _, ids := range [][]uint32{s.prompt, s.ids[:s.base]} {
		for _, id := range ids {
			dst = append(strconv.AppendUint(dst, uint64(id), 10), ',')
		}
	}
	return append(dst[:len(dst)-1], ']')
}

// Finish appends the end of an answer whose finish reason the client has ([Complete]): usage if it wants that and has
// not got it, and [DONE].
func (s *Stream) Finish(dst []byte) []byte {
	if s.seen.done || !s.seen.finish {
		return dst
	}
	if s.of.messages {
		s.seen.done = true
		return append(dst, "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n"...)
	}
	if s.of.usage && !s.seen.usage && s.length > 0 && s.head.id != nil {
		dst = append(append(dst, `data: {"id":`...), s.head.id...)
		dst = append(append(dst, `,"object":`...), s.head.object...)
		dst = append(append(dst, `,"created":`...), s.head.created...)
		dst = append(append(dst, `,"model":`...), s.head.model...)
		dst = append(dst, `,"choices":[],"usage":{"prompt_tokens":`...)
		dst = strconv.AppendInt(dst, int64(s.length), 10)
		dst = strconv.AppendInt(append(dst, `,"total_tokens":`...), int64(s.length+s.tokens), 10)
		dst = strconv.AppendInt(append(dst, `,"completion_tokens":`...), int64(s.tokens), 10)
		if s.Cached >= 0 {
			dst = strconv.AppendInt(append(dst, `,"prompt_tokens_details":{"cached_tokens":`...), s.Cached, 10)
			dst = append(dst, '}')
		}
		dst = append(dst, "}}\n\n"...)
	}
	s.seen.done = true
	return append(dst, "data: [DONE]\n\n"...)
}

// unify plans the changes that make an event of a continuing engine one of the first engine's.
func (s *Stream) unify(out *edits, p *parser, e *event) {
	out.set(p, e.id, s.head.id)
	out.set(p, e.created, s.head.created)
	out.set(p, e.model, s.head.model)
}

// countUsage counts the tokens that an engine got with its prompt as tokens of the answer, and the cached ones as the
// first prefill did.
func (s *Stream) countUsage(out *edits, p *parser) {
	for more := p.open('{'); more; more = p.more('}') {
		key := string(p.key())
		v := p.value()
		n, err := p.number(v)
		switch {
		case key == "prompt_tokens_details" && !p.bad && p.b[v.from] == '{':
			q := parser{b: p.b[:v.to], i: v.from}
			s.countUsage(out, &q)
		case err != nil:
		case key == "prompt_tokens":
			out.number(v, n-int64(s.base))
		case key == "completion_tokens":
			out.number(v, n+int64(s.base))
		case key == "cached_tokens" && s.Cached >= 0:
			out.number(v, s.Cached)
		case key == "cached_tokens":
			out.number(v, min(n, int64(s.length)))
		}
	}
}

// edit replaces a part of an event by a text, or by a number.
type edit struct {
	span
	text   []byte
	number int64
}

// edits are those of one event.
type edits struct {
	all [12]edit
	n   int
}

var null = []byte("null")

func (x *edits) add(e edit) {
	if x.n == len(x.all) {
		return // not with the members that are changed
	}
	i := x.n
	for ; i > 0 && x.all[i-1].from > e.from; i-- {
		x.all[i] = x.all[i-1]
	}
	x.all[i] = e
	x.n++
}

func (x *edits) null(p *parser, s span) {
	if !p.isNull(s) {
		x.add(edit{span: s, text: null})
	}
}

func (x *edits) set(p *parser, s span, text []byte) {
	if !s.none() && len(text) > 0 && !bytes.Equal(p.text(s), text) {
		x.add(edit{span: s, text: text})
	}
}

// number replaces by a number of at least 0.
func (x *edits) number(s span, n int64) { x.add(edit{span: s, number: max(n, 0) + 1}) }

// apply appends the event with its changes.
func (x *edits) apply(dst, raw []byte) []byte {
	from := 0
	for i := range x.n {
		e := &x.all[i]
		dst = append(append(dst, raw[from:e.from]...), e.text...)
		if e.number > 0 {
			dst = strconv.AppendInt(dst, e.number-1, 10)
		}
		from = e.to
	}
	return append(dst, raw[from:]...)
}

// elementsEnd returns the index behind the first n numbers of an array, and behind the comma that follows.
func elementsEnd(array []byte, n int) int {
	for i, c := range array {
		if c == ']' {
			return i
		}
		if c == ',' {
			if n--; n == 0 {
				return i + 1
			}
		}
	}
	return len(array)
}

// numbers returns how many numbers an array has, if it is one.
func numbers(array []byte) int {
	if len(array) < 3 || array[0] != '[' {
		return 0
	}
	return bytes.Count(array, []byte(",")) + 1
}

// sameIDs reports whether an array has the ids of parts.
func sameIDs(array []byte, parts ...[]uint32) bool {
	p := parser{b: array}
	more := p.open('[')
	for _, ids := range parts {
		for _, id := range ids {
			if !more {
				return false
			}
			if n, err := strconv.ParseUint(string(p.text(p.value())), 10, 32); err != nil || uint32(n) != id {
				return false
			}
			more = p.more(']')
		}
	}
	return !more && !p.bad
}
