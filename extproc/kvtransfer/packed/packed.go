// Package packed writes text with long lists of integers in a few bytes: a hand-over's block ids have to fit a header.
package packed

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"strconv"

	"github.com/cespare/xxhash/v2"
)

// A hand-over is a few hundred bytes and one long list of block ids, written in decimal: 8,192 of them
// take 47 KB, and have to fit a header. Pack finds runs of integers with the same separator between them, in any
// context, and writes their bits; everything else stays. It knows nothing of JSON, so nothing can get lost: white
// space, numbers that only look like integers and strings that look like lists all come back byte for byte.
//
//	text    = 0x00 literal-bytes                 not compressible
//	        | 0x01 length checksum token*        length: uvarint, of the text; checksum: its xxhash64, 8 bytes
//	token   = size<<1 literal-bytes              uvarint
//	        | size<<1|1 separator before chunk* 0x00
//	                                             uvarint; size is the separator's. before: varint, what the first
//	                                             difference is to
//	chunk   = count shape base bits              count: 1 to 128 integers; shape: width in bits, with 0x80 if
//	                                             differences are written; base: what to add to each (uvarint,
//	                                             or varint for differences); bits: little endian, padded to
//	                                             bytes
//
// Random block ids cost their width (16 bits below 65,536), consecutive ones next to nothing.
const (
	packedNot  = 0
	packedRuns = 1

	chunkLen      = 128
	minRun        = 16 // integers; a shorter run saves nothing
	maxIntDigits  = 9  // so that an integer, and a difference of two, fits 32 bits
	maxSeparator  = 16
	shapeIsDeltas = 0x80
	maxWidth      = 31
)

var errPacked = errors.New("packed text is broken")

// Pack appends text, packed, to dst.
func Pack(dst, text []byte) []byte {
	start := len(dst)
	dst = append(dst, packedRuns)
	dst = binary.AppendUvarint(dst, uint64(len(text)))
	dst = binary.LittleEndian.AppendUint64(dst, xxhash.Sum64(text))
	literal, runs := 0, 0
	for i := 0; i < len(text); {
		if text[i]-'0' > 9 {
			i++
			continue
		}
		end, packed := packRun(dst, text, literal, i)
		if packed != nil {
			dst, literal = packed, end
			runs++
		}
		i = end
	}
	if dst = appendLiteral(dst, text[literal:]); runs == 0 || len(dst)-start > len(text) {
		return append(append(dst[:start], packedNot), text...)
	}
	return dst
}

func appendLiteral(dst, text []byte) []byte {
	if len(text) == 0 {
		return dst
	}
	return append(binary.AppendUvarint(dst, uint64(len(text))<<1), text...)
}

// packRun packs the run of integers at text[i:], after the literal before it. It returns the index behind the run;
// packed is nil if there is no run.
func packRun(dst, text []byte, literal, i int) (end int, packed []byte) {
	var chunk [chunkLen]uint32
	var ok bool
	if chunk[0], end, ok = integer(text, i); !ok {
		return end, nil
	}
	sep := separator(text[end:])
	if len(sep) == 0 {
		return end, nil
	}
	n, end := fill(&chunk, 1, text, end, sep)
	if n < minRun {
		return end, nil
	}
	dst = appendLiteral(dst, text[literal:i])
	dst = append(binary.AppendUvarint(dst, uint64(len(sep))<<1|1), sep...)
	last := 2*int64(chunk[0]) - int64(chunk[1]) // so that the first difference is like the second
	dst = binary.AppendVarint(dst, last)
	for n > 0 {
		dst = appendChunk(dst, chunk[:n], last)
		last = int64(chunk[n-1])
		n, end = fill(&chunk, 0, text, end, sep)
	}
	return end, append(dst, 0)
}

