package openai

import "slices"

// Shaped reports whether the answer is to have a form that one token may not have: a forced tool call, structured
// output, a least length, a budget of thoughts. An engine that is asked for one token of it may fail over what it has
// written, although nothing is wrong with the request: vLLM before 0.18 answers a forced tool call that its limit cuts
// off with 400 or, on /v1/responses, 500 (vllm#36794). A name that is written with escapes is not seen.
func (r *Request) Shaped() bool {
	for _, s := range [...]scope{scopeTop, scopeSampling} {
		for i := range r.members[s] {
			m := &r.members[s][i]
			if shapes(r.key(m), r.text(m)) {
				return true
			}
		}
	}
	return false
}

// shapes reports whether a member gives the answer a form. The names are those of vLLM 0.33 (its older guided_ ones
// too), SGLang 0.5.23, OpenAI and Anthropic.
func shapes(key, value []byte) bool {
	if !present(value) {
		return false
	}
	switch string(key) {
	case "tool_choice": // required, {"type":"any"}, or the name of a tool; a mode as text or as an object
		return !isOneOf(wordOf(value), "auto", "none")
	case "response_format":
		return !isOneOf(wordOf(value), "text")
	case "text": // of Responses; the prompt of SGLang's /generate is no object
		for k, v := range pairs(value) {
			if string(k) == "format" && present(v) {
				return !isOneOf(wordOf(v), "text")
			}
		}
	case "min_tokens", "min_completion_tokens", "min_new_tokens":
		n, ok := Count(value)
		return !ok || n > 1
	case "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag",
		"json_schema", "regex", "ebnf", "output_format", "output_config", "thinking", "thinking_token_budget":
		return true
	}
	return false
}

// wordOf returns a word, or the type of an object, without its quotes.
func wordOf(value []byte) []byte {
	for k, v := range pairs(value) {
		if string(k) == "type" {
			value = v
			break
		}
	}
	if len(value) < 2 || value[0] != '"' {
		return nil
	}
	return value[1 : len(value)-1]
}

func isOneOf(word []byte, words ...string) bool { return slices.Contains(words, string(word)) }
