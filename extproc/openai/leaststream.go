package openai

// An engine that fails after it has begun a stream has answered 200 by then. Without reading it, such an answer can be
// distinguished from a complete one only by its length: each API has a known minimum.
//
// These are the sizes of vLLM's shortest complete streams, without the engine's id and model: one event that ends the
// answer with an empty delta, and the events that always come before and after it. They were counted from
// vllm/entrypoints of releases 0.12 to 0.32 (without members that only newer ones write) and checked against
// recordings of 0.32.0. A stream whose KV load fails has, for a request id and a model of one letter:
//
//	chat         367 bytes: the role, an error event, [DONE]
//	completions  128 bytes: an error event, [DONE]
//	generate     128 bytes: the same
//	responses    1,472 bytes or more: two events that repeat the request, and no other
//	messages     771 bytes: more than a short complete answer, so length does not reveal this API's failures
const (
	leastChat        = 185 + 175 + 14 + 2*len("chatcmpl-") // role, finish, [DONE]
	leastCompletions = 173 + 14
	leastGenerate    = 104 + 14
	leastResponses   = 1800
	leastMessages    = 400

	// For other engines, whose streams look different: less than any stream with at least one token.
	leastOtherChat = 300
	leastOther     = 150
)

// LeastStream returns the minimum size in bytes of a complete stream that answers a request with that id; 0: unknown.
// vllm: the engine is vLLM, started with --enable-request-id-headers or without.
func LeastStream(api API, requestID string, vllm bool) int {
	switch {
	case !vllm && api == Chat:
		return leastOtherChat
	case !vllm && (api == Completions || api == SGLangGenerate):
		return leastOther
	case !vllm:
		return 0
	}
	id := min(len(requestID), 32) // without the header vLLM makes one of 16 or 32 letters
	switch api {
	case Chat:
		return leastChat + 2*(id+1)
	case Completions:
		return leastCompletions + id + 1
	case Generate:
		return leastGenerate + id
	case Responses:
		return leastResponses
	case Messages:
		return leastMessages
	}
	return 0
}
