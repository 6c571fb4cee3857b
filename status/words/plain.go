package words

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// What clients and engines name (models, releases, ids, error texts) must not steer a terminal, turn a text around or
// begin a line of its own. Plain is for one such name, Lines for a text that has them, PlainJSON for an answer that is
// shown as a table, and Escaped for JSON and logs, where nothing may be lost.

// Plain replaces all that does not print by "?": control characters, line breaks, and marks of a text's direction.
func Plain(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// Lines is Plain, but keeps line breaks and tabs.
func Lines(s string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// PlainJSON applies Plain to all texts and keys of a JSON document.
func PlainJSON(text []byte) ([]byte, error) {
	var v any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	return json.Marshal(plainValue(v))
}

func plainValue(v any) any {
	switch v := v.(type) {
	case string:
		return Plain(v)
	case []any:
		for i := range v {
			v[i] = plainValue(v[i])
		}
	case map[string]any:
		out := make(map[string]any, len(v))
		for key, value := range v {
			out[Plain(key)] = plainValue(value)
		}
		return out
	}
	return v
}

// Escaped returns a writer of JSON that writes unprintable characters as \uXXXX: encoders leave DEL, C1 controls and
// those that change the direction of text as they are. Each write must have whole characters, as those of encoders and
// of slog do.
func Escaped(w io.Writer) io.Writer { return escaped{w} }

// WriteJSON answers with a value, indented, and escaped like that.
func WriteJSON(w http.ResponseWriter, v any) {
	w.Header().Set("content-type", "application/json")
	enc := json.NewEncoder(Escaped(w))
	enc.SetIndent("", "  ")
	_ = enc.Encode(v)
}

type escaped struct{ to io.Writer }

func (e escaped) Write(text []byte) (int, error) {
	if _, err := e.to.Write(escape(text)); err != nil {
		return 0, err
	}
	return len(text), nil
}

func escape(text []byte) []byte {
	prints := func(r rune) bool { return r == '\n' || r == '\r' || r == '\t' || unicode.IsPrint(r) }
	if bytes.IndexFunc(text, func(r rune) bool { return !prints(r) }) < 0 && utf8.Valid(text) {
		return text
	}
	out := make([]byte, 0, len(text)+64)
	for _, r := range string(text) { // bytes that are no character become U+FFFD
		switch {
		case prints(r):
			out = utf8.AppendRune(out, r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
	}
	return out
}
