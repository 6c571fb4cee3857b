package jsontext

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// The functions below walk over JSON that ScanObject has validated, so they do not check again.

// skip returns the index after the value that starts at b[i].
func skip(b []byte, i int) int {
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		depth := 0
		for {
			switch b[i] {
			case '"':
				i = skipString(b, i)
				continue
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
			i++
		}
	}
	for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] > ' ' {
		i++
	}
	return i
}

func skipString(b []byte, i int) int {
	for i++; ; i++ {
		i += bytes.IndexByte(b[i:], '"')
		back := i - 1
		for b[back] == '\\' {
			back--
		}
		if (i-back)%2 == 1 {
			return i + 1
		}
	}
}

// Next skips space and the separators of arrays and objects.
func Next(b []byte, i int) int {
	for i < len(b) && (b[i] <= ' ' || b[i] == ',' || b[i] == ':') {
		i++
	}
	return i
}

// EachElement calls fn for every element of a valid array until it returns false.
func EachElement(raw []byte, fn func(elem []byte) bool) {
	for i := Next(raw, 1); raw[i] != ']'; i = Next(raw, i) {
		end := skip(raw, i)
		if !fn(raw[i:end]) {
			return
		}
		i = end
	}
}

// EachMember calls fn for every member of a valid object.
func EachMember(raw []byte, fn func(key, val []byte)) {
	for i := Next(raw, 1); raw[i] != '}'; i = Next(raw, i) {
		keyEnd := skipString(raw, i)
		key := Unquote(raw[i:keyEnd])
		at := Next(raw, keyEnd)
		i = skip(raw, at)
		fn(key, raw[at:i])
	}
}

// Get returns the value of a valid object's member, nil if it is absent or raw is not an object.
func Get(raw []byte, name string) (val []byte) {
	if !IsObject(raw) {
		return nil
	}
	EachMember(raw, func(key, v []byte) {
		if string(key) == name {
			val = v
		}
	})
	return val
}

// IsObject reports whether raw is an object.
func IsObject(raw []byte) bool { return len(raw) > 0 && raw[0] == '{' }

// IsArray reports whether raw is an array.
func IsArray(raw []byte) bool { return len(raw) > 0 && raw[0] == '[' }

// IsString reports whether raw is a string.
func IsString(raw []byte) bool { return len(raw) > 0 && raw[0] == '"' }

// IsNull reports whether raw is null or absent.
func IsNull(raw []byte) bool { return len(raw) == 0 || raw[0] == 'n' }

// IsTrue reports whether raw is true.
func IsTrue(raw []byte) bool { return len(raw) > 0 && raw[0] == 't' }

// IsNumber reports whether raw is a number.
func IsNumber(raw []byte) bool {
	return len(raw) > 0 && (raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9')
}

// Text returns the unescaped text of a string value, nil for any other value.
func Text(raw []byte) []byte {
	if !IsString(raw) {
		return nil
	}
	return Unquote(raw)
}

// Integer reads a number as pydantic does: 3, 3.0 and 3e0 are all the integer 3.
func Integer(raw []byte) (int64, bool) {
	if !IsNumber(raw) {
		return 0, false
	}
	if n, err := strconv.ParseInt(string(raw), 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(string(raw), 64)
	if err != nil || f != float64(int64(f)) || f > 1<<62 || f < -1<<62 {
		return 0, false
	}
	return int64(f), true
}

// Truthy returns Python's bool(value), by which vLLM tests the flags in kv_transfer_params.
func Truthy(raw []byte) bool {
	switch {
	case IsNull(raw) || raw[0] == 'f' || string(raw) == `""`:
		return false
	case IsArray(raw):
		return raw[Next(raw, 1)] != ']'
	case IsObject(raw):
		return raw[Next(raw, 1)] != '}'
	case IsNumber(raw):
		f, err := strconv.ParseFloat(string(raw), 64)
		return err != nil || f != 0
	}
	return true
}

// TokenIDs reads a list of token ids.
func TokenIDs(raw []byte) (ids []uint32, ok bool) {
	if !IsArray(raw) {
		return nil, false
	}
	ids, ok = make([]uint32, 0, len(raw)/5), true
	EachElement(raw, func(id []byte) bool {
		n, err := strconv.ParseUint(string(id), 10, 32)
		ok = err == nil
		ids = append(ids, uint32(n))
		return ok
	})
	return ids, ok
}

// Compact drops the space between tokens of JSON, as json.dumps in a chat template would, and nothing else.
func Compact(raw []byte) []byte {
	if !bytes.ContainsAny(raw, " \n\r\t") {
		return raw
	}
	var out bytes.Buffer
	_ = json.Compact(&out, raw)
	return out.Bytes()
}
