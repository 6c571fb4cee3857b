package openai

import (
	"encoding/json"
	"iter"
)

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

// appendQuoted appends, as a JSON string, a key that pairs has unescaped.
func appendQuoted(dst, key []byte) []byte {
	quoted, _ := json.Marshal(string(key)) // cannot fail for a string
	return append(dst, quoted...)
}
