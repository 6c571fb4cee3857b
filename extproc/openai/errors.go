package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"
)

// Error is an error answer of Tandem's, in OpenAI's shape.
type Error struct {
	Status     int
	Type       string // OpenAI's classes: invalid_request_error, api_error, ...
	Code       string // stable, for programs; also a label value and part of Envoy's response code details
	Param      string // the invalid member; may be empty
	Message    string // for people; quotes nothing of the request but short plain names, and has no line breaks
	RetryAfter time.Duration

	messages bool // in Anthropic's shape
}

// For returns the error in the shape of the API that a path belongs to.
func (e *Error) For(path []byte) *Error { return e.In(OfMessages(path)) }

// In returns the error in Anthropic's shape, or OpenAI's.
func (e *Error) In(messages bool) *Error {
	if !messages {
		return e
	}
	out := *e
	out.messages = true
	return &out
}

// OfMessages reports whether a path is of Anthropic's API: /v1/messages, and below it. Something may stand before it,
// as a gateway's prefix.
func OfMessages(path []byte) bool {
	path, _, _ = bytes.Cut(path, []byte("?"))
	const of = "/v1/messages"
	at := bytes.Index(path, []byte(of))
	return at >= 0 && (len(path) == at+len(of) || path[at+len(of)] == '/')
}

// anthropicType returns Anthropic's type of an error (docs.anthropic.com/en/api/errors).
func (e *Error) anthropicType() string {
	switch e.Status {
	case 401:
		return "authentication_error"
	case 403:
		return "permission_error"
	case 404:
		return "not_found_error"
	case 413:
		return "request_too_large"
	case 429:
		return "rate_limit_error"
	case 503:
		return "overloaded_error"
	case 504:
		return "timeout_error"
	}
	if e.Status < 500 {
		return "invalid_request_error"
	}
	return "api_error"
}

func (e *Error) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message) }

// JSON returns the body of the answer.
func (e *Error) JSON() []byte {
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
	}
	if e.messages { // the code is Tandem's addition
		b, err := json.Marshal(struct {
			Type  string `json:"type"`
			Error struct {
				Type    string `json:"type"`
				Message string `json:"message"`
				Code    string `json:"code"`
			} `json:"error"`
		}{"error", struct {
			Type    string `json:"type"`
			Message string `json:"message"`
			Code    string `json:"code"`
		}{e.anthropicType(), e.Message, e.Code}})
		if err == nil { // strings always marshal
			return b
		}
	}
	d := detail{Message: e.Message, Type: e.Type, Code: e.Code}
	if e.Param != "" {
		d.Param = &e.Param
	}
	b, err := json.Marshal(struct {
		Error detail `json:"error"`
	}{d})
	if err != nil { // strings always marshal
		return []byte(`{"error":{"message":"internal error","type":"api_error","param":null,"code":"internal_error"}}`)
	}
	return b
}

// RetrySeconds returns RetryAfter as the header has it, in whole seconds.
func (e *Error) RetrySeconds() int { return int((e.RetryAfter + time.Second - 1) / time.Second) }

// BadRequest returns a 400: the request itself is invalid.
func BadRequest(code, param, message string) *Error {
	return &Error{Status: 400, Type: "invalid_request_error", Code: code, Param: param, Message: message}
}

// ModelNotFound returns OpenAI's 404 for a model that no pool serves.
func ModelNotFound(model string) *Error {
	name := "The requested model"
	if p := printable([]byte(model)); p != "" {
		name = "The model `" + p + "`"
	}
	return &Error{Status: 404, Type: "invalid_request_error", Code: "model_not_found", Param: "model",
		Message: name + " does not exist or is not served here."}
}

// UnsupportedMediaType returns a 415.
func UnsupportedMediaType(message string) *Error {
	return &Error{Status: 415, Type: "invalid_request_error", Code: "unsupported_media_type", Message: message}
}

// TooLarge returns a 413 for a body over limit bytes.
func TooLarge(limit int) *Error {
	return &Error{Status: 413, Type: "invalid_request_error", Code: "body_too_large",
		Message: fmt.Sprintf("the request body is larger than %d bytes", limit)}
}

// HeadersTooLarge returns a 414 or a 431.
func HeadersTooLarge(status int, code, message string) *Error {
	return &Error{Status: status, Type: "invalid_request_error", Code: code, Message: message}
}

// Trailers returns a 400 for a request with trailers after its body.
func Trailers() *Error {
	return BadRequest("trailers_not_supported", "",
		"trailers after the request body are not supported here; send headers")
}

// NoUpgrade returns a 426 for a request that asks for another protocol: clients that can do without WebSockets go on
// over HTTP then (Codex does because of the status, openai/codex#43353). Of such requests only those of gateways that
// allow upgrades come here; The Upgrade header, which RFC 9110 (15.5.22) requires, is added by Envoy's configuration.
func NoUpgrade() *Error {
	return &Error{Status: 426, Type: "invalid_request_error", Code: "upgrade_not_supported",
		Message: "protocol upgrades are not supported here; use plain HTTP"}
}

// NoBody returns a 400 for a request without a body.
func NoBody() *Error {
	return BadRequest("empty_body", "", "the request has no body; a JSON object is expected")
}

// Timeout returns a 408 for a body that did not arrive in time.
func Timeout() *Error {
	return &Error{Status: 408, Type: "invalid_request_error", Code: "body_timeout",
		Message: "the request body did not arrive in time"}
}

// Unavailable returns a 503 with a Retry-After.
func Unavailable(code, message string, retryAfter time.Duration) *Error {
	return &Error{Status: 503, Type: "api_error", Code: code, Message: message, RetryAfter: retryAfter}
}

// ServerBusy returns a 503 for a body that there is no memory for.
func ServerBusy() *Error {
	return Unavailable("server_busy", "too many large requests are under way; try again", time.Second)
}

// Overloaded returns a 429 for a request that was shed in favour of others.
func Overloaded(message string, retryAfter time.Duration) *Error {
	return &Error{Status: 429, Type: "rate_limit_error", Code: "overloaded", Message: message, RetryAfter: retryAfter}
}

// TargetMissed returns a 429 for a request if no endpoint can meet its latency targets now.
func TargetMissed(retryAfter time.Duration) *Error {
	return &Error{Status: 429, Type: "rate_limit_error", Code: "target_missed", RetryAfter: retryAfter,
		Message: "no endpoint can answer this request within the time that it wants; try again, or ask for more time"}
}

// NotServed returns a 404 for a path that clients may not use.
func NotServed() *Error {
	return &Error{Status: 404, Type: "invalid_request_error", Code: "path_not_served",
		Message: "this path is not served here"}
}

// Redirected returns a 502 for an endpoint that answers with a redirect.
func Redirected() *Error {
	return &Error{Status: 502, Type: "api_error", Code: "endpoint_redirected",
		Message: "the endpoint answered with a redirect, which is not followed"}
}

// Internal returns a 500. The log has the cause, under the request id.
func Internal() *Error {
	return &Error{Status: 500, Type: "api_error", Code: "internal_error",
		Message: "internal error; the request id leads to the cause in the log"}
}
