package openai

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