// integer reads the digits at text[i:] if printing the integer gives the same text: no leading zeros, and not too
// long.
func integer(text []byte, i int) (v uint32, end int, ok bool) {
	rest := text[i:]
	n := 0
	for ; n < len(rest) && rest[n]-'0' <= 9; n++ {
		v = v*10 + uint32(rest[n]-'0')
	}
	return v, i + n, n == 1 || n > 1 && n <= maxIntDigits && rest[0] != '0'
}

// separator returns the comma at the start of text and the white space behind it, if an integer follows.
func separator(text []byte) []byte {
	if len(text) == 0 || text[0] != ',' {
		return nil
	}
	for i := 1; i < len(text) && i <= maxSeparator; i++ {
		switch c := text[i]; {
		case c == ' ' || c == '\n' || c == '\t' || c == '\r':
		case c-'0' <= 9:
			return text[:i]
		default:
			return nil
		}
	}
	return nil
}

// fill reads integers, each after a separator, into chunk[n:] until it is full or anything else follows.
func fill(chunk *[chunkLen]uint32, n int, text []byte, end int, sep []byte) (int, int) {
	for n < chunkLen && len(text)-end > len(sep) {
		if text[end] != ',' || len(sep) > 1 && string(text[end:end+len(sep)]) != string(sep) {
			break
		}
		v, next, ok := integer(text, end+len(sep))
		if !ok {
			break
		}
		chunk[n] = v
		n, end = n+1, next
	}
	return n, end
}

// appendChunk writes integers or their differences, whichever is narrower. last is the integer before them.
func appendChunk(dst []byte, chunk []uint32, last int64) []byte {
	low, high := int64(chunk[0]), int64(chunk[0])
	lowDelta, highDelta := low-last, low-last
	previous := last
	for _, v := range chunk {
		x := int64(v)
		low, high = min(low, x), max(high, x)
		lowDelta, highDelta = min(lowDelta, x-previous), max(highDelta, x-previous)
		previous = x
	}
	dst = append(dst, byte(len(chunk)))
	width, deltaWidth := bits.Len64(uint64(high-low)), bits.Len64(uint64(highDelta-lowDelta))
	base, step := low, int64(0)
	if deltaWidth < width {
		width, base, step = deltaWidth, lowDelta, 1
		dst = append(dst, byte(width)|shapeIsDeltas)
		dst = binary.AppendVarint(dst, base)
	} else {
		dst = append(dst, byte(width))
		dst = binary.AppendUvarint(dst, uint64(base))
	}
	var acc uint64
	var held int // bits in acc, below 32 between integers
	previous = last
	for _, v := range chunk {
		acc |= uint64(int64(v)-step*previous-base) << held
		if held += width; held >= 32 {
			dst = binary.LittleEndian.AppendUint32(dst, uint32(acc))
			acc, held = acc>>32, held-32
		}
		previous = int64(v)
	}
	for ; held > 0; held -= 8 {
		dst = append(dst, byte(acc))
		acc >>= 8
	}
	return dst
}

// Unpack appends to dst the text that packed stands for, at most limit bytes. It never panics on malformed input, and
// never returns another text: a checksum guards against releases that decode differently.
func Unpack(dst, packed []byte, limit int) ([]byte, error) {
	if len(packed) == 0 {
		return dst, errPacked
	}
	kind, packed := packed[0], packed[1:]
	if kind == packedNot {
		if len(packed) > limit {
			return dst, fmt.Errorf("%d bytes of text, more than %d", len(packed), limit)
		}
		return append(dst, packed...), nil
	}
	length, n := binary.Uvarint(packed)
	if kind != packedRuns || n <= 0 || length > uint64(limit) || len(packed) < n+8 {
		return dst, errPacked
	}
	u := unpacker{in: packed[n+8:], max: len(dst) + int(length)}
	u.out = append(make([]byte, 0, u.max), dst...)
	for len(u.in) > 0 {
		if !u.token() {
			return dst, errPacked
		}
	}
	if len(u.out) != u.max || xxhash.Sum64(u.out[len(dst):]) != binary.LittleEndian.Uint64(packed[n:]) {
		return dst, errPacked
	}
	return u.out, nil
}

