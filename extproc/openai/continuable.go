package openai

import "strings"

// completionLimit is how many tokens a completion has where its body does not say (vLLM: CompletionRequest.max_tokens).
const completionLimit = 16

// TokenLimit is how long the answer to a chat or a completion may be; 0: as long as the model goes on. It is false
// where the limit is no number from 1 on, which is for an engine to judge.
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
	n, ok = integer(raw)
	return n, ok && n > 0
}

// AnswerTokens is how many tokens the request wants its answer to have at least, and at most; 0: it does not say.
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
	least, _ = integer(get(FieldMinTokens))
	most, _ = integer(get(limit))
	return max(least, 0), max(most, 0)
}

// Uncontinuable says why one engine has to write the answer from its first token on, "" if a second one may go on
// behind that, over /v1/completions with the token as part of its prompt ([Continuation]). The reasons are label
// values.
//
// What a chat endpoint makes of text (tool calls) is not made there, and what looks at the answer as a whole would
// miss its beginning: a grammar, a stop string, penalties. Media are no part of a prompt's token ids.
func (r *Request) Uncontinuable() (reason string) {
	if r.api != Chat && r.api != Completions {
		return "api"
	}
	if n, ok := r.TokenLimit(); !ok || n == 1 {
		return "limit"
	}
	if raw := r.Raw(FieldMinTokens); present(raw) {
		if _, ok := integer(raw); !ok {
			return "limit"
		}
	}
	for i := range r.members[scopeTop] {
		m := &r.members[scopeTop][i]
		if value := r.text(m); present(value) {
			if reason := uncontinuable(string(r.key(m)), value); reason != "" {
				return reason
			}
		}
	}
	if r.api == Chat && hasMedia(r.Raw(FieldMessages)) {
		return "media"
	}
	return ""
}

func uncontinuable(name string, value []byte) string {
	switch name {
	case "tools", "functions":
		return "tools"
	case "response_format":
		for key, kind := range pairs(value) {
			if string(key) == "type" && string(kind) == `"text"` {
				return ""
			}
		}
		return "grammar"
	case "structured_outputs":
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
	case "seed":
		return "seed"
	case "suffix", "truncate_prompt_tokens":
		return "prompt"
	case "return_token_ids":
		if string(value) == "true" {
			return "token_ids"
		}
	case "modalities", "audio":
		return "media"
	}
	if strings.HasPrefix(name, "guided_") {
		return "grammar"
	}
	return ""
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
