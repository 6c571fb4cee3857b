package openai

import (
	"net/url"
	"strings"
)

// API is one of the request shapes whose bodies are read.
type API uint8

// The APIs. Models is GET /v1/models, and of one model, whose name may have slashes; PassThrough is every request that
// goes unchanged to one engine. SGLangGenerate is POST /generate of SGLang; it is read only in pools of SGLang engines,
// since others may serve something else at that path.
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
