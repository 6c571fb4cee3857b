package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"strconv"
)

// apiError is an error as vLLM answers it: {"error":{"message","type","param","code"}}.
type apiError struct {
	status  int
	typ     string
	param   string // "" is null
	message string
	load    bool // in a stream: the KV load failed
}

func (e *apiError) Error() string { return e.message }

func badRequest(format string, args ...any) *apiError {
	return &apiError{status: http.StatusBadRequest, typ: "BadRequestError", message: fmt.Sprintf(format, args...)}
}

// badParam is vLLM's VLLMValidationError: it names the parameter, and its value where there is one to tell.
func badParam(param, value, format string, args ...any) *apiError {
	e := badRequest(format, args...)
	e.param = param
	e.message += " (parameter=" + param
	if value != "" {
		e.message += ", value=" + value
	}
	e.message += ")"
	return e
}

// pydantic is a type error found before vLLM's own code sees the request.
func pydantic(kind, loc, msg string, input []byte) *apiError {
	return badRequest("1 validation error:\n  {'type': '%s', 'loc': 'body.%s', 'msg': '%s', 'input': %s}", kind, loc, msg, pyRepr(input))
}

// missing is pydantic's error for a member that is not there: it shows the whole body, as Python writes it (SGLang 0.5.23; vLLM
// did so before it began to sum up what it shows).
func missing(name string, members []member) *apiError {
	echo := []byte{'{'}
	for i, m := range members {
		if i > 0 {
			echo = append(echo, ", "...)
		}
		echo = appendPython(append(appendPythonText(echo, m.key), ": "...), m.raw)
	}
	return badRequest("1 validation error:\n  {'type': 'missing', 'loc': ('body', '%s'), 'msg': 'Field required', 'input': %s}}", name, echo)
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
		eachMember(raw, func(key, value []byte) {
			comma()
			dst = appendPython(append(appendPythonText(dst, key), ": "...), value)
		})
		return append(dst, '}')
	case '[':
		dst = append(dst, '[')
		eachElement(raw, func(value []byte) bool {
			comma()
			dst = appendPython(dst, value)
			return true
		})
		return append(dst, ']')
	case '"':
		return appendPythonText(dst, unquote(raw))
	case 't':
		return append(dst, "True"...)
	case 'f':
		return append(dst, "False"...)
	case 'n':
		return append(dst, "None"...)
	}
	return append(dst, raw...)
}

// appendPythonText writes a string: in double quotes where it has single ones and no double ones.
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

func pyRepr(raw []byte) string {
	const longest = 120
	s := string(raw)
	if isString(raw) {
		s = "'" + string(text(raw)) + "'"
	}
	if len(s) > longest {
		s = s[:longest] + "..."
	}
	return s
}

func internalError(message string) *apiError {
	return &apiError{status: http.StatusInternalServerError, typ: "InternalServerError", message: message}
}

// engineDead is the last thing a client hears from a vLLM whose engine process has raised.
func engineDead() *apiError {
	return internalError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
}

func (e *apiError) json(api api) []byte {
	if api == apiMessages {
		b := append([]byte(`{"type":"error","error":{"type":`), appendQuoted(nil, e.typ)...)
		b = append(b, `,"message":`...)
		return append(appendQuoted(b, e.message), "}}"...)
	}
	b := append([]byte(`{"error":{"message":`), appendQuoted(nil, e.message)...)
	b = append(b, `,"type":`...)
	b = appendQuoted(b, e.typ)
	b = append(b, `,"param":`...)
	if e.param == "" {
		b = append(b, "null"...)
	} else {
		b = appendQuoted(b, e.param)
	}
	b = append(b, `,"code":`...)
	b = strconv.AppendInt(b, int64(e.status), 10)
	return append(b, "}}"...)
}

// asAPIError turns what went wrong inside the engine into what the client sees.
func asAPIError(err error) *apiError {
	if e, ok := errors.AsType[*apiError](err); ok {
		return e
	}
	if v, ok := errors.AsType[*violation](err); ok {
		return &apiError{status: http.StatusInternalServerError, typ: "EngineSimViolation", message: v.Error()}
	}
	return internalError("Internal server error") // all that vLLM tells about a failed KV load
}
