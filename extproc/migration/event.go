package migration

import (
	"strconv"
	"unicode/utf8"

	"tandem/extproc/openai"
)

// span is a part of an event; the zero value means absent.
type span struct{ from, to int }

func (s span) none() bool { return s.to == 0 }

// event has the places in an event's bytes of the members that matter.
type event struct {
	id, object, created, model, usage span
	prompt                            span // prompt_token_ids, of the event (chat) or of its choice (completions)
	ids, text, finish, logprobs       span // of the choice
	reasoning, tools                  span // likewise
	choices                           int
	choice                            bool // it is choice 0
	role                              bool
	empty                             bool // a delta without any member
	other                             bool // a delta with something else
	unknown                           bool // a member that may have a text, and that nothing is known of
	failed                            bool // an error in place of choices ...
	code                              int  // ... with this code; 0: none
}

// parser reads JSON once, from left to right, and validates it. After bad nothing it returns counts.
type parser struct {
	b   []byte
	i   int
	bad bool
}

// open enters an object or array and reports whether it has an element. The closing bracket follows the opening one
// in ASCII at a distance of two.
func (p *parser) open(bracket byte) bool {
	if p.bad || p.i >= len(p.b) || p.b[p.i] != bracket {
		p.bad = true
		return false
	}
	if p.space(p.i + 1); p.i < len(p.b) && p.b[p.i] == bracket+2 {
		p.space(p.i + 1)
		return false
	}
	return true
}

// more moves behind an element and reports whether another one follows.
func (p *parser) more(end byte) bool {
	if p.bad || p.i >= len(p.b) || p.b[p.i] != ',' && p.b[p.i] != end {
		p.bad = true
		return false
	}
	again := p.b[p.i] == ','
	p.space(p.i + 1)
	return again
}

func (p *parser) space(i int) {
	for p.i = i; p.i < len(p.b); p.i++ {
		if c := p.b[p.i]; c != ' ' && c != '\t' && c != '\n' && c != '\r' {
			return
		}
	}
}

// key reads a member's name and its colon. No member that matters has escapes in its name.
func (p *parser) key() []byte {
	s := p.value()
	if p.bad || !p.isString(s) || p.i >= len(p.b) || p.b[p.i] != ':' {
		p.bad = true
		return nil
	}
	p.space(p.i + 1)
	return p.b[s.from+1 : s.to-1]
}

// value reads a value of any kind.
func (p *parser) value() span {
	from := p.i
	if p.bad || from >= len(p.b) {
		p.bad = true
		return span{}
	}
	end, ok := openai.Skip(p.b, from)
	p.i, p.bad = end, !ok
	for end > from && p.b[end-1] <= ' ' {
		end--
	}
	return span{from, end}
}

// once reads a value into a member that an event has once.
func (p *parser) once(into *span) {
	v := p.value()
	p.bad = p.bad || !into.none()
	*into = v
}

func (p *parser) text(s span) []byte { return p.b[s.from:s.to] }

func (p *parser) isString(s span) bool { return s.to > s.from+1 && p.b[s.from] == '"' }

// isNull reports whether a value is absent or null.
func (p *parser) isNull(s span) bool { return s.none() || string(p.text(s)) == "null" }

// event reads an event's data, which begins at p.i.
func (p *parser) event() (e event, ok bool) {
	for more := p.open('{'); more; more = p.more('}') {
		switch string(p.key()) {
		case "id":
			p.once(&e.id)
		case "object":
			p.once(&e.object)
		case "created":
			p.once(&e.created)
		case "model":
			p.once(&e.model)
		case "usage":
			p.once(&e.usage)
		case "prompt_token_ids":
			p.once(&e.prompt)
		case "error":
			p.failure(&e)
		case "choices":
			for more := p.open('['); more; more = p.more(']') {
				p.choice(&e)
				e.choices++
			}
		case "system_fingerprint", "service_tier", "metrics": // vLLM's own events, which are not part of the answer
			p.value()
		default:
			p.strange(&e)
		}
	}
	return e, !p.bad && p.i == len(p.b)
}

