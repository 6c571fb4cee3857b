package openai

import (
	"encoding/json"
	"fmt"
	"mime"
	"strings"
	"time"
)

// Error is what a client gets instead of an answer, in OpenAI's shape.
type Error struct {
	Status     int
	Type       string // OpenAI's classes: invalid_request_error, api_error, ...
	Code       string // stable, for programs; also a label value and part of Envoy's response code details
	Param      string // the member at fault, "" if none
	Message    string // for people; never holds text of the request beyond short plain names
	RetryAfter time.Duration
}

func (e *Error) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Code, e.Message) }

// JSON is the body that goes to the client.
func (e *Error) JSON() []byte {
	type detail struct {
		Message string  `json:"message"`
		Type    string  `json:"type"`
		Param   *string `json:"param"`
		Code    string  `json:"code"`
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

// BadRequest is a 400: the request itself is at fault.
func BadRequest(code, param, message string) *Error {
	return &Error{Status: 400, Type: "invalid_request_error", Code: code, Param: param, Message: message}
}

// ModelNotFound is OpenAI's 404 for a model that no pool serves.
func ModelNotFound(model string) *Error {
	name := "The requested model"
	if p := printableKey([]byte(model)); p != "" {
		name = "The model `" + p + "`"
	}
	return &Error{Status: 404, Type: "invalid_request_error", Code: "model_not_found", Param: "model",
		Message: name + " does not exist or is not served here."}
}

// UnsupportedMediaType is a 415.
func UnsupportedMediaType(message string) *Error {
	return &Error{Status: 415, Type: "invalid_request_error", Code: "unsupported_media_type", Message: message}
}

// TooLarge is a 413 for a body over limit bytes.
func TooLarge(limit int) *Error {
	return &Error{Status: 413, Type: "invalid_request_error", Code: "body_too_large",
		Message: fmt.Sprintf("the request body is larger than %d bytes", limit)}
}

// Timeout is a 408 for a body that did not arrive in time.
func Timeout() *Error {
	return &Error{Status: 408, Type: "invalid_request_error", Code: "body_timeout", Message: "the request body did not arrive in time"}
}

// Unavailable is a 503 that says when to come back.
func Unavailable(code, message string, retryAfter time.Duration) *Error {
	return &Error{Status: 503, Type: "api_error", Code: code, Message: message, RetryAfter: retryAfter}
}

// Internal is a 500; what happened is in the log, under the request id.
func Internal() *Error {
	return &Error{Status: 500, Type: "api_error", Code: "internal_error", Message: "internal error; the request id leads to the cause in the log"}
}

// CheckHeaders refuses what the parsed paths cannot read: anything but plain JSON. It returns nil or an [*Error].
func CheckHeaders(contentType, contentEncoding string) error {
	if enc := strings.TrimSpace(contentEncoding); enc != "" && !strings.EqualFold(enc, "identity") {
		return UnsupportedMediaType("content-encoding is not supported on this path; send the body uncompressed")
	}
	if contentType == "application/json" {
		return nil
	}
	kind, params, err := mime.ParseMediaType(contentType)
	if err != nil || kind != "application/json" {
		return UnsupportedMediaType("content-type must be application/json on this path")
	}
	if charset := params["charset"]; charset != "" && !strings.EqualFold(charset, "utf-8") {
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

// ModelList is the body of GET /v1/models. created is in seconds of Unix time.
func ModelList(ids []string, created int64) []byte {
	type model struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		OwnedBy string `json:"owned_by"`
	}
	list := struct {
		Object string  `json:"object"`
		Data   []model `json:"data"`
	}{Object: "list", Data: make([]model, 0, len(ids))}
	for _, id := range ids {
		list.Data = append(list.Data, model{id, "model", created, "tandem"})
	}
	b, err := json.Marshal(list)
	if err != nil {
		return []byte(`{"object":"list","data":[]}`)
	}
	return b
}
