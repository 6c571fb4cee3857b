package openai

import (
	"encoding/binary"
	"encoding/json"
	"iter"
	"math/bits"
	"unicode/utf16"
	"unicode/utf8"
)

// This file is JSON below the members: its functions validate (RFC 8259) and store nothing. They take the text and the
// index to start at, and return the index behind the value, or that of the first invalid byte.

// fault describes a syntax error; empty: none.
type fault string

const (
	noFault        fault = ""
	faultValue     fault = "a value is expected"
	faultKey       fault = "a member name in quotes is expected"
	faultColon     fault = "a colon is expected"
	faultObjectEnd fault = "a comma or a closing brace is expected"
	faultArrayEnd  fault = "a comma or a closing bracket is expected"
	faultString    fault = "a string is not closed"
	faultControl   fault = "a string holds a control character that is not escaped"
	faultEscape    fault = "a string holds an escape that JSON does not have"
	faultDigits    fault = "a number lacks a digit"
	faultKeyUTF8   fault = "a member name is not valid UTF-8"
	faultTrailing  fault = "something follows the end"
	faultBOM       fault = "a byte order mark, which JSON must not have"
	faultTooDeep   fault = "too deep"
	faultTooMany   fault = "too many members"
	faultDuplicate fault = "duplicate member"
)

// skipSpace is small enough to be inlined; most of the time there is no space.
func skipSpace(b []byte, i int) int {
	if i < len(b) && b[i] > ' ' {
		return i
	}
	return skipSpaces(b, i)
}

func skipSpaces(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\t' || b[i] == '\r') {
		i++
	}
	return i
}

// maxNesting is the depth that levels can store.
const maxNesting = 1024

// levels is a stack with a bit for each open array (0) or object (1): nesting costs no recursion. It also has where the
// last name began in each of the outer objects.
type levels struct {
	objects [maxNesting / 64]uint64
	names   [keptNames]int32
}

// keptNames is the number of outer levels whose names are kept. Parts of a message are at most seven levels deep.
const keptNames = 16

func (l *levels) set(level int, object bool) {
	word, bit := uint(level)/64%uint(len(l.objects)), uint64(1)<<(uint(level)%64)
	if l.objects[word] &^= bit; object {
		l.objects[word] |= bit
	}
}

func (l *levels) object(level int) bool {
	return l.objects[uint(level)/64%uint(len(l.objects))]>>(uint(level)%64)&1 == 1
}

// key reads a key in the innermost of the open levels, and keeps where it begins.
func (l *levels) key(b []byte, i, open int, found *beside) (end int, f fault) {
	l.names[uint(open-1)%keptNames] = int32(i)
	end, f = skipKey(b, i)
	if found != nil && f == noFault && isMark(b[i:]) {
		found.mark(b, i, end, l, open)
	}
	return end, f
}

// skipValue validates the value at i, which may open at most room levels.
func skipValue(b []byte, i, room int) (end int, f fault) { return skipFinding(b, i, room, nil) }

// skipFinding is skipValue that also finds what is no text in the value; found may be nil.
func skipFinding(b []byte, i, room int, found *beside) (end int, f fault) {
	var stack levels
	open := 0
	for {
		if i >= len(b) {
			return i, faultValue
		}
		switch c := b[i]; {
		case c == '"':
			start := i
			if i, _, f = skipString(b, i); found != nil && f == noFault && mayBeMedium(b, start, i) {
				found.see(b, start, i, &stack, open)
			}
		case c-'0' <= 9 || c == '-':
			if open > 0 && !stack.object(open-1) {
				i = skipIntegers(b, i)
			}
			i, f = skipNumber(b, i)
		case c == '{' || c == '[':
			if open == room {
				return i, faultTooDeep
			}
			if c == '[' && found != nil && open+2+maxPartNesting <= room {
				if end, ok := found.onlyText(b, i, &stack, open); ok {
					i = end
					break
				}
			}
			stack.set(open, c == '{')
			open++
			// in ASCII, } follows { at a distance of two, and ] follows [
			if i = skipSpace(b, i+1); i < len(b) && b[i] == c+2 {
				break
			}
			if c == '{' {
				i, f = stack.key(b, i, open, found)
			}
			if f != noFault {
				return i, f
			}
			continue
		default:
			i, f = skipLiteral(b, i)
		}
		if f != noFault {
			return i, f
		}
		if i, open, f = closeLevels(b, i, open, &stack, found); f != noFault || open == 0 {
			return i, f
		}
	}
}

