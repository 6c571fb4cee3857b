package jsontext

import "strconv"

const hexDigits = "0123456789abcdef"

// AppendQuoted appends s as a JSON string, escaping only the required characters (as Python with ensure_ascii off,
// which vLLM uses).
func AppendQuoted(dst []byte, s string) []byte {
	return append(AppendEscaped(append(dst, '"'), s), '"')
}

// AppendEscaped appends s in the form that it has within quotes.
func AppendEscaped(dst []byte, s string) []byte {
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, '\\', 'n')
		case c == '\r':
			dst = append(dst, '\\', 'r')
		case c == '\t':
			dst = append(dst, '\\', 't')
		case c < 0x20:
			dst = append(dst, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
		default:
			dst = append(dst, c)
		}
	}
	return dst
}

// The small writers that all APIs share.

// AppendKey appends a comma, the key and a colon.
func AppendKey(dst []byte, key string) []byte {
	dst = append(dst, ',', '"')
	dst = append(dst, key...)
	return append(dst, '"', ':')
}

// AppendStr appends a member with a string.
func AppendStr(dst []byte, key, value string) []byte { return AppendQuoted(AppendKey(dst, key), value) }

// AppendInt appends a member with a number.
func AppendInt(dst []byte, key string, n int64) []byte {
	return strconv.AppendInt(AppendKey(dst, key), n, 10)
}

// AppendRaw appends a member with encoded JSON; null if there is none.
func AppendRaw(dst []byte, key string, raw []byte) []byte {
	if len(raw) == 0 {
		raw = []byte("null")
	}
	return append(AppendKey(dst, key), raw...)
}

// AppendIDs appends a list of numbers.
func AppendIDs(dst []byte, ids []uint32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(id), 10)
	}
	return append(dst, ']')
}
