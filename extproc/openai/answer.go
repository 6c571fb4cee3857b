package openai

import (
	"fmt"
	"math"
)

// Answer has the members of a prefill endpoint's answer that Tandem uses.
type Answer struct {
	Params       []byte // kv_transfer_params as it stands in the answer; nil: absent or null. Refers to the answer
	PromptTokens int64  // -1: absent
	CachedTokens int64  // tokens of the prompt that came from the prefix cache; -1: absent
	// prompt_token_ids, an array as it stands in the answer; nil: absent or null. Refers to the answer
	PromptIDs []byte
	Encoded   []byte // ec_transfer_params of an encode endpoint, as it stands in the answer
	// tokens of the prompt that were newly written to the prefix cache; -1: absent
	WrittenTokens int64
}

// ScanAnswer reads an engine's JSON answer to any of the APIs. It validates all of it.
func ScanAnswer(body []byte) (Answer, error) {
	a := Answer{PromptTokens: -1, CachedTokens: -1, WrittenTokens: -1}
	var d document
	if err := d.scan(body, Limits{}); err != nil {
		return a, fmt.Errorf("reading an engine's answer: %w", err)
	}
	for i := range d.members[scopeTop] {
		m := &d.members[scopeTop][i]
		switch {
		case m.field == FieldKVTransferParams && present(d.text(m)):
			a.Params = d.text(m)
		case string(d.key(m)) == "ec_transfer_params" && present(d.text(m)):
			a.Encoded = d.text(m)
		case string(d.key(m)) == "usage":
			a.readUsage(d.text(m))
		case string(d.key(m)) == "meta_info": // SGLang's /generate
			a.readMeta(d.text(m))
		case string(d.key(m)) == "prompt_token_ids" && present(d.text(m)): // chat completions
			a.PromptIDs = d.text(m)
		case string(d.key(m)) == "choices": // completions have them in their choices
			a.readChoices(d.text(m))
		}
	}
	return a, nil
}

func (a *Answer) readChoices(choices []byte) {
	for choice := range elements(choices) {
		for key, value := range pairs(choice) {
			if string(key) == "prompt_token_ids" && present(value) {
				a.PromptIDs = value
			}
		}
		return
	}
}

// TokenIDs appends the numbers of a validated JSON array to dst. It returns false if one of them is not a token id.
func TokenIDs(dst []uint32, array []byte) ([]uint32, bool) {
	if len(array) == 0 || array[0] != '[' {
		return dst, false
	}
	id, digits := uint64(0), 0
	for _, c := range array[1:] {
		switch {
		case c >= '0' && c <= '9':
			if id = id*10 + uint64(c-'0'); id > math.MaxUint32 {
				return dst, false
			}
			digits++
		case c == ',' || c == ']':
			if digits > 0 {
				dst = append(dst, uint32(id))
			}
			id, digits = 0, 0
		case c != ' ' && c != '\n' && c != '\t' && c != '\r':
			return dst, false
		}
	}
	return dst, true
}

// readUsage reads a usage object. Chat and completions have prompt_tokens and prompt_tokens_details.cached_tokens,
// responses input_tokens and input_tokens_details.cached_tokens. Messages follow Anthropic: input_tokens counts only
// the tokens that were neither read from the cache nor written to it (vLLM 0.32.0: 3 of 99, the other 96 in
// cache_creation_input_tokens).
func (a *Answer) readUsage(usage []byte) {
	created, read := int64(-1), int64(-1)
	for key, value := range pairs(usage) {
		switch string(key) {
		case "prompt_tokens", "input_tokens":
			a.PromptTokens = count(value)
		case "cache_creation_input_tokens":
			created = count(value)
		case "cache_read_input_tokens":
			read = count(value)
		case "prompt_tokens_details", "input_tokens_details":
			for key, value := range pairs(value) {
				switch string(key) {
				case "cached_tokens":
					a.CachedTokens = count(value)
				case "created_cache_tokens", "cache_write_tokens": // chat; responses (vLLM 0.32)
					a.WrittenTokens = count(value)
				}
			}
		}
	}
	if read >= 0 {
		a.CachedTokens = read
	}
	if created >= 0 {
		a.WrittenTokens = created
	}
	if a.PromptTokens >= 0 {
		a.PromptTokens += max(created, 0) + max(read, 0)
	}
}

// readMeta reads the meta_info of SGLang's /generate (0.5.23, srt/managers/tokenizer_manager.py).
func (a *Answer) readMeta(meta []byte) {
	for key, value := range pairs(meta) {
		switch string(key) {
		case "prompt_tokens":
			a.PromptTokens = count(value)
		case "cached_tokens":
			a.CachedTokens = count(value)
		}
	}
}

// count returns a number of tokens, or -1 if raw is not one.
func count(raw []byte) int64 {
	n, ok := integer(raw)
	if !ok || n < 0 || n > 1<<40 {
		return -1
	}
	return n
}