// Skip returns the index behind the JSON value at i, which it validates, and behind white space that follows.
func Skip(b []byte, i int) (end int, ok bool) {
	end, f := skipValue(b, i, maxNesting)
	return skipSpace(b, end), f == noFault
}

// closeLevels moves on from the end of a value: over the levels that end there, to the start of the next value. If no
// open level is left, there is no next value.
func closeLevels(b []byte, i, open int, stack *levels, found *beside) (end, stillOpen int, f fault) {
	for open > 0 {
		object := stack.object(open - 1)
		if i = skipSpace(b, i); i >= len(b) {
			return i, open, unclosed(object)
		}
		switch b[i] {
		case ',':
			i = skipSpace(b, i+1)
			if object {
				i, f = stack.key(b, i, open, found)
			}
			return i, open, f
		case '}':
			if !object {
				return i, open, faultArrayEnd
			}
		case ']':
			if object {
				return i, open, faultObjectEnd
			}
		default:
			return i, open, unclosed(object)
		}
		i++
		open--
	}
	return i, 0, noFault
}

func unclosed(object bool) fault {
	if object {
		return faultObjectEnd
	}
	return faultArrayEnd
}

// skipKey reads a key, the colon, and the space around it.
func skipKey(b []byte, i int) (int, fault) {
	if i >= len(b) || b[i] != '"' {
		return i, faultKey
	}
	i, _, f := skipString(b, i)
	if f != noFault {
		return i, f
	}
	return skipColon(b, i)
}

func skipColon(b []byte, i int) (int, fault) {
	i = skipSpace(b, i)
	if i >= len(b) || b[i] != ':' {
		return i, faultColon
	}
	return skipSpace(b, i+1), noFault
}

// skipString reads the string whose opening quote is at i. It looks at eight bytes at a time for quotes, backslashes
// and control characters.
func skipString(b []byte, i int) (end int, escaped bool, f fault) {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	i++
	for {
		for i+8 <= len(b) {
			w := binary.LittleEndian.Uint64(b[i:])
			// A byte below n borrows in x-n*ones, so its high bit rises; for the lowest such byte that is exact.
			// Flipping bit 1 takes the quote (0x22) to 0x20, next to the control characters, and no other byte below
			// 0x21.
			low, slash := w^ones*0x02, w^ones*'\\'
			if hit := ((low - ones*0x21) | (slash - ones)) &^ w & highs; hit != 0 {
				i += bits.TrailingZeros64(hit) / 8
				break
			}
			i += 8
		}
		if i >= len(b) {
			return len(b), escaped, faultString
		}
		switch c := b[i]; {
		case c == '"':
			return i + 1, escaped, noFault
		case c == '\\':
			escaped = true
			n := escapeLen(b[i:])
			if n == 0 {
				return i, escaped, faultEscape
			}
			i += n
		case c < 0x20:
			return i, escaped, faultControl
		default:
			i++ // among the last seven bytes of the text
		}
	}
}

// escapeLen returns the length of the escape at the start of b, or 0. A surrogate may stand alone.
func escapeLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	const letters = 1<<('\\'-64) | 1<<('b'-64) | 1<<('f'-64) | 1<<('n'-64) | 1<<('r'-64) | 1<<('t'-64)
	switch c := b[1]; {
	case c == '"', c == '/', c-64 < 64 && letters>>(c-64)&1 == 1:
		return 2
	case c == 'u':
		if _, ok := hex4(b[2:]); ok {
			return 6
		}
	}
	return 0
}

