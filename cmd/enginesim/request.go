package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"
	"strconv"
)

// api is one of the five paths that generate.
type api uint8

const (
	apiNone api = iota
	apiChat
	apiCompletions
	apiResponses
	apiMessages
	apiGenerate
	apiSGLang
)

const (
	maxChoices  = 16384 // VLLM_MAX_N_SEQUENCES
	maxLogprobs = 20
)

// request is a body that has been read: what the five APIs have in common, under one name each.
type request struct {
	api     api
	size    int // of the body
	model   string
	members []member

	stream          bool
	includeUsage    bool
	maxTokens       int64 // -1: not given
	minTokens       int64
	n               int64
	stop            []string
	stopIDs         []uint32
	includeStop     bool
	logprobs        int64 // alternatives per token; -1: none asked for
	echo            bool
	returnIDs       bool
	temperature     json.RawMessage
	topP            json.RawMessage
	salt            string
	keepIDs         bool // of the prompt, for KV events
	tools           []byte
	toolChoice      []byte
	kv              kvParams
	roomLeg         string // of a server that does one leg of two
	hasParams       bool   // kv_transfer_params is there and not null
	maxTokensMember string
	transcript      []byte // of the response that previous_response_id names
}

// throwsAway reports whether the request is one whose KV may be another prompt's, because nothing of it is used: one token is
// made of it, and a salt keeps it from being found again. A router sends such a request to have a prefill engine let go.
func (q *request) throwsAway() bool { return q.maxTokens == 1 && q.salt != "" }

func (q *request) raw(name string) (val []byte) {
	for _, m := range slices.Backward(q.members) { // the last of several wins, as in Python
		if string(m.key) == name {
			return m.raw
		}
	}
	return nil
}

// leg says what the request is to the protocol.
func (q *request) leg() string {
	switch {
	case q.roomLeg != "":
		return q.roomLeg
	case q.kv.remotePrefill:
		return "decode"
	case q.kv.remoteDecode, q.kv.spec != nil:
		return "prefill"
	}
	return "plain"
}

// parseRequest reads and checks a body up to what does not need the model. Without a connector kv_transfer_params are
// ignored as vLLM does; faithful lets a duplicate key pass as Python does.
func parseRequest(a api, body []byte, members []member, k connector, faithful bool) (*request, *apiError) {
	q := &request{api: a, size: len(body), maxTokens: -1, n: 1, logprobs: -1}
	var err error
	if q.members, err = scanObject(members, body); err != nil {
		if errors.Is(err, errNotObject) {
			return q, pydantic("model_attributes_type", "", "Input should be a valid dictionary or object to extract fields from", body)
		}
		return q, badRequest("1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON decode error', 'ctx': {'error': '%v'}}", err)
	}
	if !faithful {
		if key := duplicate(q.members); key != "" {
			return q, badRequest("enginesim: the key %q occurs twice; an engine would silently use the last one", key)
		}
	}
	if e := q.readCommon(k); e != nil {
		return q, e
	}
	if e := q.readLimits(); e != nil {
		return q, e
	}
	return q, q.checkCommon()
}

func duplicate(members []member) string {
	if len(members) > 32 {
		seen := make(map[string]bool, len(members))
		for _, m := range members {
			if seen[string(m.key)] {
				return string(m.key)
			}
			seen[string(m.key)] = true
		}
		return ""
	}
	for i, m := range members {
		for _, other := range members[:i] {
			if bytes.Equal(m.key, other.key) {
				return string(m.key)
			}
		}
	}
	return ""
}

func (q *request) readCommon(k connector) *apiError {
	for _, m := range q.members {
		switch string(m.key) {
		case "model":
			if !isString(m.raw) && !isNull(m.raw) {
				return pydantic("string_type", "model", "Input should be a valid string", m.raw)
			}
			q.model = string(text(m.raw))
		case "stream":
			q.stream = isTrue(m.raw)
		case "cache_salt":
			q.salt = string(text(m.raw))
		case "tools":
			q.tools = m.raw
		case "tool_choice":
			q.toolChoice = m.raw
		case "temperature":
			q.temperature = m.raw
		case "top_p":
			q.topP = m.raw
		case "echo":
			q.echo = isTrue(m.raw)
		case "return_token_ids":
			q.returnIDs = isTrue(m.raw)
		}
		if bad := q.readTransfer(k, m); bad != nil {
			return bad
		}
	}
	return nil
}

// readLimits reads what bounds the answer, from where each API keeps it.
func (q *request) readLimits() *apiError {
	from := q.raw
	q.maxTokensMember = "max_tokens"
	switch q.api {
	case apiGenerate:
		params := q.raw("sampling_params")
		if !isObject(params) {
			return pydantic("missing", "sampling_params", "Field required", []byte("None"))
		}
		from = func(name string) []byte { return get(params, name) }
	case apiSGLang:
		params := q.raw("sampling_params")
		from = func(name string) []byte { return get(params, name) }
		q.maxTokensMember = "max_new_tokens"
	case apiChat:
		if !isNull(q.raw("max_completion_tokens")) { // beats max_tokens
			q.maxTokensMember = "max_completion_tokens"
		}
	case apiResponses:
		q.maxTokensMember = "max_output_tokens"
	}
	for _, f := range []struct {
		name string
		into *int64
	}{{q.maxTokensMember, &q.maxTokens}, {"min_tokens", &q.minTokens}, {"n", &q.n}} {
		raw := from(f.name)
		if isNull(raw) {
			continue
		}
		n, ok := integer(raw)
		if !ok {
			return pydantic("int_type", f.name, "Input should be a valid integer", raw)
		}
		switch {
		case n < 0 && f.into == &q.maxTokens:
			return badRequest("max_tokens must be at least 1, got %d.", n)
		case n < 0 && f.into == &q.minTokens:
			return badRequest("min_tokens must be greater than or equal to 0, got %d.", n)
		}
		*f.into = n
	}
	q.readStops(from)
	switch raw := from("logprobs"); {
	case isTrue(raw):
		q.logprobs, _ = integer(from("top_logprobs"))
	case isNumber(raw):
		q.logprobs, _ = integer(raw)
	}
	return nil
}

