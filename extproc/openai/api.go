package openai

import (
	"mime"
	"net/url"
	"strings"
)

// API is one of the request shapes whose bodies are read.
type API uint8

// The APIs. Models is GET /v1/models, and /v1/models/NAME, whose NAME may have slashes; PassThrough is every request
// that goes unchanged to one engine. SGLangGenerate is POST /generate of SGLang; it is read only in pools of SGLang
// engines, since others may serve something else at that path.
const (
	PassThrough API = iota
	Chat
	Completions
	Responses
	Messages
	Generate
	Models
	SGLangGenerate
)

func (a API) String() string {
	return [...]string{"pass_through", "chat", "completions", "responses", "messages", "generate", "models",
		"sglang_generate"}[a]
}

// Classify returns the API of a request by its method and path. A query is ignored. Percent-escapes are undone,
// because engines undo them before they route (uvicorn does): an escaped path must not bypass the checks of its API. A
// path with a trailing slash belongs to no API (engines answer it with a redirect or a 404).
func Classify(method, path string) API {
	path, _, _ = strings.Cut(path, "?")
	if strings.IndexByte(path, '%') >= 0 {
		if plain, err := url.PathUnescape(path); err == nil {
			path = plain
		}
	}
	switch method {
	case "GET":
		if name, one := strings.CutPrefix(path, "/v1/models/"); path == "/v1/models" || one && name != "" {
			return Models
		}
	case "POST":
		switch path {
		case "/v1/chat/completions":
			return Chat
		case "/v1/completions":
			return Completions
		case "/v1/responses":
			return Responses
		case "/v1/messages":
			return Messages
		case "/inference/v1/generate":
			return Generate
		case "/generate":
			return SGLangGenerate
		}
	}
	return PassThrough
}

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
