package request

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
	"tandem/e2e/enginesim/jsontext"
)

// API is one of the five paths that generate.
type API uint8

// The APIs. None is any path that does not generate.
const (
	None API = iota
	Chat
	Completions
	Responses
	Messages
	Generate
	SGLang
)

const (
	maxChoices  = 16384 // VLLM_MAX_N_SEQUENCES
	maxLogprobs = 20
)

// Limits are the engine's limits on a request's model and size.
type Limits struct {
	Models      []string
	MaxModelLen int  // tokens
	ToolParser  bool // as vLLM with --enable-auto-tool-choice --tool-call-parser
	// OldForcedTools: a forced call that one token cuts off is an error, as in vLLM before 0.18 (vllm#36794)
	OldForcedTools bool
}

// Request is a parsed body: the common members of the five APIs, under one name each.
type Request struct {
	engine.Sampling

	API     API
	size    int // of the body
	Model   string
	Members []jsontext.Member

	Stream          bool
	IncludeUsage    bool
	Logprobs        int64 // alternatives per token; -1: none requested
	Echo            bool
	ReturnIDs       bool
	Temperature     json.RawMessage
	TopP            json.RawMessage
	salt            string
	KeepIDs         bool // of the prompt, for KV events
	Kv              connector.Params
	maxTokensMember string
	Transcript      []byte // of the response that previous_response_id names
}

// ThrowsAway reports whether the request's KV may be another prompt's, because its answer is discarded: it generates
// one token, and a salt keeps the prompt out of the cache. A router sends such a request to make a prefill engine free
// its blocks.
func (q *Request) ThrowsAway() bool { return q.MaxTokens == 1 && q.salt != "" }

// Raw returns the JSON of a member, nil if it is absent.
func (q *Request) Raw(name string) (val []byte) {
	for _, m := range slices.Backward(q.Members) { // the last of several wins, as in Python
		if string(m.Key) == name {
			return m.Raw
		}
	}
	return nil
}

// ByIDs reports whether the prompt is given as token ids.
func (q *Request) ByIDs() bool {
	switch q.API {
	case Chat:
		return q.Kv.PromptIDs != nil
	case Completions:
		return jsontext.IsArray(q.Raw("prompt"))
	}
	return q.API == Generate
}

// Flag reports whether a member is read as true.
func (q *Request) Flag(name string) bool {
	v, _ := jsontext.LaxBool(q.Raw(name))
	return v
}

// Leg returns the request's part in the protocol.
func (q *Request) Leg() string {
	switch {
	case q.Kv.RoomLeg != "":
		return q.Kv.RoomLeg
	case q.Kv.RemotePrefill:
		return "decode"
	case q.Kv.RemoteDecode, q.Kv.Spec != nil:
		return "prefill"
	}
	return "plain"
}

// Parse reads and checks a body as far as that is possible without the model. Without a connector kv_transfer_params
// are ignored as vLLM does; faithful accepts a duplicate key as Python does.
func Parse(a API, body []byte, members []jsontext.Member, k connector.Name, faithful bool) (*Request, *engine.Error) {
	q := &Request{API: a, size: len(body), Sampling: engine.Sampling{MaxTokens: -1, N: 1}, Logprobs: -1}
	var err error
	if q.Members, err = jsontext.ScanObject(members, body); err != nil {
		if errors.Is(err, jsontext.ErrNotObject) {
			return q, engine.Pydantic("model_attributes_type", "",
				"Input should be a valid dictionary or object to extract fields from", body)
		}
		return q, engine.BadRequest("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON "+
			"decode error', 'ctx': {'error': '%v'}}", err)
	}
	if !faithful {
		if key := duplicate(q.Members); key != "" {
			return q, engine.BadRequest("enginesim: the key %q occurs twice; an engine would silently use the last one",
				key)
		}
	}
	if e := q.ReadCommon(k); e != nil {
		return q, e
	}
	if e := q.readLimits(); e != nil {
		return q, e
	}
	return q, q.checkCommon()
}

func duplicate(members []jsontext.Member) string {
	if len(members) > 32 {
		seen := make(map[string]bool, len(members))
		for _, m := range members {
			if seen[string(m.Key)] {
				return string(m.Key)
			}
			seen[string(m.Key)] = true
		}
		return ""
	}
	for i, m := range members {
		for _, other := range members[:i] {
			if bytes.Equal(m.Key, other.Key) {
				return string(m.Key)
			}
		}
	}
	return ""
}

