package main

import (
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
