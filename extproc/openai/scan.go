package openai

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

// member is one key and value of a JSON object, as offsets into the body. Keys include their quotes.
type member struct {
	key, keyEnd, value, valueEnd int32
	hash                         uint64 // of the unescaped key
	field                        Field
}

const maxDepthWords = 16 // 1,024 levels

// Limits bound what a body may be. Zero values take the defaults.
type Limits struct {
	MaxDepth   int // nesting of arrays and objects; default 512, at most 1,024
	MaxMembers int // of the top-level object; default 1,024
}

func (l Limits) withDefaults() Limits {
	if l.MaxDepth == 0 {
		l.MaxDepth = 512
	}
	if l.MaxMembers == 0 {
		l.MaxMembers = 1024
	}
	l.MaxDepth = min(l.MaxDepth, maxDepthWords*64)
	return l
}

// scanner validates JSON (RFC 8259) byte by byte, strings eight at a time.
type scanner struct {
	b   []byte
	i   int
	lim Limits
}

func (s *scanner) fail(what string) error {
	if s.i >= len(s.b) {
		return BadRequest("invalid_json", "", fmt.Sprintf("the body is not valid JSON: it ends at byte %d, %s", len(s.b), what))
	}
	return BadRequest("invalid_json", "", fmt.Sprintf("the body is not valid JSON: at byte %d, %s", s.i, what))
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return
		}
	}
}

func (s *scanner) at(c byte) bool { return s.i < len(s.b) && s.b[s.i] == c }

// document finds the members of the one top-level object that the body must be. Members of sampling_params, which one
// API has its limits in, go to nested.
func (s *scanner) document(top, nested []member) (topOut, nestedOut []member, err error) {
	s.space()
	if !s.at('{') {
		if s.i+2 < len(s.b) && s.b[s.i] == 0xEF && s.b[s.i+1] == 0xBB {
			return top, nested, s.fail("a byte order mark, which JSON does not have")
		}
		if s.i >= len(s.b) {
			return top, nested, s.fail("where an object is expected")
		}
		return top, nested, BadRequest("invalid_body", "", "the body must be a JSON object")
	}
	if top, nested, err = s.object(top, nested, true); err != nil {
		return top, nested, err
	}
	s.space()
	if s.i != len(s.b) {
		return top, nested, s.fail("something follows the object")
	}
	return top, nested, nil
}

// object reads the members of the object at s.i.
func (s *scanner) object(dst, nested []member, top bool) (out, nestedOut []member, err error) {
	s.i++
	s.space()
	if s.at('}') {
		s.i++
		return dst, nested, nil
	}
	for {
		var m member
		if m, err = s.key(); err != nil {
			return dst, nested, err
		}
		for i := range dst {
			if dst[i].hash == m.hash {
				return dst, nested, BadRequest("duplicate_key", printableKey(s.b[m.key+1:m.keyEnd-1]), "a member of the request occurs twice")
			}
		}
		if len(dst) == s.lim.MaxMembers {
			return dst, nested, BadRequest("too_many_members", "", fmt.Sprintf("the request has more than %d members", s.lim.MaxMembers))
		}
		if top && m.field == FieldSamplingParams && s.at('{') {
			nested, _, err = s.object(nested, nil, false)
		} else {
			err = s.skip(1)
		}
		if err != nil {
			return dst, nested, err
		}
		m.valueEnd = int32(s.i)
		dst = append(dst, m)
		s.space()
		switch {
		case s.at(','):
			s.i++
			s.space()
		case s.at('}'):
			s.i++
			return dst, nested, nil
		default:
			return dst, nested, s.fail("where a comma or a closing brace is expected")
		}
	}
}

// key reads a member's key and the colon, up to the value.
func (s *scanner) key() (m member, err error) {
	if !s.at('"') {
		return m, s.fail("where a key is expected")
	}
	m.key = int32(s.i)
	escaped, err := s.str()
	if err != nil {
		return m, err
	}
	m.keyEnd = int32(s.i)
	name := s.b[m.key+1 : m.keyEnd-1]
	if escaped {
		name = unescape(name)
	}
	m.hash, m.field = xxhash.Sum64(name), fieldOf(name)
	s.space()
	if !s.at(':') {
		return m, s.fail("where a colon is expected")
	}
	s.i++
	s.space()
	m.value = int32(s.i)
	return m, nil
}