// ReadCommon reads the members that all APIs share, and those of connector k.
func (q *Request) ReadCommon(k connector.Name) *engine.Error {
	for _, m := range q.Members {
		switch string(m.Key) {
		case "model":
			if !jsontext.IsString(m.Raw) && !jsontext.IsNull(m.Raw) {
				return engine.Pydantic("string_type", "model", "Input should be a valid string", m.Raw)
			}
			q.Model = string(jsontext.Text(m.Raw))
		case "stream":
			var ok bool
			if q.Stream, ok = jsontext.LaxBool(m.Raw); !ok && !jsontext.IsNull(m.Raw) {
				return engine.Pydantic("bool_parsing", "stream",
					"Input should be a valid boolean, unable to interpret input", m.Raw)
			}
		case "cache_salt":
			q.salt = string(jsontext.Text(m.Raw))
		case "tools":
			q.Tools = m.Raw
		case "tool_choice":
			q.ToolChoice = m.Raw
		case "temperature":
			q.Temperature = m.Raw
		case "top_p":
			q.TopP = m.Raw
		case "echo":
			q.Echo, _ = jsontext.LaxBool(m.Raw)
		case "return_token_ids":
			q.ReturnIDs, _ = jsontext.LaxBool(m.Raw)
		}
		if bad := q.Kv.Read(k, string(m.Key), m.Raw); bad != nil {
			return bad
		}
	}
	return nil
}

// readLimits reads the bounds of the answer, from each API's own members.
func (q *Request) readLimits() *engine.Error {
	from := q.Raw
	q.maxTokensMember = "max_tokens"
	switch q.API {
	case Generate:
		params := q.Raw("sampling_params")
		if !jsontext.IsObject(params) {
			return engine.Pydantic("missing", "sampling_params", "Field required", []byte("None"))
		}
		from = func(name string) []byte { return jsontext.Get(params, name) }
	case SGLang:
		params := q.Raw("sampling_params")
		from = func(name string) []byte { return jsontext.Get(params, name) }
		q.maxTokensMember = "max_new_tokens"
	case Chat:
		if !jsontext.IsNull(q.Raw("max_completion_tokens")) { // overrides max_tokens
			q.maxTokensMember = "max_completion_tokens"
		}
	case Responses:
		q.maxTokensMember = "max_output_tokens"
	}
	for _, f := range []struct {
		name string
		into *int64
	}{{q.maxTokensMember, &q.MaxTokens}, {"min_tokens", &q.MinTokens}, {"n", &q.N}} {
		raw := from(f.name)
		if jsontext.IsNull(raw) {
			continue
		}
		n, ok := jsontext.LaxInteger(raw)
		if !ok {
			return engine.Pydantic("int_type", f.name, "Input should be a valid integer", raw)
		}
		switch {
		case n < 0 && f.into == &q.MaxTokens:
			return engine.BadRequest("max_tokens must be at least 1, got %d.", n)
		case n < 0 && f.into == &q.MinTokens:
			return engine.BadRequest("min_tokens must be greater than or equal to 0, got %d.", n)
		}
		*f.into = n
	}
	q.readStops(from)
	switch raw := from("logprobs"); {
	case jsontext.IsTrue(raw):
		q.Logprobs, _ = jsontext.Integer(from("top_logprobs"))
	case jsontext.IsNumber(raw):
		q.Logprobs, _ = jsontext.Integer(raw)
	}
	return nil
}

func (q *Request) readStops(from func(string) []byte) {
	switch raw := from("stop"); {
	case jsontext.IsString(raw):
		q.Stop = []string{string(jsontext.Text(raw))}
	case jsontext.IsArray(raw):
		jsontext.EachElement(raw, func(elem []byte) bool {
			if s := string(jsontext.Text(elem)); s != "" {
				q.Stop = append(q.Stop, s)
			}
			return true
		})
	}
	if q.API == Messages {
		if raw := from("stop_sequences"); jsontext.IsArray(raw) {
			jsontext.EachElement(raw, func(elem []byte) bool {
				q.Stop = append(q.Stop, string(jsontext.Text(elem)))
				return true
			})
		}
	}
	q.StopIDs, _ = jsontext.TokenIDs(from("stop_token_ids"))
	q.IncludeStop, _ = jsontext.LaxBool(from("include_stop_str_in_output"))
}

