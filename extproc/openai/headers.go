package openai

import (
	"mime"
	"strings"
)

// CheckHeaders returns an [*Error] for anything but plain JSON, which alone can be parsed.
func CheckHeaders(contentType, contentEncoding string) error {
	if enc := strings.TrimSpace(contentEncoding); enc != "" && !strings.EqualFold(enc, "identity") {
		return UnsupportedMediaType("content-encoding is not supported on this path; send the body uncompressed")
	}
	if contentType == "application/json" { // spares the common case a parse
		return nil
	}
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "application/json" {
		return UnsupportedMediaType("content-type must be application/json on this path")
	}
	if charset := params["charset"]; charset != "" && !strings.EqualFold(charset, "utf-8") &&
		!strings.EqualFold(charset, "utf8") {
		return UnsupportedMediaType("JSON is UTF-8; another charset is not supported")
	}
	return nil
}

// RequestID reports whether a client's request id may be kept: it goes into logs, headers and engines' own ids.
func RequestID(id string) bool {
	if len(id) == 0 || len(id) > 128 {
		return false
	}
	for i := range len(id) {
		c := id[i]
		if c-'0' > 9 && c|0x20-'a' > 25 && c != '.' && c != '_' && c != '-' {
			return false
		}
	}
	return true
}

// NewRequestID returns a request id of 32 hex digits, from random numbers.
func NewRequestID(upper, lower uint64) string {
	id := make([]byte, 0, 32)
	for _, v := range []uint64{upper, lower} {
		const digits = "0123456789abcdef"
		for i := 0; i < 16; i, v = i+1, v>>4 {
			id = append(id, digits[v&15])
		}
	}
	return string(id)
}
