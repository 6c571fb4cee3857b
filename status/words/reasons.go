package words

// Because says in words why a request was not split, by the reason of its decision; "" for an unknown one.
// docs/operations.md has the same list.
func Because(reason string) string {
	switch reason {
	case "no_kv_transfer":
		return "the pool splits nothing (kvTransfer is none)"
	case "policy":
		return "the pool splits nothing (split is never)"
	case "cheaper":
		return "it cost less than two hops"
	case "min_prefill_tokens":
		return "the pool splits no prompt as short as this (minPrefillTokens)"
	case "body_too_long":
		return "its body is too large to be split (envoy.maxBodyBytes)"
	case "several_choices", "beam_search", "echo", "prompt_logprobs", "prompt_list", "prompt_embeds", "stored_response",
		"engine_tools":
		return unsplittable(reason)
	case "other_engine":
		return "the pool's kvTransfer cannot split requests to this path"
	case "own_request_id":
		return "it has a request id of its own, and the pool's kvTransfer needs one that Tandem makes"
	case "unknown_peer":
		return "the prefill engine has not said who it is, which the pool's kvTransfer needs. " +
			"The log names it: look whether its bootstrap port answers"
	case "api_not_spoken":
		return "the pool's kvTransfer cannot split requests of this API"
	case "held_by_decode":
		return "decode held it but for less than a chunk of LMCache, and would leave in its buffer what P pushes"
	case "buffer_full":
		return "LMCache's receive buffer at decode had no space for the prompt in time (noticeTimeout)"
	case "buffer_too_small":
		return "LMCache's receive buffer at decode is smaller than the prompt (bufferTokens)"
	case "undo_too_large":
		return "what prefill must not see of it (mostly stop) is over 8 KiB"
	}
	return failing(reason)
}

// unsplittable names what of a request keeps it from being split.
func unsplittable(reason string) string {
	what := map[string]string{
		"several_choices": "several choices (n), and a KV cache that is handed over serves one",
		"beam_search":     "beam search, which needs one engine",
		"echo":            "its prompt back (echo), which needs one engine",
		"prompt_logprobs": "log probabilities of its prompt, which need one engine",
		"prompt_list":     "several prompts at once, and a KV cache that is handed over is of one",
		"prompt_embeds":   "a prompt of embeddings, which cannot be split",
		"stored_response": "a stored response, which only the engine that stores it has",
		"engine_tools":    "tools that the engine runs itself, which needs one engine",
	}[reason]
	return "it asks for " + what
}

// failing says why a request was not split although its pool splits such requests.
func failing(reason string) string {
	switch reason {
	case "no_prefill":
		return "no prefill endpoint could take it: they failed, are paused, or pair with no decode endpoint that works"
	case "no_room":
		return "no pair of engines of both roles had room for its KV, so one engine computed the prompt and answered"
	case "prefill_failed":
		return "its prefill failed, so decode computed the prompt, too"
	case "prefill_refused":
		return "prefill refused what it was sent, which is not the client's own body, so decode decided"
	case "model_not_found":
		return "every endpoint that may have its model answered 404, so the next answer was the client's"
	case "standstill":
		return "decode stood still until the KV may have been outdated, and no other endpoint could take it, " +
			"so decode computed the prompt once it went on"
	case "direct_calls_spent":
		return "too many prefill calls were under way (handoff: direct makes 1024 at most)"
	case "attempts_spent":
		return "its prefill failed as often as the pool allows (prefillAttempts)"
	case "time_spent":
		return "its prefill failed, and its time to try others was over (attemptsTime)"
	case "redirects_spent":
		return "its prefill failed, and Envoy follows no more redirects for one request"
	}
	return ""
}