// checkCommon makes the checks that vLLM makes before it looks for the model.
func (q *Request) checkCommon() *engine.Error {
	options := q.Raw("stream_options")
	if jsontext.Truthy(options) && !jsontext.Truthy(q.Raw("stream")) { // as they stand, not as they are read
		return engine.BadParam("stream_options", "", "Stream options can only be defined when `stream=True`.")
	}
	q.IncludeUsage, _ = jsontext.LaxBool(jsontext.Get(options, "include_usage"))
	switch {
	case q.N < 1:
		return engine.BadRequest("n must be at least 1, got %d.", q.N)
	case q.N > maxChoices:
		return engine.BadRequest("n must be at most %d, got %d.", maxChoices, q.N)
	case q.Logprobs > maxLogprobs:
		return engine.BadRequest("Requested sample logprobs of %d, which is greater than max allowed: %d", q.Logprobs,
			maxLogprobs)
	}
	if q.API == Messages && q.MaxTokens < 0 {
		return engine.Pydantic("missing", "max_tokens", "Field required", []byte("None"))
	}
	var required string
	switch q.API {
	case Chat, Messages:
		required = "messages"
	case Responses:
		required = "input"
	case Generate:
		required = "token_ids"
	case Completions:
		required = "prompt"
	case SGLang:
		required = "text"
		if jsontext.IsNull(q.Raw("text")) {
			required = "input_ids"
		}
	}
	if jsontext.IsNull(q.Raw(required)) {
		return engine.Missing(required, q.Members)
	}
	return nil
}

// CheckModel makes the checks that need the model: its name and its limits.
func (q *Request) CheckModel(c *Limits) *engine.Error {
	known := q.Model == ""
	for _, m := range c.Models {
		known = known || m == q.Model
	}
	if !known {
		e := &engine.Error{Status: 404, Typ: "NotFoundError", Param: "model"}
		e.Message = "The model `" + q.Model + "` does not exist. Valid aliases: "
		for i, m := range c.Models {
			if i > 0 {
				e.Message += ", "
			}
			e.Message += m
		}
		e.Message += "."
		return e
	}
	if q.MaxTokens > int64(c.MaxModelLen) {
		return engine.BadParam(q.maxTokensMember, strconv.FormatInt(q.MaxTokens, 10),
			"%s=%d cannot be greater than max_model_len=%d. Please request fewer output tokens.", q.maxTokensMember,
			q.MaxTokens, c.MaxModelLen)
	}
	if q.MaxTokens == 0 {
		return engine.BadRequest("max_tokens must be at least 1, got 0.")
	}
	if q.MaxTokens >= 0 && q.MinTokens > q.MaxTokens {
		return engine.BadRequest("min_tokens must be less than or equal to max_tokens=%d, got %d.", q.MaxTokens,
			q.MinTokens)
	}
	return q.checkTools(c)
}

// forcesTool reports whether the request forces a call that its engine parses: any tool, not a named one.
func (q *Request) forcesTool() bool {
	return string(q.ToolChoice) == `"required"` ||
		jsontext.IsObject(q.ToolChoice) && string(jsontext.Text(jsontext.Get(q.ToolChoice, "type"))) == "any"
}

func (q *Request) checkTools(c *Limits) *engine.Error {
	if c.OldForcedTools && q.MaxTokens == 1 && q.forcesTool() {
		const message = "1 validation error for list[FunctionDefinition]\n  Invalid JSON: EOF while parsing a list"
		if q.API == Responses {
			return &engine.Error{Status: 500, Typ: "InternalServerError", Message: message}
		}
		return engine.BadRequest(message)
	}
	if q.API != Chat || c.ToolParser || jsontext.IsNull(q.Tools) {
		return nil
	}
	switch {
	case jsontext.IsObject(q.ToolChoice):
		return engine.BadRequest("tool_choice=function \"%s\" requires --tool-call-parser to be set",
			jsontext.Text(jsontext.Get(jsontext.Get(q.ToolChoice, "function"), "name")))
	case string(q.ToolChoice) == `"required"`:
		return engine.BadRequest(`tool_choice="required" requires --tool-call-parser to be set`)
	case string(q.ToolChoice) == `"none"`:
		return nil
	}
	return engine.BadRequest(`"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`)
}

// CheckLength makes the checks that need the tokenised prompt.
func (q *Request) CheckLength(prompts []*engine.Prompt, c *Limits) *engine.Error {
	for _, p := range prompts {
		switch room := c.MaxModelLen - p.N; {
		case p.N == 0:
			return engine.BadRequest("The decoder prompt cannot be empty")
		case room < 1:
			return engine.BadParam("input_tokens", strconv.Itoa(p.N),
				"This model's maximum context length is %d tokens. However, your request has %d input tokens. "+
					"Please reduce the length of the input messages.", c.MaxModelLen, p.N)
		case q.MaxTokens > int64(room):
			return engine.BadParam(q.maxTokensMember, strconv.FormatInt(q.MaxTokens, 10),
				"'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is "+
					"%d tokens and your request has %d input tokens (%d > %d - %d).",
				q.MaxTokens, c.MaxModelLen, p.N, q.MaxTokens, c.MaxModelLen, p.N)
		}
	}
	return nil
}
