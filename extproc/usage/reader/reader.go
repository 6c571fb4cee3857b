// Package reader reads counts of tokens from answers, where answers pass through Tandem: inside Envoy. Beside Envoy a
// script reads them (envoy-configs/lua/usage.lua); both read the same (readertest).
package reader

import (
	"bytes"
	"strconv"

	"tandem/extproc/ended"
)

// Reader reads one answer, in pieces that end anywhere. It keeps none of it: of JSON it follows only the objects that
// may say tokens, so what a client can have an engine repeat (a text, a tool's schema, metadata) is not taken for the
// engine's own word. What is not JSON is ignored.
type Reader struct {
	stream     bool
	said, next ended.Usage // next: of the object that is being read

	state   state
	matched int       // of prefix
	open    [4]object // that are followed, the innermost last
	depth   int
	nested  int  // objects and arrays that are open in the innermost, and are not followed
	naming  bool // the next string of the innermost is a member's name
	name    text
	number  text
}

// text is a short text; of a longer one, its beginning.
type text struct {
	bytes  [64]byte
	length int // of all of it
}

func (t *text) add(c byte) {
	if t.length < len(t.bytes) {
		t.bytes[t.length] = c
	}
	t.length++
}

// get returns the text; "" if it is too long.
func (t *text) get() []byte {
	if t.length > len(t.bytes) {
		return nil
	}
	return t.bytes[:t.length]
}

type state uint8

const (
	lineBegins state = iota // of a stream
	before                  // the outermost object
	between                 // strings and numbers
	inString
	escaped // in a string, behind a backslash
	inNumber
	ignored // to the end of the line, or of all
)

// prefix begins the lines of a stream that have data.
const prefix = "data:"

type object uint8

const (
	other      object = iota
	outermost         // an answer, or an event
	message           // of Anthropic's first event
	response          // of an event of Responses
	ofUsage           // usage
	ofBegin           // usage of Anthropic's first event: it knows nothing of the answer yet
	ofDetails         // of the prompt's tokens
	ofMetaInfo        // of SGLang's generate
)

// New returns a reader. stream: the answer is a stream of events, else one JSON object.
func New(stream bool) Reader {
	r := Reader{stream: stream}
	r.begin()
	return r
}

// Said returns the counts that the answer has said so far; its times and tenant are zero.
func (r *Reader) Said() ended.Usage { return r.said }

// Within reports whether the next byte is not the first of a line.
func (r *Reader) Within() bool { return r.state != lineBegins || r.matched > 0 }

func (r *Reader) begin() {
	r.matched, r.depth, r.nested, r.next = 0, 0, 0, ended.Usage{}
	if r.state = before; r.stream {
		r.state = lineBegins
	}
}

// Feed reads the next piece.
func (r *Reader) Feed(piece []byte) {
	if r.stream && !r.Within() && bytes.HasSuffix(piece, []byte("\n")) && !mayCount(piece) {
		return // most of a stream; hooks.c does this before it calls Go
	}
	for len(piece) > 0 {
		if r.state == ignored && !r.stream {
			return
		}
		c := piece[0]
		piece = piece[1:]
		if r.stream && (c == '\n' || c == '\r') {
			r.begin()
			continue
		}
		switch r.state {
		case lineBegins:
			if c != prefix[r.matched] {
				r.state = ignored
			} else if r.matched++; r.matched == len(prefix) {
				r.state = before
			}
		case before:
			r.outside(c)
		case between:
			r.between(c)
		case inString:
			r.inString(c)
		case escaped:
			r.name.add(0) // no name that is known has one
			r.state = inString
		case inNumber:
			r.digit(c)
		case ignored:
		}
		piece = r.skip(piece)
	}
}

func mayCount(piece []byte) bool {
	return bytes.Contains(piece, []byte(`usage"`)) || bytes.Contains(piece, []byte(`meta_info"`))
}

// skip returns a piece without what need not be looked at byte by byte.
func (r *Reader) skip(piece []byte) []byte {
	from := 0
	switch {
	case r.state == inString && !r.naming:
		for from < len(piece) && piece[from] != '"' && piece[from] != '\\' && piece[from] >= ' ' {
			from++
		}
	case r.state == between && r.nested > 0:
		for from < len(piece) && passes(piece[from]) {
			from++
		}
	case r.state == ignored:
		for from < len(piece) && piece[from] >= ' ' {
			from++
		}
	}
	return piece[from:]
}