// skip validates one value of any kind. depth counts the levels it lies in.
func (s *scanner) skip(depth int) error {
	var objects [maxDepthWords]uint64 // a bit for each open level: is it an object
	base := depth
	for {
		if s.i >= len(s.b) {
			return s.fail("where a value is expected")
		}
		switch c := s.b[s.i]; {
		case c == '"':
			if _, err := s.str(); err != nil {
				return err
			}
		case c == '{' || c == '[':
			if depth++; depth > s.lim.MaxDepth {
				return BadRequest("too_deep", "", fmt.Sprintf("the body nests more than %d levels deep", s.lim.MaxDepth))
			}
			word, bit := (depth-1)/64, uint64(1)<<((depth-1)%64)
			objects[word] &^= bit
			if c == '{' {
				objects[word] |= bit
			}
			s.i++
			s.space()
			if c == '{' && !s.at('}') {
				if err := s.innerKey(); err != nil {
					return err
				}
				continue
			}
			if c == '[' && !s.at(']') {
				continue
			}
			s.i++
			depth--
		case c == '-' || c-'0' <= 9:
			if err := s.number(); err != nil {
				return err
			}
		default:
			if err := s.literal(); err != nil {
				return err
			}
		}
		more, err := s.closeLevels(&objects, &depth, base)
		if err != nil || !more {
			return err
		}
	}
}

// closeLevels goes on after a value: to the next one of its array or object, closing what ends here.
func (s *scanner) closeLevels(objects *[maxDepthWords]uint64, depth *int, base int) (more bool, err error) {
	for *depth > base {
		s.space()
		inObject := objects[(*depth-1)/64]>>((*depth-1)%64)&1 == 1
		switch {
		case s.at(','):
			s.i++
			s.space()
			if inObject {
				return true, s.innerKey()
			}
			return true, nil
		case inObject && s.at('}'), !inObject && s.at(']'):
			s.i++
			*depth--
		default:
			return false, s.fail("where a comma or the end of an array or object is expected")
		}
	}
	return false, nil
}

// innerKey reads a key below the top level, where nobody asks for its name.
func (s *scanner) innerKey() error {
	if !s.at('"') {
		return s.fail("where a key is expected")
	}
	if _, err := s.str(); err != nil {
		return err
	}
	s.space()
	if !s.at(':') {
		return s.fail("where a colon is expected")
	}
	s.i++
	s.space()
	return nil
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// str validates the string at s.i, eight bytes at a time between those that matter: quotes, escapes, control characters.
func (s *scanner) str() (escaped bool, err error) {
	b, i := s.b, s.i+1
	for {
		for i+8 <= len(b) {
			w := binary.LittleEndian.Uint64(b[i:])
			quote, slash := w^(ones*'"'), w^(ones*'\\')
			hit := ((quote - ones) &^ quote) | ((slash - ones) &^ slash) | ((w - ones*0x20) &^ w)
			if hit &= highs; hit != 0 {
				i += bits.TrailingZeros64(hit) / 8
				break
			}
			i += 8
		}
		if i >= len(b) {
			s.i = i
			return escaped, s.fail("inside a string")
		}
		switch c := b[i]; {
		case c == '"':
			s.i = i + 1
			return escaped, nil
		case c == '\\':
			escaped = true
			n := escapeLen(b[i:])
			if n == 0 {
				s.i = i
				return escaped, s.fail("an escape that JSON does not have")
			}
			i += n
		case c < 0x20:
			s.i = i
			return escaped, s.fail("a control character inside a string")
		default:
			i++
		}
	}
}

// escapeLen is the length of the escape at the start of b, 0 if it is none.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if len(b) >= 6 && isHex(b[2]) && isHex(b[3]) && isHex(b[4]) && isHex(b[5]) {
			return 6
		}
	}
	return 0
}

func isHex(c byte) bool { return c-'0' <= 9 || c|0x20-'a' <= 5 }

func (s *scanner) number() error {
	digits := func() bool {
		start := s.i
		for s.i < len(s.b) && s.b[s.i]-'0' <= 9 {
			s.i++
		}
		return s.i > start
	}
	if s.b[s.i] == '-' {
		s.i++
	}
	if s.at('0') {
		s.i++
	} else if !digits() {
		return s.fail("a number without digits")
	}
	if s.at('.') {
		s.i++
		if !digits() {
			return s.fail("a number without digits after its point")
		}
	}
	if s.at('e') || s.at('E') {
		s.i++
		if s.at('+') || s.at('-') {
			s.i++
		}
		if !digits() {
			return s.fail("a number without digits in its exponent")
		}
	}
	return nil
}

func (s *scanner) literal() error {
	for _, word := range [...]string{"true", "false", "null"} {
		if s.i+len(word) <= len(s.b) && string(s.b[s.i:s.i+len(word)]) == word {
			s.i += len(word)
			return nil
		}
	}
	return s.fail("where a value is expected")
}

// printableKey is a key as an error may name it: short and plain, or not at all.
func printableKey(key []byte) string {
	if len(key) > 64 {
		return ""
	}
	for _, c := range key {
		if c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			return ""
		}
	}
	return string(key)
}
