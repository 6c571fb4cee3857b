package engine

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"

	"tandem/e2e/enginesim/jsontext"
)

// Error is an error as vLLM answers it: {"error":{"message","type","param","code"}}.
type Error struct {
	Status  int
	Typ     string
	Param   string // "": null
	Message string
	Load    bool // in a stream: the KV load failed
}

func (e *Error) Error() string { return e.Message }

// BadRequest returns a 400.
func BadRequest(format string, args ...any) *Error {
	return &Error{Status: http.StatusBadRequest, Typ: "BadRequestError", Message: fmt.Sprintf(format, args...)}
}

// BadParam returns vLLM's VLLMValidationError: it names the parameter, and its value if there is one.
func BadParam(param, value, format string, args ...any) *Error {
	e := BadRequest(format, args...)
	e.Param = param
	e.Message += " (parameter=" + param
	if value != "" {
		e.Message += ", value=" + value
	}
	e.Message += ")"
	return e
}

// Pydantic returns a type error that precedes vLLM's own checks.
func Pydantic(kind, loc, msg string, input []byte) *Error {
	return BadRequest("1 validation error:\n  {'type': '%s', 'loc': 'body.%s', 'msg': '%s', 'input': %s}", kind, loc,
		msg, PyRepr(input))
}

// Missing returns pydantic's error for a missing member: it shows the whole body, as Python writes it (SGLang 0.5.23;
// vLLM did so before it shortened the input).
func Missing(name string, members []jsontext.Member) *Error {
	echo := []byte{'{'}
	for i, m := range members {
		if i > 0 {
			echo = append(echo, ", "...)
		}
		echo = appendPython(append(appendPythonText(echo, m.Key), ": "...), m.Raw)
	}
	return BadRequest("1 validation error:\n  {'type': 'missing', 'loc': ('body', '%s'), 'msg': 'Field required', "+
		"'input': %s}}", name, echo)
}

// appendPython writes a JSON value as Python's repr does.
func appendPython(dst, raw []byte) []byte {
	first := true
	comma := func() {
		if !first {
			dst = append(dst, ", "...)
		}
		first = false
	}
	switch raw[0] {
	case '{':
		dst = append(dst, '{')
		jsontext.EachMember(raw, func(key, value []byte) {
			comma()
			dst = appendPython(append(appendPythonText(dst, key), ": "...), value)
		})
		return append(dst, '}')
	case '[':
		dst = append(dst, '[')
		jsontext.EachElement(raw, func(value []byte) bool {
			comma()
			dst = appendPython(dst, value)
			return true
		})
		return append(dst, ']')
	case '"':
		return appendPythonText(dst, jsontext.Unquote(raw))
	case 't':
		return append(dst, "True"...)
	case 'f':
		return append(dst, "False"...)
	case 'n':
		return append(dst, "None"...)
	}
	return append(dst, raw...)
}

// appendPythonText writes a string: in double quotes if it contains single ones and no double ones.
func appendPythonText(dst, text []byte) []byte {
	quote := byte('\'')
	if bytes.IndexByte(text, '\'') >= 0 && bytes.IndexByte(text, '"') < 0 {
		quote = '"'
	}
	dst = append(dst, quote)
	for _, c := range text {
		switch {
		case c == quote || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, `\n`...)
		case c < ' ':
			dst = fmt.Appendf(dst, `\x%02x`, c)
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, quote)
}

// PyRepr writes a JSON value about as Python does, cut after 120 bytes.
func PyRepr(raw []byte) string {
	const longest = 120
	s := string(raw)
	if jsontext.IsString(raw) {
		s = "'" + string(jsontext.Text(raw)) + "'"
	}
	if len(s) > longest {
		s = s[:longest] + "..."
	}
	return s
}

// InternalError returns a 500.
func InternalError(message string) *Error {
	return &Error{Status: http.StatusInternalServerError, Typ: "InternalServerError", Message: message}
}

// Dead returns the error that vLLM gives after its engine process has died of an exception.
func Dead() *Error {
	return InternalError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
}

// ErrLoadFailed means that a transfer failed, as vLLM's do.
var ErrLoadFailed = errors.New("KV load failed")

// ErrAborted means that the client has gone.
var ErrAborted = errors.New("the client has gone")

// Violation is KV of another request from which a real engine would silently have answered.
type Violation struct{ Kind, Message string }

func (v *Violation) Error() string { return "enginesim violation " + v.Kind + ": " + v.Message }
