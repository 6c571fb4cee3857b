package kvevents

import (
	"encoding/binary"
	"math"
	"slices"
)

// cursor reads MessagePack in place. After the first mistake it is bad, and everything it reads is zero. Every
// header may be longer than it must be: msgspec writes maps of eight entries with a 16-bit length.
type cursor struct {
	b   []byte
	at  int
	bad bool
}

// maxDepth bounds the nesting of skipped values.
const maxDepth = 32

func (c *cursor) fail() { c.bad = true }

func (c *cursor) byte() byte {
	if c.bad || c.at >= len(c.b) {
		c.fail()
		return 0
	}
	c.at++
	return c.b[c.at-1]
}

// take returns the next n bytes.
func (c *cursor) take(n int) []byte {
	if c.bad || n < 0 || n > len(c.b)-c.at {
		c.fail()
		return nil
	}
	c.at += n
	return c.b[c.at-n : c.at]
}

// number reads an unsigned big-endian number of n bytes.
func (c *cursor) number(n int) uint64 {
	var v uint64
	for _, b := range c.take(n) {
		v = v<<8 | uint64(b)
	}
	return v
}

// null reads a nil, if there is one.
func (c *cursor) null() bool {
	if !c.bad && c.at < len(c.b) && c.b[c.at] == 0xc0 {
		c.at++
		return true
	}
	return false
}

// integer reads an integer of any length as 64 bits, negative ones as two's complement.
func (c *cursor) integer() uint64 {
	switch t := c.byte(); {
	case t < 0x80:
		return uint64(t)
	case t >= 0xe0:
		return uint64(int64(int8(t)))
	case t >= 0xcc && t <= 0xcf:
		return c.number(1 << (t - 0xcc))
	case t == 0xd0:
		return uint64(int64(int8(c.number(1))))
	case t == 0xd1:
		return uint64(int64(int16(c.number(2))))
	case t == 0xd2:
		return uint64(int64(int32(c.number(4))))
	case t == 0xd3:
		return c.number(8)
	}
	c.fail()
	return 0
}

// float reads a number as a float.
func (c *cursor) float() float64 {
	if c.bad || c.at >= len(c.b) {
		c.fail()
		return 0
	}
	switch c.b[c.at] {
	case 0xca:
		c.at++
		return float64(math.Float32frombits(uint32(c.number(4))))
	case 0xcb:
		c.at++
		return math.Float64frombits(c.number(8))
	}
	return float64(int64(c.integer()))
}

// size returns the length of a string, a byte string, an array or a map, given its header's type.
func (c *cursor) size(n int) int {
	v := c.number(n)
	if v > uint64(len(c.b)) { // every element takes at least a byte
		c.fail()
		return 0
	}
	return int(v)
}

// array reads the header of an array.
func (c *cursor) array() int {
	switch t := c.byte(); {
	case t&0xf0 == 0x90:
		return int(t & 0x0f)
	case t == 0xdc:
		return c.size(2)
	case t == 0xdd:
		return c.size(4)
	}
	c.fail()
	return 0
}

// isArray reports whether an array comes next.
func (c *cursor) isArray() bool {
	if c.bad || c.at >= len(c.b) {
		return false
	}
	t := c.b[c.at]
	return t&0xf0 == 0x90 || t == 0xdc || t == 0xdd
}

// table reads the header of a map.
func (c *cursor) table() int {
	switch t := c.byte(); {
	case t&0xf0 == 0x80:
		return int(t & 0x0f)
	case t == 0xde:
		return c.size(2)
	case t == 0xdf:
		return c.size(4)
	}
	c.fail()
	return 0
}

// text reads a string or a byte string; text is false for the latter. Other values are a mistake.
func (c *cursor) text() (s []byte, text bool) {
	switch t := c.byte(); {
	case t&0xe0 == 0xa0:
		return c.take(int(t & 0x1f)), true
	case t >= 0xd9 && t <= 0xdb:
		return c.take(c.size(1 << (t - 0xd9))), true
	case t >= 0xc4 && t <= 0xc6:
		return c.take(c.size(1 << (t - 0xc4))), false
	}
	c.fail()
	return nil, false
}

// isText reports whether a string or a byte string comes next.
func (c *cursor) isText() bool {
	if c.bad || c.at >= len(c.b) {
		return false
	}
	t := c.b[c.at]
	return t&0xe0 == 0xa0 || t >= 0xd9 && t <= 0xdb || t >= 0xc4 && t <= 0xc6
}

// skip passes over one value of any kind.
func (c *cursor) skip() { c.skipNested(maxDepth) }

func (c *cursor) skipNested(depth int) {
	if depth == 0 {
		c.fail()
		return
	}
	values := 0
	switch t := c.byte(); {
	case t < 0x80, t >= 0xe0, t == 0xc0, t == 0xc2, t == 0xc3: // small integers, nil, booleans
	case t&0xf0 == 0x80:
		values = 2 * int(t&0x0f)
	case t&0xf0 == 0x90:
		values = int(t & 0x0f)
	case t&0xe0 == 0xa0:
		c.take(int(t & 0x1f))
	case t >= 0xc4 && t <= 0xc6:
		c.take(c.size(1 << (t - 0xc4)))
	case t >= 0xc7 && t <= 0xc9: // extensions
		c.take(c.size(1<<(t-0xc7)) + 1)
	case t == 0xca:
		c.take(4)
	case t == 0xcb:
		c.take(8)
	case t >= 0xcc && t <= 0xcf:
		c.take(1 << (t - 0xcc))
	case t >= 0xd0 && t <= 0xd3:
		c.take(1 << (t - 0xd0))
	case t >= 0xd4 && t <= 0xd8:
		c.take(1<<(t-0xd4) + 1)
	case t >= 0xd9 && t <= 0xdb:
		c.take(c.size(1 << (t - 0xd9)))
	case t == 0xdc, t == 0xdd:
		values = c.size(2 << (t - 0xdc))
	case t == 0xde, t == 0xdf:
		values = 2 * c.size(2<<(t-0xde))
	default: // 0xc1 is not MessagePack
		c.fail()
	}
	for ; values > 0 && !c.bad; values-- {
		c.skipNested(depth - 1)
	}
}

// tokens reads an array of token ids and appends them to dst, four bytes each, little endian. Numbers of one, two and
// four bytes come in an order that no branch predictor can learn, so the code has no branch on the size.
func (c *cursor) tokens(dst []byte) []byte {
	n, from := c.array(), len(dst)
	dst = slices.Grow(dst, 4*n)[:from+4*n]
	for out := dst[from:]; len(out) >= 4 && !c.bad; out = out[4:] {
		id := uint64(0)
		if rest := c.b[c.at:]; len(rest) >= 8 && (rest[0] < 0x80 || rest[0]-0xcc < 3) {
			header := uint(rest[0] >> 7)                     // the number follows its type
			bytes := uint(1) << (uint(rest[0]) * header & 3) // 0xcc: 1, 0xcd: 2, 0xce: 4
			id = binary.BigEndian.Uint64(rest) << (header * 8 & 63) >> ((64 - bytes*8) & 63)
			c.at += int(header + bytes)
		} else if id = c.integer(); id > math.MaxUint32 {
			c.fail()
		}
		binary.LittleEndian.PutUint32(out, uint32(id))
	}
	return dst
}
