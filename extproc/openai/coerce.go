package openai

import (
	"bytes"
	"errors"
	"math"
	"strconv"
)

// Engines that validate bodies with pydantic read more than a member's own type: the text "512", 512.0 and true are
// numbers, 1 and "on" are true. So does everything here that reads or replaces such a member; else P's body would keep
// what Tandem did not understand. testdata/coerced.json has what pydantic 2.14 makes of each (vLLM 0.32.0, whose
// request models are in lax mode; SGLang's and TensorRT-LLM's are, too).

// Count returns the number that engines read from a member's value, of any size up to the limits of int64. ok is false
// if they refuse the value, and for null and nothing.
func Count(raw []byte) (n int64, ok bool) {
	if len(raw) == 0 {
		return 0, false
	}
	switch c := raw[0]; {
	case c == 't':
		return 1, true
	case c == 'f':
		return 0, true
	case c == '"':
		return countOf(bytes.TrimSpace(unescapedKey(raw[1 : len(raw)-1])))
	case c == '-' || c-'0' <= 9:
		if n, ok = integer(raw); ok {
			return n, true
		}
		f, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || f != math.Trunc(f) {
			return 0, false
		}
		return int64(max(math.MinInt64, min(f, math.MaxInt64-1023))), true // the greatest float64 of an int64
	}
	return 0, false
}

// countOf reads a number from text: digits with single underscores between them, a sign before, zeros after a point.
func countOf(text []byte) (int64, bool) {
	if whole, zeros, point := bytes.Cut(text, []byte(".")); point {
		if len(zeros) == 0 || len(bytes.Trim(zeros, "0")) > 0 {
			return 0, false
		}
		text = whole
	}
	if len(text) == 0 || bytes.Contains(text, []byte("__")) || text[len(text)-1] == '_' {
		return 0, false
	}
	digits := bytes.TrimLeft(text, "+-")
	if len(text)-len(digits) > 1 || len(digits) == 0 || digits[0] == '_' {
		return 0, false
	}
	if bytes.IndexByte(text, '_') >= 0 {
		text = bytes.ReplaceAll(text, []byte("_"), nil)
	}
	n, err := strconv.ParseInt(string(text), 10, 64)
	return n, err == nil || errors.Is(err, strconv.ErrRange)
}

// boolean returns the truth value that engines read from a value. ok is false if they refuse it, and for
// null and nothing.
func boolean(raw []byte) (v, ok bool) {
	if len(raw) == 0 {
		return false, false
	}
	if raw[0] == '"' {
		switch text := unescapedKey(raw[1 : len(raw)-1]); {
		case isAny(text, "true", "t", "yes", "y", "on", "1"):
			return true, true
		case isAny(text, "false", "f", "no", "n", "off", "0"):
			return false, true
		}
		return false, false
	}
	n, ok := Count(raw)
	return n == 1, ok && (n == 0 || n == 1)
}

// isAny reports whether text is one of the words, in letters of any case.
func isAny(text []byte, words ...string) bool {
	for _, w := range words {
		if len(text) == len(w) && bytes.EqualFold(text, []byte(w)) {
			return true
		}
	}
	return false
}

// isTrue reports whether engines read true from a value.
func isTrue(raw []byte) bool {
	v, _ := boolean(raw)
	return v
}

// StreamOptionsAllowed reports whether an engine takes stream_options with the body's stream. vLLM looks whether that
// is empty before it is read as true or false, so the text "false" counts as a stream (0.32.0,
// chat_completion/protocol.py:825).
func (r *Request) StreamOptionsAllowed() bool {
	raw := r.Raw(FieldStream)
	return isTrue(raw) || len(raw) > 2 && raw[0] == '"'
}
