package envoywire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// This file reads protobuf wire format directly from gRPC's receive buffers. The messages of ext_proc carry whole
// prompts; generated types would copy each of them twice before the first byte is read.

var errWire = errors.New("extproc: malformed protobuf")

// Wire types of the protobuf encoding that occur in Envoy's messages.
const (
	wireVarint = 0
	wireI64    = 1
	wireBytes  = 2
	wireI32    = 5
)

// cursor walks over the bytes of one message, which gRPC hands over as a list of buffers.
type cursor struct {
	buffers mem.BufferSlice
	cur     []byte // unread rest of the current buffer
	next    int    // index of the following buffer
	pos     int    // bytes consumed so far
	end     int    // bytes in total
	err     error
}

func newCursor(data mem.BufferSlice) cursor {
	return cursor{buffers: data, end: data.Len()}
}

// fill makes cur non-empty, or sets err at the end of the data.
func (c *cursor) fill() bool {
	for len(c.cur) == 0 {
		if c.next == len(c.buffers) {
			c.fail()
			return false
		}
		c.cur = c.buffers[c.next].ReadOnlyData()
		c.next++
	}
	return true
}

func (c *cursor) fail() {
	if c.err == nil {
		c.err = fmt.Errorf("%w at byte %d of %d", errWire, c.pos, c.end)
	}
	c.cur, c.next, c.pos = nil, len(c.buffers), c.end
}

// varint reads a base-128 integer; on failure it returns 0 and sets err.
func (c *cursor) varint() uint64 {
	var v uint64
	for shift := uint(0); shift < 64; shift += 7 {
		if len(c.cur) == 0 && !c.fill() {
			return 0
		}
		b := c.cur[0]
		c.cur = c.cur[1:]
		c.pos++
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return v
		}
	}
	c.fail()
	return 0
}

// field reads the next tag before end. It returns 0 at the end of the enclosing message, or if it is malformed.
func (c *cursor) field(end int) (number int, wire int) {
	if c.pos >= end || c.err != nil {
		if c.pos > end {
			c.fail()
		}
		return 0, 0
	}
	tag := c.varint()
	if c.err != nil || tag>>3 == 0 || tag>>3 > 1<<29-1 {
		c.fail()
		return 0, 0
	}
	return int(tag >> 3), int(tag & 7)
}

// length reads the length of a bytes field and returns where the field ends, at most limit.
func (c *cursor) length(limit int) int {
	n := c.varint()
	if c.err == nil && n > uint64(limit-c.pos) {
		c.fail()
	}
	if c.err != nil {
		return c.pos
	}
	return c.pos + int(n)
}

// skip steps over the value of a field whose tag was just read.
func (c *cursor) skip(wire, limit int) {
	switch wire {
	case wireVarint:
		c.varint()
	case wireI64:
		c.discard(c.pos+8, limit)
	case wireI32:
		c.discard(c.pos+4, limit)
	case wireBytes:
		c.discard(c.length(limit), limit)
	default: // groups are not part of proto3
		c.fail()
	}
}

func (c *cursor) discard(end, limit int) {
	if end > limit {
		c.fail()
	}
	for c.pos < end && c.err == nil {
		if !c.fill() {
			return
		}
		n := min(len(c.cur), end-c.pos)
		c.cur = c.cur[n:]
		c.pos += n
	}
}

// appendTo appends the bytes up to end to dst.
func (c *cursor) appendTo(dst []byte, end int) []byte {
	for c.pos < end && c.err == nil {
		if !c.fill() {
			return dst
		}
		n := min(len(c.cur), end-c.pos)
		dst = append(dst, c.cur[:n]...)
		c.cur = c.cur[n:]
		c.pos += n
	}
	return dst
}

// text reads a bytes field into the arena and returns that part of it.
func (c *cursor) text(arena *[]byte, limit int) []byte {
	end := c.length(limit)
	start := len(*arena)
	*arena = c.appendTo(*arena, end)
	return (*arena)[start:len(*arena):len(*arena)]
}

// finish returns the error, if there was one.
func (c *cursor) finish() error {
	if c.err == nil && c.pos != c.end {
		c.fail()
	}
	return c.err
}

// Writing: sizes first, then bytes. All helpers append to a buffer of sufficient capacity.

func varintLen(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

// bytesLen returns the size of a bytes field with a one-byte tag and n bytes of content.
func bytesLen(n int) int { return 1 + varintLen(uint64(n)) + n }

func appendTag(b []byte, number, wire int) []byte { return append(b, byte(number<<3|wire)) }

// appendLen opens a bytes field of n bytes; the caller appends them.
func appendLen(b []byte, number, n int) []byte {
	return binary.AppendUvarint(appendTag(b, number, wireBytes), uint64(n))
}

func appendText[T string | []byte](b []byte, number int, s T) []byte {
	return append(appendLen(b, number, len(s)), s...)
}

// Codec encodes [Reply] and decodes [Message] and [LogBatch] in place, and leaves all other messages to gRPC's protobuf
// codec. It belongs to one server (grpc.ForceServerCodecV2) and is not registered for the process.
type Codec struct {
	fallback encoding.CodecV2
}

// NewCodec returns the codec.
func NewCodec() Codec { return Codec{encoding.GetCodecV2(proto.Name)} }

// Name implements encoding.CodecV2.
func (Codec) Name() string { return proto.Name }

// Marshal implements encoding.CodecV2.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	if r, ok := v.(*Reply); ok {
		return r.Marshal(), nil
	}
	return c.fallback.Marshal(v)
}

// Unmarshal implements encoding.CodecV2.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch m := v.(type) {
	case *Message:
		return m.Unmarshal(data)
	case *LogBatch:
		return m.Unmarshal(data)
	}
	return c.fallback.Unmarshal(data, v)
}
