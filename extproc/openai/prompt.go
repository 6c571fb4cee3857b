package openai

import (
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

// prompt returns the member that holds the prompt's bulk.
func (r *Request) prompt() []byte {
	switch r.api {
	case Chat, Messages:
		return r.Raw(FieldMessages)
	case Completions:
		return only(r.Raw(FieldPrompt))
	case Responses:
		return r.Raw(FieldInput)
	case Generate:
		return r.Raw(FieldTokenIDs)
	case SGLangGenerate:
		if raw := r.Raw(FieldText); present(raw) {
			return raw
		}
		return r.Raw(FieldInputIDs)
	default:
		return nil
	}
}

// only returns the prompt of a list of one, text or token ids, which engines answer like that prompt by itself (vLLM
// 0.32.0 names even its request alike, serving.py of completion). Anything else is returned as it is.
func only(prompt []byte) []byte {
	if len(prompt) == 0 || prompt[0] != '[' {
		return prompt
	}
	start := skipSpace(prompt, 1)
	if prompt[start] != '"' && prompt[start] != '[' {
		return prompt
	}
	end, _ := skipValue(prompt, start, maxNesting)
	if prompt[skipSpace(prompt, end)] != ']' {
		return prompt
	}
	return prompt[start:end:end]
}

// Prompts returns the number of prompts in the body. list reports whether they are a list of strings or of lists of
// token ids; a single prompt may stand outside such a list.
func (r *Request) Prompts() (n int, list bool) {
	raw := r.prompt()
	if r.api == Completions {
		raw = r.Raw(FieldPrompt) // with its list
	}
	if r.api != Completions && r.api != SGLangGenerate || len(raw) == 0 || raw[0] != '[' {
		return 1, false
	}
	if first := raw[skipSpace(raw, 1)]; first != '"' && first != '[' {
		return 1, false
	}
	for range elements(raw) {
		n++
	}
	return n, true
}

// PromptBytes returns the length of the prompt as it stands in the body, 0 if there is none. What [Request.PromptHash]
// leaves out is not counted, nor are media.
func (r *Request) PromptBytes() int { return max(len(r.prompt())-r.beside.bytes-r.beside.cutBytes, 0) }

// PromptText returns the raw bytes that [Request.PromptHash] covers; nil if the prompt is empty, or if that leaves out
// some of its bytes.
func (r *Request) PromptText() []byte {
	b := r.prompt()
	if len(b) == 0 || len(r.beside.found) > 0 || r.beside.cutBytes > 0 {
		return nil
	}
	return b[:len(b)-1]
}

// PromptIDs returns the prompt if the client gives it as token ids: a JSON array as it stands in the body; else nil.
func (r *Request) PromptIDs() []byte {
	raw := r.prompt()
	if len(raw) == 0 || raw[0] != '[' || r.api != Generate && (r.api != Completions || r.promptList()) {
		return nil
	}
	return raw
}

// PromptHash appends the hashes of the prompt's leading blocks to dst: each covers its block and everything before it.
// Blocks are blockBytes of the prompt member's raw bytes, full ones only, at most maxBlocks of them. Every hash also
// covers the members that a chat template renders in front, or that keep caches apart (model, tools, system, salt,
// ...).
//
// Two requests share hashes as far as their bytes are equal: in a growing conversation, over all earlier turns. The
// hashes are the same in every process of a release. They estimate the content of the engine's prefix cache cheaply
// and without a tokenizer: the same text with other white space or escapes is another prompt.
//
// What engines do not render is left out (unrendered.go): marks that say what to cache move with each turn.
//
// A medium has blocks of its own, which cover it as a whole: an engine computes nothing of two images that merely begin
// alike. It has as many blocks as a text of the same number of tokens, so that blocks and tokens keep their proportion.
func (r *Request) PromptHash(dst []uint64, blockBytes, maxBlocks int) []uint64 {
	h := xxhash.Sum64String(r.model)
	for i, f := range [...]Field{FieldCacheSalt, FieldTools, FieldSystem, FieldInstructions, FieldReasoningEffort,
		FieldChatTemplate, FieldChatTemplateKwargs, FieldDocuments} {
		if raw := r.Raw(f); present(raw) {
			h = chain(h, r.sum(f)+uint64(i))
		}
	}
	b := r.prompt()
	if len(b) == 0 || blockBytes <= 0 {
		return dst
	}
	b = b[:len(b)-1] // the closing bracket or quote: the next turn continues there
	w := blockHasher{dst: dst, h: h, blockBytes: blockBytes, most: len(dst) + maxBlocks}
	if r.api != Chat && r.api != Messages && r.api != Responses { // its media are beside its text
		for i := range r.beside.found {
			_, w.h = r.beside.found[i].hash(nil, w.h, xxhash.Sum64(nil), r.body, 0)
		}
		w.write(b)
		return w.dst
	}
	at := int(r.promptStart())
	end := at + len(b)
	for i := range r.beside.found {
		m := &r.beside.found[i]
		if int(m.start) < at || int(m.end) > end {
			continue
		}
		r.rendered(at, int(m.start), w.write)
		w.medium(m, r.body)
		at = int(m.end)
	}
	r.rendered(at, end, w.write)
	return w.dst
}

// promptStart returns where in the body the prompt begins, if it may have media.
func (r *Request) promptStart() int32 {
	f := FieldMessages
	if r.api == Responses {
		f = FieldInput
	}
	return r.member(scopeTop, f).value
}

// chain combines two hashes; their order matters.
func chain(h, next uint64) uint64 {
	return bits.RotateLeft64(h, 27)*0x9E3779B185EBCA87 ^ next
}

// Unsplittable returns the reason why one engine has to answer the request, "" if two may share it. The reasons are
// label values.
//
// The prefill endpoint's answer carries the KV cache of one sequence, so several choices or prompts need a single
// engine. Prompt logprobs are computed from the prompt itself, whatever is cached (vLLM: base_scheduler.py of NIXL,
// 0.33.0). A stored response belongs to the engine that has it. An engine that runs tools itself generates several
// times with the same KV parameters (vLLM: entrypoints/openai/responses, the loop over built-in tools), which after
// the first time can name another request's blocks.
func (r *Request) Unsplittable() (reason string) {
	switch {
	case several(r.limit(FieldN)), several(r.limit(FieldBestOf)):
		return "several_choices"
	case wanted(r.limit(FieldBeamSearch)):
		return "beam_search"
	case wanted(r.Raw(FieldEcho)):
		return "echo"
	case present(r.limit(FieldPromptLogprobs)):
		return "prompt_logprobs"
	case r.promptList():
		return "prompt_list"
	case present(r.Raw(FieldPromptEmbeds)):
		return "prompt_embeds"
	case r.api != Responses:
		return ""
	case present(r.Raw(FieldPreviousResponseID)), wanted(r.Raw(FieldStore)), wanted(r.Raw(FieldBackground)):
		return "stored_response"
	case r.engineTools():
		return "engine_tools"
	}
	return ""
}

// SeveralChoices reports whether the body may ask for anything but one answer to each prompt. SGLang's /generate also
// takes a list of sampling_params, one for each prompt.
func (r *Request) SeveralChoices() bool {
	if several(r.limit(FieldN)) {
		return true
	}
	for params := range elements(r.Raw(FieldSamplingParams)) {
		for key, value := range pairs(params) {
			if string(key) == "n" && several(value) {
				return true
			}
		}
	}
	return false
}

// limit returns a member of sampling_params if the API has those, else of the body.
func (r *Request) limit(f Field) []byte {
	if r.api == Generate || r.api == SGLangGenerate {
		return r.Sampling(f)
	}
	return r.Raw(f)
}

// several reports whether a number of choices is anything but one.
func several(raw []byte) bool {
	n, ok := Count(raw)
	return present(raw) && (!ok || n != 1)
}

// promptList reports whether a completion has a list of prompts that is not one prompt in a list: an array that does
// not start with a token id.
func (r *Request) promptList() bool {
	raw := r.prompt()
	if r.api != Completions || len(raw) == 0 || raw[0] != '[' {
		return false
	}
	first := raw[skipSpace(raw, 1)]
	return first != '-' && first-'0' > 9
}

// engineTools reports whether there are tools other than the client's functions: web_search, code_interpreter, mcp.
// Malformed tools count too: one engine shall refuse them.
func (r *Request) engineTools() bool {
	raw := r.Raw(FieldTools)
	if !present(raw) {
		return false
	}
	if raw[0] != '[' {
		return true
	}
	for tool := range elements(raw) {
		function := false
		for key, value := range pairs(tool) {
			if string(key) != "type" {
				continue
			}
			if string(value) != `"function"` {
				return true
			}
			function = true
		}
		if !function {
			return true
		}
	}
	return false
}