// strange reads the value of a member that is not known. A number is no text.
func (p *parser) strange(e *event) {
	text := p.text(p.value())
	e.unknown = e.unknown || len(text) > 2 && (text[0] == '"' || text[0] == '[' || text[0] == '{')
}

// failure reads the error that an engine sends in place of an answer.
func (p *parser) failure(e *event) {
	if p.bad || p.i >= len(p.b) || p.b[p.i] != '{' {
		e.failed = !p.isNull(p.value()) || e.failed
		return
	}
	e.failed = true
	for more := p.open('{'); more; more = p.more('}') {
		key := string(p.key())
		if v := p.value(); key == "code" && !p.bad {
			e.code, _ = strconv.Atoi(string(p.text(v)))
		}
	}
}

func (p *parser) choice(e *event) {
	for more := p.open('{'); more; more = p.more('}') {
		switch string(p.key()) {
		case "index":
			e.choice = string(p.text(p.value())) == "0"
		case "text":
			p.once(&e.text)
		case "delta":
			p.delta(e)
		case "finish_reason":
			p.once(&e.finish)
		case "logprobs":
			p.once(&e.logprobs)
		case "token_ids":
			p.once(&e.ids)
		case "prompt_token_ids":
			p.once(&e.prompt)
		case "stop_reason":
			p.value()
		default:
			p.strange(e)
		}
	}
}

func (p *parser) delta(e *event) {
	e.empty = true
	for more := p.open('{'); more; more = p.more('}') {
		e.empty = false
		switch string(p.key()) {
		case "role":
			e.role = !p.isNull(p.value())
		case "content":
			p.once(&e.text)
		case "reasoning":
			p.once(&e.reasoning)
		case "tool_calls":
			p.once(&e.tools)
		default:
			e.other = !p.isNull(p.value()) || e.other
		}
	}
}

// parsed reports whether the engine's parsers have found something in the answer that is not content.
func (e *event) parsed(p *parser) bool {
	return p.hasText(e.reasoning) || !p.isNull(e.tools) && string(p.text(e.tools)) != "[]"
}

// number reads a number, given by its place.
func (p *parser) number(s span) (int64, error) { return strconv.ParseInt(string(p.text(s)), 10, 64) }

// index reads the place of a part of an answer. What is no number makes the event unknown.
func (p *parser) index(unknown *bool) int64 {
	n, err := p.number(p.value())
	*unknown = *unknown || err != nil
	return n
}

// characters counts the code points of a valid JSON string, given with its quotes, as Python counts them.
func characters(quoted []byte) (n int) {
	for i := 1; i < len(quoted)-1; n++ {
		i += character(quoted[i:])
	}
	return n
}

// afterCharacters returns the index behind the first n characters of a valid JSON string.
func afterCharacters(quoted []byte, n int) int {
	i := 1
	for ; n > 0 && i < len(quoted)-1; n-- {
		i += character(quoted[i:])
	}
	return i
}

// character returns the length of the character, or of its escape, at the start of the inside of a JSON string.
func character(b []byte) int {
	switch {
	case b[0] < utf8.RuneSelf && b[0] != '\\':
		return 1
	case b[0] != '\\':
		_, n := utf8.DecodeRune(b)
		return n
	case b[1] != 'u':
		return 2
	case b[2]|0x20 == 'd' && (b[3] == '8' || b[3] == '9' || b[3]|0x20 == 'a' || b[3]|0x20 == 'b') &&
		len(b) >= 12 && b[6] == '\\' && b[7] == 'u' && b[8]|0x20 == 'd' && b[9]|0x20 >= 'c' && b[9]|0x20 <= 'f':
		return 12 // a pair of surrogates
	}
	return 6
}
