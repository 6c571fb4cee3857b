// Package paths is the allowlist of what clients may use on a pool's engines, in addition to the APIs that are split.
package paths

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
)

// Paths is the allowlist of a pool: methods and paths that clients may use on its engines, in addition to the APIs
// that are split. Engines have more paths, which stop, empty or change an engine, or show other clients' requests.
// Operators reach engines directly.
type Paths struct {
	exact    map[string][]string // methods by path
	patterns []pattern
}

// pattern is a path with wildcard segments.
type pattern struct {
	segments []string // "*": any name
	methods  []string
}

// Client paths by engine, read from the route tables of vLLM 0.32 and SGLang 0.5.15 and from trtllm-serve. They
// omit all paths that control an engine, and SGLang's /vertex_generate, whose "parameters" may contain any member
// of a request.
const (
	openAIPaths = `
GET /health /ping /version /v1/models/* /v1/responses/*
POST /ping /v1/embeddings /v1/responses/*/cancel /v1/messages/count_tokens
POST /v1/audio/transcriptions /v1/audio/translations
POST /v1/images/generations /v1/images/edits /v1/audio/speech /v1/moderations
DELETE /v1/responses/*
OPTIONS /v1/chat/completions /v1/completions /v1/responses /v1/messages /inference/v1/generate /v1/models`
	vllmPaths = `
GET /tokenizer_info
POST /tokenize /detokenize /pooling /classify /score /v1/score /generative_scoring
POST /rerank /v1/rerank /v2/rerank /v2/embed /invocations
POST /v1/chat/completions/batch /v1/chat/completions/render /v1/chat/completions/derender
POST /v1/completions/render /v1/completions/derender
POST /v1/messages/render /v1/responses/render /cohere/v2/chat`
	sglangPaths = `
GET /health_generate /get_model_info /model_info
POST /generate /encode /classify /v1/classify /tokenize /v1/tokenize /detokenize /v1/detokenize
POST /v1/score /v1/rerank /invocations
POST /parse_function_call /separate_reasoning`
)

// New returns the allowlist for a kind of engine (vllm, sglang, trtllm; any: the paths of all), plus
// configured paths such as "POST /v1/things/*".
func New(engine string, more []string) (*Paths, error) {
	p := &Paths{exact: map[string][]string{}}
	tables := openAIPaths
	if engine == "vllm" || engine == "any" {
		tables += vllmPaths
	}
	if engine == "sglang" || engine == "any" {
		tables += sglangPaths
	}
	for line := range strings.Lines(tables) {
		words := strings.Fields(line)
		for i := 1; i < len(words); i++ {
			p.add(words[0], words[i])
		}
	}
	for _, entry := range more {
		method, path, ok := strings.Cut(entry, " ")
		if !ok || method == "" || method != strings.ToUpper(method) || !canonical(path) {
			return nil, fmt.Errorf("%q is not a method and a path such as %q", entry, "POST /v1/things/*")
		}
		p.add(method, path)
	}
	return p, nil
}

func (p *Paths) add(method, path string) {
	if !strings.Contains(path, "*") {
		p.exact[path] = append(p.exact[path], method)
		return
	}
	p.patterns = append(p.patterns, pattern{strings.Split(path, "/"), []string{method}})
}

// Allow reports whether clients may use a path with a method. It decodes percent-escapes once, as engines do before
// they route. A path that is not canonical after that (a double slash, a dot segment, an escape in an escape) is
// refused. It is case-sensitive.
func (p *Paths) Allow(method, path string) bool {
	path = plainPath(path)
	if !canonical(path) {
		return false
	}
	allows := func(methods []string) bool {
		return slices.Contains(methods, method) || method == "OPTIONS" ||
			method == "HEAD" && slices.Contains(methods, "GET")
	}
	if methods, ok := p.exact[path]; ok {
		return allows(methods)
	}
	if name, ok := strings.CutPrefix(path, "/v1/models/"); ok { // which may have slashes
		path = "/v1/models/" + strings.ReplaceAll(name, "/", "-")
	}
	segments := strings.Split(path, "/")
	return slices.ContainsFunc(p.patterns, func(t pattern) bool { return t.match(segments) && allows(t.methods) })
}

func (t pattern) match(segments []string) bool {
	return slices.EqualFunc(t.segments, segments, func(want, got string) bool {
		return want == got || want == "*" && got != ""
	})
}

// plainPath returns a path without query and escapes.
func plainPath(path string) string {
	path, _, _ = strings.Cut(path, "?")
	if strings.IndexByte(path, '%') >= 0 {
		if plain, err := url.PathUnescape(path); err == nil {
			return plain
		}
	}
	return path
}

// TakesPriority reports whether engines read the member priority of the bodies of a path that is never split (vLLM
// 0.32, entrypoints/pooling/base/protocol.py and openai/chat_completion/batch; SGLang 0.5.15, EmbeddingRequest and
// ClassifyRequest of entrypoints/openai/protocol.py).
func TakesPriority(path string) bool {
	switch plainPath(path) {
	case "/v1/embeddings", "/pooling", "/classify", "/v1/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
		"/v2/rerank", "/v1/chat/completions/batch":
		return true
	}
	return false
}

// canonical reports whether all readers interpret a path alike.
func canonical(path string) bool {
	control := func(r rune) bool { return r <= ' ' || r == 0x7f }
	if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "%\\;?#") || strings.ContainsFunc(path, control) {
		return false
	}
	for segment := range strings.SplitSeq(path[1:], "/") {
		if segment == "" && path != "/" || segment == "." || segment == ".." {
			return false
		}
	}
	return true
}

// WithoutPrefix removes the prefix that a gateway in front adds to paths (envoy.pathPrefixes); ok is false if there
// is none.
func WithoutPrefix(prefixes []string, path []byte) (rest []byte, ok bool) {
	for _, prefix := range prefixes {
		if len(path) > len(prefix) && path[len(prefix)] == '/' && string(path[:len(prefix)]) == prefix {
			return path[len(prefix):], true
		}
	}
	return path, false
}
