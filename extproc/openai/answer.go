package openai

import "fmt"

// Answer is what is read of a prefill endpoint's answer.
type Answer struct {
	Params       []byte // kv_transfer_params as it stands in the answer; nil: absent or null
	PromptTokens int64  // -1: not said
	CachedTokens int64  // of the prompt's; -1: not said
}

// ScanAnswer reads an engine's JSON answer to any of the APIs. Params refers to body.
func ScanAnswer(body []byte) (Answer, error) {
	a := Answer{PromptTokens: -1, CachedTokens: -1}
	s := scanner{b: body, lim: Limits{}.withDefaults()}
	members, _, err := s.document(nil, nil)
	if err != nil {
		return a, fmt.Errorf("reading an engine's answer: %w", err)
	}
	for _, m := range members {
		value := body[m.value:m.valueEnd:m.valueEnd]
		switch string(body[m.key+1 : m.keyEnd-1]) {
		case "kv_transfer_params":
			if string(value) != "null" {
				a.Params = value
			}
		case "usage":
			a.readUsage(value)
		}
	}
	return a, nil
}

// readUsage reads the usage object of chat and completions (prompt_tokens, prompt_tokens_details.cached_tokens) or of
// responses and messages (input_tokens, input_tokens_details.cached_tokens, cache_read_input_tokens).
func (a *Answer) readUsage(usage []byte) {
	each(usage, func(key string, value []byte) {
		switch key {
		case "prompt_tokens", "input_tokens":
			if n, ok := integer(value); ok && n >= 0 {
				a.PromptTokens = n
			}
		case "cache_read_input_tokens":
			if n, ok := integer(value); ok && n >= 0 {
				a.CachedTokens = n
			}
		case "prompt_tokens_details", "input_tokens_details":
			each(value, func(key string, value []byte) {
				if n, ok := integer(value); ok && n >= 0 && key == "cached_tokens" {
					a.CachedTokens = n
				}
			})
		}
	})
}

// each visits the members of a validated object; anything else has none.
func each(object []byte, visit func(key string, value []byte)) {
	if len(object) == 0 || object[0] != '{' {
		return
	}
	s := scanner{b: object, lim: Limits{}.withDefaults()}
	members, _, err := s.document(nil, nil)
	if err != nil {
		return
	}
	for _, m := range members {
		visit(string(object[m.key+1:m.keyEnd-1]), object[m.value:m.valueEnd])
	}
}