// passes reports whether a byte of what is not followed changes nothing: it is no quote, bracket or line's end.
func passes(c byte) bool { return c >= ' ' && c != '"' && c|0x20 != '{' && c|0x20 != '}' }

func (r *Reader) outside(c byte) {
	switch c {
	case '{':
		r.push(outermost)
	case ' ', '\t', '\n', '\r':
	default:
		r.state = ignored
	}
}

func (r *Reader) push(o object) {
	r.open[r.depth] = o
	r.depth++
	r.state, r.naming = between, true
}

// between reads a byte outside of strings and numbers.
func (r *Reader) between(c byte) {
	switch {
	case c == '"':
		r.state = inString
		if r.naming = r.naming && r.nested == 0; r.naming {
			r.name.length = 0
		}
	case r.nested > 0 && (c == '{' || c == '['):
		r.nested++
	case r.nested > 0 && (c == '}' || c == ']'):
		r.nested--
	case r.nested > 0:
	case c == ':':
		r.naming = false
	case c == ',':
		r.naming, r.name.length = true, 0
	case c == '{':
		if o := r.inner(); o != other {
			r.push(o)
		} else {
			r.nested, r.naming = 1, false
		}
	case c == '[':
		r.nested, r.naming = 1, false
	case c == '}':
		r.pop()
	case c == '-' || c >= '0' && c <= '9':
		r.state, r.number.length = inNumber, 0
		r.number.add(c)
	}
}

// pop ends the innermost object. With the outermost one the answer, or the event, is complete.
func (r *Reader) pop() {
	r.naming, r.name.length = false, 0
	if r.depth--; r.depth == 0 {
		r.state = ignored
		for i, c := range r.next.Counts() {
			if c.Said {
				*r.said.Counts()[i] = *c
			}
		}
	}
}

func (r *Reader) inString(c byte) {
	switch {
	case c == '\\':
		r.state = escaped
	case c == '"':
		r.state = between
	case r.naming:
		r.name.add(c)
	}
}

func (r *Reader) digit(c byte) {
	switch {
	case c >= '0' && c <= '9', c == '.', c == '-', c == '+', c == 'e', c == 'E':
		r.number.add(c)
		return
	}
	if to := r.count(); to != nil {
		if n, err := strconv.ParseFloat(string(r.number.get()), 64); err != nil {
			*to = ended.Count{Said: true, Absurd: true}
		} else {
			*to = ended.CountOf(n)
		}
	}
	r.state = between
	r.between(c)
}

// inner returns which object the last name of the innermost one has.
func (r *Reader) inner() object {
	in, name := r.open[r.depth-1], string(r.name.get())
	switch {
	case in == outermost && name == "message":
		return message
	case in == outermost && name == "response":
		return response
	case in == outermost && name == "meta_info":
		return ofMetaInfo
	case in == message && name == "usage":
		return ofBegin
	case (in == outermost || in == response) && name == "usage":
		return ofUsage
	case in == ofUsage && (name == "prompt_tokens_details" || name == "input_tokens_details"):
		return ofDetails
	}
	return other
}

// count returns what the last name of the innermost object counts; nil: nothing.
func (r *Reader) count() *ended.Count {
	u, in := &r.next, r.open[r.depth-1]
	if in < ofUsage {
		return nil
	}
	switch string(r.name.get()) {
	case "prompt_tokens":
		return only(in == ofUsage || in == ofMetaInfo, &u.In)
	case "input_tokens":
		return only(in == ofUsage || in == ofBegin, &u.In)
	case "completion_tokens":
		return only(in == ofUsage || in == ofMetaInfo, &u.Out)
	case "output_tokens":
		return only(in == ofUsage, &u.Out)
	case "cache_read_input_tokens":
		return only(in == ofUsage || in == ofBegin, &u.CacheRead)
	case "cache_creation_input_tokens":
		return only(in == ofUsage || in == ofBegin, &u.CacheWritten)
	case "cached_tokens":
		return only(in == ofDetails || in == ofMetaInfo, &u.Cached)
	}
	return nil
}

func only(is bool, c *ended.Count) *ended.Count {
	if is {
		return c
	}
	return nil
}
