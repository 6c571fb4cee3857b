package main

import (
	"bytes"
	"strconv"
)

// The functions below walk over JSON that scanObject has already found valid, so they need not check again.

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

// next skips space and the separators of arrays and objects.
func next(b []byte, i int) int {
	for i < len(b) && (b[i] <= ' ' || b[i] == ',' || b[i] == ':') {
		i++
	}
	return i
}

// eachElement calls fn for every element of a valid array until it returns false.
func eachElement(raw []byte, fn func(elem []byte) bool) {
	for i := next(raw, 1); raw[i] != ']'; i = next(raw, i) {
		end := skip(raw, i)
		if !fn(raw[i:end]) {
			return
		}
		i = end
	}
}

// eachMember calls fn for every member of a valid object.
func eachMember(raw []byte, fn func(key, val []byte)) {
	for i := next(raw, 1); raw[i] != '}'; i = next(raw, i) {
		keyEnd := skipString(raw, i)
		key := unquote(raw[i:keyEnd])
		at := next(raw, keyEnd)
		i = skip(raw, at)
		fn(key, raw[at:i])
	}
}

// get is the value of a valid object's member, nil when absent or when raw is no object.
func get(raw []byte, name string) (val []byte) {
	if !isObject(raw) {
		return nil
	}
	eachMember(raw, func(key, v []byte) {
		if string(key) == name {
			val = v
		}
	})
	return val
}

func isObject(raw []byte) bool { return len(raw) > 0 && raw[0] == '{' }
func isArray(raw []byte) bool  { return len(raw) > 0 && raw[0] == '[' }
func isString(raw []byte) bool { return len(raw) > 0 && raw[0] == '"' }
func isNull(raw []byte) bool   { return len(raw) == 0 || raw[0] == 'n' }
func isTrue(raw []byte) bool   { return len(raw) > 0 && raw[0] == 't' }
func isNumber(raw []byte) bool {
	return len(raw) > 0 && (raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9')
}

// text is the unescaped text of a string value, nil for any other value.
func text(raw []byte) []byte {
	if !isString(raw) {
		return nil
	}
	return unquote(raw)
}

// integer reads a number as pydantic does: 3, 3.0 and 3e0 are all the integer 3.
func integer(raw []byte) (int64, bool) {
	if !isNumber(raw) {
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

// truthy is Python's bool(value), which is how vLLM tests the flags in kv_transfer_params.
func truthy(raw []byte) bool {
	switch {
	case isNull(raw) || raw[0] == 'f' || string(raw) == `""`:
		return false
	case isArray(raw):
		return raw[next(raw, 1)] != ']'
	case isObject(raw):
		return raw[next(raw, 1)] != '}'
	case isNumber(raw):
		f, err := strconv.ParseFloat(string(raw), 64)
		return err != nil || f != 0
	}
	return true
}
