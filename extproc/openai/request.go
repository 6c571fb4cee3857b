package openai

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
)

// API is one of the request shapes whose bodies are read.
type API uint8

// The APIs. Models is GET /v1/models; PassThrough is everything that goes to one engine as it is.
const (
	PassThrough API = iota
	Chat
	Completions
	Responses
	Messages
	Generate
	Models
)

func (a API) String() string {
	return [...]string{"pass_through", "chat", "completions", "responses", "messages", "generate", "models"}[a]
}

// Classify names the API of a request by method and path. A query is ignored; a path with a trailing slash is not the
// API's (engines answer it with a redirect or a 404).
func Classify(method, path string) API {
	if i := strings.IndexByte(path, '?'); i >= 0 {
		path = path[:i]
	}
	if method == "GET" && path == "/v1/models" {
		return Models
	}
	if method != "POST" {
		return PassThrough
	}
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
	}
	return PassThrough
}

// Request is a scanned body. The zero value is ready; Scan may be called again and reuses all memory. It refers to the
// body it scanned and is valid as long as that is.
type Request struct {
	api      API
	body     []byte
	members  []member
	sampling []member
	index    [numFields]int16 // 1-based position in members; 0: absent
	control  bool
	model    string
}

// Scan validates the body and finds its members. An error is an [*Error] with status 400.
func (r *Request) Scan(api API, body []byte, lim Limits) error {
	s := scanner{b: body, lim: lim.withDefaults()}
	r.api, r.body, r.control = api, body, false
	r.index = [numFields]int16{}
	var err error
	r.members, r.sampling, err = s.document(r.members[:0], r.sampling[:0])
	if err != nil {
		return err
	}
	for i, m := range r.members {
		r.control = r.control || m.field.control()
		if m.field != fieldUnknown && m.field != fieldControl {
			r.index[m.field] = int16(i + 1)
		}
	}
	return r.readModel()
}

// readModel keeps the model's name; the name of the last scan is kept where it is the same.
func (r *Request) readModel() error {
	raw := r.Raw(FieldModel)
	switch {
	case raw == nil || string(raw) == "null":
		r.model = ""
	case raw[0] != '"':
		return BadRequest("invalid_model", "model", "model must be a string")
	case bytes.IndexByte(raw, '\\') >= 0:
		r.model = string(unescape(raw[1 : len(raw)-1]))
	case string(raw[1:len(raw)-1]) != r.model:
		r.model = string(raw[1 : len(raw)-1])
	}
	return nil
}

// API is what the body was scanned as.
func (r *Request) API() API { return r.api }

// Body is what was scanned.
func (r *Request) Body() []byte { return r.body }

// Model is the requested model, "" where the body names none.
func (r *Request) Model() string { return r.model }

// Has reports whether the body has the member, null or not.
func (r *Request) Has(f Field) bool { return r.index[f] > 0 }

// Raw is the member's value as it stands in the body, nil if it is absent.
func (r *Request) Raw(f Field) []byte {
	if r.index[f] == 0 {
		return nil
	}
	m := r.members[r.index[f]-1]
	return r.body[m.value:m.valueEnd]
}

// rawSampling is the same for a member of sampling_params.
func (r *Request) rawSampling(f Field) []byte {
	for _, m := range r.sampling {
		if m.field == f {
			return r.body[m.value:m.valueEnd]
		}
	}
	return nil
}

// String is the member's value if it is a string.
func (r *Request) String(f Field) (string, bool) {
	raw := r.Raw(f)
	if len(raw) < 2 || raw[0] != '"' {
		return "", false
	}
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw[1 : len(raw)-1]), true
	}
	return string(unescape(raw[1 : len(raw)-1])), true
}

// Int is the member's value if it is an integer that fits int64.
func (r *Request) Int(f Field) (int64, bool) { return integer(r.Raw(f)) }

func integer(raw []byte) (int64, bool) {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	return n, err == nil
}

// True reports whether the member is literally true.
func (r *Request) True(f Field) bool { return string(r.Raw(f)) == "true" }

// set reports whether the member is there and says something.
func set(raw []byte) bool { return raw != nil && string(raw) != "null" && string(raw) != "false" }

// HasControl reports whether the body has members that are not a client's to send: they steer engines, name internal
// hosts and KV blocks, and some kill an engine.
func (r *Request) HasControl() bool { return r.control }

// Clean appends the body without those members to dst. Every other byte stays.
func (r *Request) Clean(dst []byte) []byte {
	var edits Edits
	edits = r.removals(edits, func(i int) bool { return r.members[i].field.control() })
	return edits.Apply(dst, r.body)
}

// Unsplittable says why a request has to be answered by one engine, "" if it need not. The reasons are label values.
//
// One P answer carries the KV of one sequence, so several choices or prompts need a whole engine; D computes prompt
// logprobs from the prompt itself; stored responses belong to the engine that has them; and tools that the engine runs
// itself make it generate several times with the same parameters, which must never happen (wire protocol notes, rules 6
// and 7).
func (r *Request) Unsplittable() string {
	get := r.Raw
	if r.api == Generate {
		get = r.rawSampling
	}
	for _, f := range [...]Field{FieldN, FieldBestOf} {
		if raw := get(f); raw != nil && string(raw) != "1" && string(raw) != "null" {
			return "several_choices"
		}
	}
	switch {
	case set(r.Raw(FieldBeamSearch)):
		return "beam_search"
	case set(r.Raw(FieldEcho)):
		return "echo"
	case set(get(FieldPromptLogprobs)):
		return "prompt_logprobs"
	case r.promptList():
		return "prompt_list"
	case set(r.Raw(FieldPromptEmbeds)):
		return "prompt_embeds"
	}
	if r.api == Responses {
		switch {
		case set(r.Raw(FieldPreviousResponseID)), set(r.Raw(FieldStore)), set(r.Raw(FieldBackground)):
			return "stored_response"
		case r.engineTools():
			return "engine_tools"
		}
	}
	return ""
}

// promptList reports whether a completion has a list of prompts: an array that does not start with a token id.
func (r *Request) promptList() bool {
	raw := r.Raw(FieldPrompt)
	if r.api != Completions || len(raw) == 0 || raw[0] != '[' {
		return false
	}
	first := bytes.TrimLeft(raw[1:], " \t\r\n")
	return first[0] != '-' && first[0]-'0' > 9
}

// engineTools reports whether tools other than functions of the client's are asked for.
func (r *Request) engineTools() bool {
	raw := r.Raw(FieldTools)
	if !set(raw) {
		return false
	}
	var tools []struct{ Type string }
	if json.Unmarshal(raw, &tools) != nil {
		return true // not for us to say: one engine may judge
	}
	for _, t := range tools {
		if t.Type != "function" {
			return true
		}
	}
	return false
}
