package jsontext

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"unicode/utf8"
)

// Member is one member of a JSON object: the key unescaped, the value's bytes verbatim without surrounding space.
type Member struct {
	Key []byte
	Raw []byte
}

// maxDepth is the maximum nesting of a body; Python's json module gives up near 1000.
const maxDepth = 1000

var (
	errTrailing = errors.New("Extra data")
	// ErrNotObject means that a body is valid JSON, but not an object.
	ErrNotObject = errors.New("not a JSON object")
	errDepth     = errors.New("nested too deeply")
)

// ScanObject validates the whole of body as one JSON object and appends its members to dst.
func ScanObject(dst []Member, body []byte) ([]Member, error) {
	s := scanner{b: body}
	s.space()
	if s.i == len(body) || body[s.i] != '{' {
		if err := s.value(0); err != nil {
			return dst, err
		}
		return dst, ErrNotObject
	}
	err := s.object(0, func(key, raw []byte) { dst = append(dst, Member{key, raw}) })
	if err != nil {
		return dst, err
	}
	s.space()
	if s.i != len(body) {
		return dst, fmt.Errorf("%w at byte %d", errTrailing, s.i)
	}
	if !utf8.Valid(body) {
		return dst, errors.New("'utf-8' codec can't decode the body")
	}
	return dst, nil
}

// scanner walks over JSON and refuses what RFC 8259 refuses.
type scanner struct {
	b []byte
	i int
}

func (s *scanner) fail(what string) error { return fmt.Errorf("%s at byte %d", what, s.i) }

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\n', '\r', '\t':
			s.i++
		default:
			return
		}
	}
}

func (s *scanner) value(depth int) error {
	if depth > maxDepth {
		return errDepth
	}
	s.space()
	if s.i == len(s.b) {
		return s.fail("Expecting value")
	}
	switch c := s.b[s.i]; {
	case c == '"':
		return s.str()
	case c == '{':
		return s.object(depth, nil)
	case c == '[':
		return s.array(depth)
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	}
	for _, word := range [...]string{"true", "false", "null"} {
		if len(s.b)-s.i >= len(word) && string(s.b[s.i:s.i+len(word)]) == word {
			s.i += len(word)
			return nil
		}
	}
	return s.fail("Expecting value")
}

func (s *scanner) object(depth int, each func(key, raw []byte)) error {
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == '}' {
		s.i++
		return nil
	}
	for {
		s.space()
		if s.i == len(s.b) || s.b[s.i] != '"' {
			return s.fail("Expecting property name enclosed in double quotes")
		}
		keyAt := s.i
		if err := s.str(); err != nil {
			return err
		}
		key := s.b[keyAt:s.i]
		s.space()
		if s.i == len(s.b) || s.b[s.i] != ':' {
			return s.fail("Expecting ':' delimiter")
		}
		s.i++
		s.space()
		at := s.i
		if err := s.value(depth + 1); err != nil {
			return err
		}
		if each != nil {
			each(Unquote(key), s.b[at:s.i])
		}
		if ended, err := s.next('}'); ended || err != nil {
			return err
		}
	}
}

func (s *scanner) array(depth int) error {
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == ']' {
		s.i++
		return nil
	}
	for {
		if err := s.value(depth + 1); err != nil {
			return err
		}
		if ended, err := s.next(']'); ended || err != nil {
			return err
		}
	}
}

// next reads the comma or the end behind a member or an element.
func (s *scanner) next(end byte) (ended bool, err error) {
	s.space()
	if s.i == len(s.b) || s.b[s.i] != ',' && s.b[s.i] != end {
		return false, s.fail("Expecting ',' delimiter")
	}
	s.i++
	return s.b[s.i-1] == end, nil
}

func (s *scanner) number() error {
	at := s.i
	if s.b[s.i] == '-' {
		s.i++
	}
	first := s.i
	if s.digits() == 0 || s.b[first] == '0' && s.i > first+1 {
		s.i = at
		return s.fail("Expecting value")
	}
	if s.i < len(s.b) && s.b[s.i] == '.' {
		s.i++
		if s.digits() == 0 {
			return s.fail("Expecting digits")
		}
	}
	if s.i < len(s.b) && (s.b[s.i] == 'e' || s.b[s.i] == 'E') {
		s.i++
		if s.i < len(s.b) && (s.b[s.i] == '+' || s.b[s.i] == '-') {
			s.i++
		}
		if s.digits() == 0 {
			return s.fail("Expecting digits")
		}
	}
	return nil
}

func (s *scanner) digits() int {
	at := s.i
	for s.i < len(s.b) && s.b[s.i] >= '0' && s.b[s.i] <= '9' {
		s.i++
	}
	return s.i - at
}

const (
	ones  = 0x0101010101010101
	highs = 0x8080808080808080
)

// str steps over a string. Strings are the bulk of a body, so eight bytes at a time are searched for a quote, a
// backslash or a control character; the lowest flagged byte is always a true one.
func (s *scanner) str() error {
	b, i := s.b, s.i+1
	for {
		for i+8 <= len(b) {
			x := binary.LittleEndian.Uint64(b[i:])
			quote, slash := x^(ones*'"'), x^(ones*'\\')
			hit := ((quote-ones)&^quote | (slash-ones)&^slash | (x-ones*0x20)&^x) & highs
			if hit != 0 {
				i += bits.TrailingZeros64(hit) / 8
				break
			}
			i += 8
		}
		for i < len(b) && b[i] != '"' && b[i] != '\\' && b[i] >= 0x20 {
			i++
		}
		s.i = i
		if i == len(b) {
			return s.fail("Unterminated string")
		}
		switch b[i] {
		case '"':
			s.i = i + 1
			return nil
		case '\\':
			n := escapeLen(b[i:])
			if n == 0 {
				return s.fail("Invalid \\escape")
			}
			i += n
		default:
			return s.fail("Invalid control character")
		}
	}
}

// escapeLen returns the length of the escape that b begins with, 0 if there is none.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if len(b) < 6 {
			return 0
		}
		for _, c := range b[2:6] {
			if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F') {
				return 0
			}
		}
		return 6
	}
	return 0
}

// Unquote returns the text of a valid JSON string (with its quotes). Without escapes it is a part of raw itself.
func Unquote(raw []byte) []byte {
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw[1 : len(raw)-1]
	}
	var text string
	_ = json.Unmarshal(raw, &text)
	return []byte(text)
}