type unpacker struct {
	in, out []byte
	max     int // of out
}

func (u *unpacker) token() bool {
	header, n := binary.Uvarint(u.in)
	if n <= 0 || header>>1 > uint64(len(u.in)-n) {
		return false
	}
	size := int(header >> 1)
	text := u.in[n : n+size]
	u.in = u.in[n+size:]
	if header&1 == 1 {
		return u.run(text)
	}
	u.out = append(u.out, text...)
	return len(u.out) <= u.max
}

// run appends a run of integers with a separator between them.
func (u *unpacker) run(sep []byte) bool {
	last, size := binary.Varint(u.in)
	if len(sep) == 0 || len(sep) > maxSeparator || size <= 0 || last < -2e9 || last > 2e9 {
		return false
	}
	u.in = u.in[size:]
	var chunk [chunkLen]uint32
	out, first := u.out, true
	for {
		if len(u.in) == 0 {
			return false
		}
		n := int(u.in[0])
		if u.in = u.in[1:]; n == 0 {
			u.out = out
			return !first
		}
		if n > chunkLen || !u.chunk(chunk[:n], last) {
			return false
		}
		for i, v := range chunk[:n] {
			if !first || i > 0 {
				if len(sep) == 1 {
					out = append(out, sep[0])
				} else {
					out = append(out, sep...)
				}
			}
			out = appendInteger(out, v)
		}
		if first, last = false, int64(chunk[n-1]); len(out) > u.max {
			return false
		}
	}
}

// chunk reads the integers of a chunk, whose count is known.
func (u *unpacker) chunk(chunk []uint32, last int64) bool {
	if len(u.in) == 0 {
		return false
	}
	shape := u.in[0]
	width := int(shape &^ shapeIsDeltas)
	var base, step int64
	var n int
	if shape&shapeIsDeltas != 0 {
		step = 1
		base, n = binary.Varint(u.in[1:])
	} else {
		var b uint64
		b, n = binary.Uvarint(u.in[1:])
		base = int64(b)
	}
	size := (len(chunk)*width + 7) / 8
	if n <= 0 || width > maxWidth || len(u.in) < 1+n+size {
		return false
	}
	var in [chunkLen*4 + 8]byte // eight bytes can be read at any offset
	copy(in[:], u.in[1+n:1+n+size])
	u.in = u.in[1+n+size:]
	mask := uint64(1)<<width - 1
	previous := last
	for i := range chunk {
		at := i * width
		v := int64(binary.LittleEndian.Uint64(in[at>>3:])>>(at&7)&mask) + base + step*previous
		if uint64(v) >= 1e9 {
			return false
		}
		chunk[i], previous = uint32(v), v
	}
	return true
}

// appendInteger appends v, below 1e9, in decimal. It takes a third of strconv's time, which would be most of opening a
// long hand-over.
func appendInteger(dst []byte, v uint32) []byte {
	const pairs = "00010203040506070809" + "10111213141516171819" + "20212223242526272829" +
		"30313233343536373839" + "40414243444546474849" + "50515253545556575859" + "60616263646566676869" +
		"70717273747576777879" + "80818283848586878889" + "90919293949596979899"
	start := len(dst)
	if cap(dst)-start < maxIntDigits {
		return strconv.AppendUint(dst, uint64(v), 10)
	}
	last := start
	for limit := uint32(10); last-start < maxIntDigits-1 && v >= limit; limit *= 10 {
		last++
	}
	dst = dst[:last+1]
	for ; v >= 10; last -= 2 {
		rest := v / 100
		pair := (v - rest*100) * 2
		dst[last-1], dst[last] = pairs[pair], pairs[pair+1]
		v = rest
	}
	if last == start { // an odd number of digits
		dst[last] = byte('0' + v)
	}
	return dst
}