func hex4(b []byte) (r rune, ok bool) {
	if len(b) < 4 {
		return 0, false
	}
	for _, c := range b[:4] {
		switch {
		case c-'0' <= 9:
			c -= '0'
		case c|0x20-'a' <= 5:
			c = c | 0x20 - 'a' + 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

func skipNumber(b []byte, i int) (int, fault) {
	if b[i] == '-' {
		i++
	}
	start := i
	if i = skipDigits(b, i); i == start {
		return i, faultDigits
	}
	if b[start] == '0' {
		i = start + 1 // nothing may follow a leading zero; the caller rejects it
	}
	if i < len(b) && b[i] == '.' {
		start = i + 1
		if i = skipDigits(b, start); i == start {
			return i, faultDigits
		}
	}
	if i < len(b) && b[i]|0x20 == 'e' {
		if i++; i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		start = i
		if i = skipDigits(b, start); i == start {
			return i, faultDigits
		}
	}
	return i, noFault
}

// skipIntegers skips short plain integers, as long as a comma and a digit follow each: some bodies are mostly lists of
// token ids. It validates nothing else: it always stops at the start of a number.
func skipIntegers(b []byte, i int) int {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	for i+10 <= len(b) {
		w := binary.LittleEndian.Uint64(b[i:]) ^ ones*'0'
		other := (w&^highs + ones*(0x7F-9) | w) & highs // the high bit rises in every byte that is not a digit
		n := bits.TrailingZeros64(other) / 8
		if n == 0 || n == 8 || b[i] == '0' || b[i+n] != ',' {
			return i
		}
		next := i + n + 1
		if b[next] == ' ' {
			next++
		}
		if b[next]-'0' > 9 {
			return i
		}
		i = next
	}
	return i
}

func skipDigits(b []byte, i int) int {
	for i < len(b) && b[i]-'0' <= 9 {
		i++
	}
	return i
}

func skipLiteral(b []byte, i int) (int, fault) {
	word := "null"
	switch b[i] {
	case 't':
		word = "true"
	case 'f':
		word = "false"
	}
	if len(b)-i < len(word) || string(b[i:i+len(word)]) != word {
		return i, faultValue
	}
	return i + len(word), noFault
}

// appendUnescaped appends the inside of a validated string without its escapes. A surrogate that stands alone becomes
// the three bytes that UTF-8 would have for it. Valid UTF-8 never has these, so different strings stay different.
func appendUnescaped(dst, inside []byte) []byte {
	for i := 0; i < len(inside); {
		c := inside[i]
		if c != '\\' {
			dst = append(dst, c)
			i++
			continue
		}
		if inside[i+1] != 'u' {
			dst = append(dst, unescaped(inside[i+1]))
			i += 2
			continue
		}
		r, _ := hex4(inside[i+2:])
		i += 6
		if utf16.IsSurrogate(r) {
			if len(inside)-i >= 6 && inside[i] == '\\' && inside[i+1] == 'u' {
				low, _ := hex4(inside[i+2:])
				if both := utf16.DecodeRune(r, low); both != utf8.RuneError {
					dst = utf8.AppendRune(dst, both)
					i += 6
					continue
				}
			}
			dst = append(dst, 0xE0|byte(r>>12), 0x80|byte(r>>6)&0x3F, 0x80|byte(r)&0x3F)
			continue
		}
		dst = utf8.AppendRune(dst, r)
	}
	return dst
}

// unescaped returns the byte that a one-letter escape stands for.
func unescaped(letter byte) byte {
	switch letter {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	default:
		return letter
	}
}

// elements iterates over the values of a validated array. Anything else has none.
func elements(array []byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		if len(array) == 0 || array[0] != '[' {
			return
		}
		for i := skipSpace(array, 1); array[i] != ']'; {
			end, _ := skipValue(array, i, maxNesting)
			if !yield(array[i:end:end]) {
				return
			}
			i = skipComma(array, end)
		}
	}
}

// pairs iterates over the members of a validated object: keys without escapes, values as they stand. Anything else has
// none.
func pairs(object []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(key, value []byte) bool) {
		if len(object) == 0 || object[0] != '{' {
			return
		}
		for i := skipSpace(object, 1); object[i] != '}'; {
			keyEnd, _, _ := skipString(object, i)
			start, _ := skipColon(object, keyEnd)
			end, _ := skipValue(object, start, maxNesting)
			if !yield(unescapedKey(object[i+1:keyEnd-1]), object[start:end:end]) {
				return
			}
			i = skipComma(object, end)
		}
	}
}

// skipComma moves from the end of a value to the next value or the closing bracket.
func skipComma(b []byte, i int) int {
	if i = skipSpace(b, i); b[i] == ',' {
		i = skipSpace(b, i+1)
	}
	return i
}

// topValue returns the value of the top member with this name, nil if there is none. Names with escapes are not found.
func (d *document) topValue(name string) []byte {
	for i := range d.members[scopeTop] {
		if m := &d.members[scopeTop][i]; string(d.key(m)) == name {
			return d.text(m)
		}
	}
	return nil
}

// AppendQuoted appends a text without escapes as a JSON string.
func AppendQuoted(dst, text []byte) []byte {
	quoted, _ := json.Marshal(string(text)) // cannot fail for a string
	return append(dst, quoted...)
}