func (q *request) readStops(from func(string) []byte) {
	switch raw := from("stop"); {
	case isString(raw):
		q.stop = []string{string(text(raw))}
	case isArray(raw):
		eachElement(raw, func(elem []byte) bool {
			if s := string(text(elem)); s != "" {
				q.stop = append(q.stop, s)
			}
			return true
		})
	}
	if q.api == apiMessages {
		if raw := from("stop_sequences"); isArray(raw) {
			eachElement(raw, func(elem []byte) bool {
				q.stop = append(q.stop, string(text(elem)))
				return true
			})
		}
	}
	q.stopIDs, _ = tokenIDs(from("stop_token_ids"))
	q.includeStop = isTrue(from("include_stop_str_in_output"))
}

// checkCommon is what vLLM refuses before it looks for the model.
func (q *request) checkCommon() *apiError {
	options := q.raw("stream_options")
	if !isNull(options) && !q.stream {
		return badParam("stream_options", "", "Stream options can only be defined when `stream=True`.")
	}
	q.includeUsage = isTrue(get(options, "include_usage"))
	switch {
	case q.n < 1:
		return badRequest("n must be at least 1, got %d.", q.n)
	case q.n > maxChoices:
		return badRequest("n must be at most %d, got %d.", maxChoices, q.n)
	case q.logprobs > maxLogprobs:
		return badRequest("Requested sample logprobs of %d, which is greater than max allowed: %d", q.logprobs, maxLogprobs)
	}
	if q.api == apiMessages && q.maxTokens < 0 {
		return pydantic("missing", "max_tokens", "Field required", []byte("None"))
	}
	var required string
	switch q.api {
	case apiChat, apiMessages:
		required = "messages"
	case apiResponses:
		required = "input"
	case apiGenerate:
		required = "token_ids"
	case apiCompletions:
		required = "prompt"
	case apiSGLang:
		required = "text"
		if isNull(q.raw("text")) {
			required = "input_ids"
		}
	}
	if isNull(q.raw(required)) {
		return missing(required, q.members)
	}
	return nil
}

// checkModel is what vLLM refuses once it knows the model: its name and its limits.
func (q *request) checkModel(c *config) *apiError {
	known := q.model == ""
	for _, m := range c.models {
		known = known || m == q.model
	}
	if !known {
		e := &apiError{status: 404, typ: "NotFoundError", param: "model"}
		e.message = "The model `" + q.model + "` does not exist. Valid aliases: "
		for i, m := range c.models {
			if i > 0 {
				e.message += ", "
			}
			e.message += m
		}
		e.message += "."
		return e
	}
	if q.maxTokens > int64(c.maxModelLen) {
		return badParam(q.maxTokensMember, strconv.FormatInt(q.maxTokens, 10),
			"%s=%d cannot be greater than max_model_len=%d. Please request fewer output tokens.", q.maxTokensMember, q.maxTokens, c.maxModelLen)
	}
	if q.maxTokens == 0 {
		return badRequest("max_tokens must be at least 1, got 0.")
	}
	if q.maxTokens >= 0 && q.minTokens > q.maxTokens {
		return badRequest("min_tokens must be less than or equal to max_tokens=%d, got %d.", q.maxTokens, q.minTokens)
	}
	return q.checkTools(c)
}

func (q *request) checkTools(c *config) *apiError {
	if q.api != apiChat || c.toolParser || isNull(q.tools) {
		return nil
	}
	switch {
	case isObject(q.toolChoice):
		return badRequest("tool_choice=function \"%s\" requires --tool-call-parser to be set", text(get(get(q.toolChoice, "function"), "name")))
	case string(q.toolChoice) == `"required"`:
		return badRequest(`tool_choice="required" requires --tool-call-parser to be set`)
	case string(q.toolChoice) == `"none"`:
		return nil
	}
	return badRequest(`"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set`)
}

// checkLength is what can only be said of the tokenised prompt.
func (q *request) checkLength(prompts []*prompt, c *config) *apiError {
	for _, p := range prompts {
		switch room := c.maxModelLen - p.n; {
		case p.n == 0:
			return badRequest("The decoder prompt cannot be empty")
		case room < 1:
			return badParam("input_tokens", strconv.Itoa(p.n),
				"This model's maximum context length is %d tokens. However, your request has %d input tokens. Please reduce the length of the input messages.", c.maxModelLen, p.n)
		case q.maxTokens > int64(room):
			return badParam(q.maxTokensMember, strconv.FormatInt(q.maxTokens, 10),
				"'max_tokens' or 'max_completion_tokens' is too large: %d. This model's maximum context length is %d tokens and your request has %d input tokens (%d > %d - %d).",
				q.maxTokens, c.maxModelLen, p.n, q.maxTokens, c.maxModelLen, p.n)
		}
	}
	return nil
}
