package openai

import (
	"iter"
	"strings"
)

// completionLimit is the default of max_tokens of a completion (vLLM: CompletionRequest.max_tokens).
const completionLimit = 16

// TokenLimit returns the maximum length of the answer to a chat or a completion, in tokens; 0: no limit. ok is false
// if the limit is not a number of at least 1: the engine decides about such a request.
func (r *Request) TokenLimit() (n int64, ok bool) {
	raw := r.Raw(FieldMaxTokens)
	switch {
	case r.api == Chat && present(r.Raw(FieldMaxCompletionTokens)):
		raw = r.Raw(FieldMaxCompletionTokens)
	case r.api == Completions && raw == nil:
		return completionLimit, true
	}
	if !present(raw) {
		return 0, true
	}
	n, ok = Count(raw)
	return n, ok && n > 0
}

// AnswerTokens returns the least and the greatest number of tokens that the request allows its answer; 0: no bound.
func (r *Request) AnswerTokens() (least, most int64) {
	get, limit := r.Raw, FieldMaxTokens
	switch r.api {
	case Chat:
		if present(r.Raw(FieldMaxCompletionTokens)) {
			limit = FieldMaxCompletionTokens
		}
	case Responses:
		limit = FieldMaxOutputTokens
	case Generate:
		get = r.Sampling
	case Completions, Messages, PassThrough:
	}
	least, _ = Count(get(FieldMinTokens))
	most, _ = Count(get(limit))
	return max(least, 0), max(most, 0)
}

// Uncontinuable returns the reason why one engine has to write the answer from its first token on, or "" if a second
// engine may continue it over /v1/completions with the first token at the end of its prompt ([Continuation]).
func (r *Request) Uncontinuable() (reason string) {
	for reason := range Obstacles(r) {
		return reason
	}
	return ""
}

// Obstacles yields all reasons for which a second engine cannot continue the answer from its tokens, as label values:
// /v1/completions does not parse tool calls as a chat endpoint does; a grammar, a stop string, penalties and other
// state of the sampler apply to the whole answer, and would miss its beginning; media cannot be written as token ids.
func Obstacles(r *Request) iter.Seq[string] {
	return func(yield func(string) bool) {
		if r.api != Chat && r.api != Completions {
			yield("api")
			return
		}
		n, ok := r.TokenLimit()
		if least := r.Raw(FieldMinTokens); ok && present(least) {
			_, ok = Count(least)
		}
		if (!ok || n == 1) && !yield("limit") {
			return
		}
		for i := range r.members[scopeTop] {
			m := &r.members[scopeTop][i]
			if value := r.text(m); present(value) {
				if reason := uncontinuable(string(r.key(m)), value); reason != "" && !yield(reason) {
					return
				}
			}
		}
		if r.api == Chat && hasMedia(r.Raw(FieldMessages)) {
			yield("media")
		}
	}
}

// obstacles are the members that are an obstacle with any value.
var obstacles = map[string]string{
	"tools": "tools", "functions": "tools", "structured_outputs": "grammar", "seed": "seed", "bad_words": "penalty",
	"suffix": "prompt", "truncate_prompt_tokens": "prompt", "modalities": "modalities", "audio": "modalities",
	"logits_processors": "processor", "vllm_xargs": "processor", "thinking_token_budget": "processor",
	"repetition_detection": "processor",
}

func uncontinuable(name string, value []byte) string {
	switch name {
	case "response_format":
		for key, kind := range pairs(value) {
			if string(key) == "type" && string(kind) == `"text"` {
				return ""
			}
		}
		return "grammar"
	case "stop":
		if string(value) != "[]" {
			return "stop"
		}
	case "logprobs", "top_logprobs":
		if string(value) != "false" {
			return "logprobs"
		}
	case "frequency_penalty", "presence_penalty":
		if strings.Trim(string(value), "-0.") != "" {
			return "penalty"
		}
	case "return_token_ids":
		if wanted(value) {
			return "token_ids"
		}
	case "spaces_between_special_tokens":
		if !wanted(value) {
			return "spaces"
		}
	}
	if strings.HasPrefix(name, "guided_") {
		return "grammar"
	}
	return obstacles[name]
}

// hasMedia reports whether messages have parts that are not text.
func hasMedia(messages []byte) bool {
	for message := range elements(messages) {
		for key, content := range pairs(message) {
			if string(key) != "content" {
				continue
			}
			for part := range elements(content) {
				if part[0] == '{' && !isText(part) {
					return true
				}
			}
		}
	}
	return false
}

func isText(part []byte) bool {
	for key, value := range pairs(part) {
		if string(key) == "type" {
			return string(value) == `"text"`
		}
	}
	return false
}
