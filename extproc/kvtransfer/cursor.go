package kvtransfer

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
)

// cursor walks over validated JSON. On anything else it returns errors, and it never reads outside b.
type cursor struct {
	b []byte
	i int
}

var errNotJSON = errors.New("not JSON")

func (c *cursor) at(x byte) bool { return c.i < len(c.b) && c.b[c.i] == x }

func (c *cursor) take(x byte) bool {
	if !c.at(x) {
		return false
	}
	c.i++
	return true
}

func (c *cursor) space() {
	for c.i < len(c.b) {
		switch c.b[c.i] {
		case ' ', '\t', '\n', '\r':
			c.i++
		default:
			return
		}
	}
}

// next moves to the next element of a list or object; false at its end.
func (c *cursor) next(first bool, end byte) (bool, error) {
	c.space()
	if c.take(end) {
		return false, nil
	}
	if !first && !c.take(',') {
		return false, fmt.Errorf("at byte %d, something that is not a list: %w", c.i, errNotJSON)
	}
	c.space()
	return true, nil
}

// members visits the members of P's answer, or of another object with nothing but space around it.
func members(object []byte, visit func(key, value []byte, at int) error) error {
	c := cursor{b: object}
	c.space()
	return c.object(visit)
}

// object visits the members of the object at the cursor: the unescaped key, the value's text, and its offset.
func (c *cursor) object(visit func(key, value []byte, at int) error) error {
	if !c.take('{') {
		return errors.New("not an object")
	}
	for first := true; ; first = false {
		more, err := c.next(first, '}')
		if err != nil || !more {
			return err
		}
		key, ok := c.key()
		if !ok {
			return fmt.Errorf("at byte %d: %w", c.i, errNotJSON)
		}
		at := c.i
		if !c.value() {
			return fmt.Errorf("at byte %d: %w", c.i, errNotJSON)
		}
		if err := visit(key, c.b[at:c.i:c.i], at); err != nil {
			return err
		}
	}
}

// key reads a key and the colon behind it.
func (c *cursor) key() (key []byte, ok bool) {
	start := c.i
	if !c.at('"') || !c.text() {
		return nil, false
	}
	key = c.b[start+1 : c.i-1]
	if bytes.IndexByte(key, '\\') >= 0 {
		var s string
		if json.Unmarshal(c.b[start:c.i], &s) != nil {
			return nil, false
		}
		key = []byte(s)
	}
	c.space()
	if !c.take(':') {
		return nil, false
	}
	c.space()
	return key, true
}

// text skips the string that c is at.
func (c *cursor) text() bool {
	for c.i++; c.i < len(c.b); c.i++ {
		switch c.b[c.i] {
		case '"':
			c.i++
			return true
		case '\\':
			c.i++
		}
	}
	return false
}

// ones and highs have the lowest and the highest bit of each byte of a word, to look at eight bytes at a time.
const ones, highs = 0x0101010101010101, 0x8080808080808080

// plain skips eight bytes at a time that are no quote, bracket or brace, nor a letter: lists of numbers, which are most
// of P's answer to a long prompt. It leaves at least one byte.
func (c *cursor) plain() {
	for c.i+8 < len(c.b) {
		w := binary.LittleEndian.Uint64(c.b[c.i:])
		// brackets, braces and letters have the bit 0x40; a quote is zero in the second word
		if quote := w ^ ones*'"'; w&(ones*0x40)|(quote-ones)&^quote&highs != 0 {
			return
		}
		c.i += 8
	}
}

// value skips a value of any kind. It does not recurse, so deep nesting is harmless.
func (c *cursor) value() bool {
	start := c.i
	for depth := 0; c.i < len(c.b); {
		if depth > 0 {
			c.plain()
		}
		switch c.b[c.i] {
		case '"':
			if !c.text() {
				return false
			}
			if depth == 0 {
				return true
			}
			continue
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return c.i > start
			}
			if depth--; depth == 0 {
				c.i++
				return true
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return c.i > start
			}
		}
		c.i++
	}
	return false
}
