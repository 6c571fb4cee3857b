package openai

// An engine that fails after it has begun a stream has answered 200 by then. What is left to tell such an answer
// from a complete one, without reading it, is its length: the least that a complete one has is known for each API.
//
// These are the bytes of vLLM's shortest complete streams, the engine's id and model aside: of one event that ends
// the answer with an empty delta, and what always comes before and after it. They were counted from
// vllm/entrypoints of releases 0.12 to 0.32 (each member that only newer ones write left out) and checked against
// recordings of 0.32.0. A stream whose KV load fails has there, for a request id and a model of one letter:
//
//	chat         367 bytes: the role, an error event, [DONE]
//	completions  128 bytes: an error event, [DONE]
//	generate     128 bytes: the same
//	responses    1,472 bytes or more: two events that repeat the request, and no other
//	messages     771 bytes: more than a short complete answer, so this API's failures cannot be told by length
const (
	leastChat        = 185 + 175 + 14 + 2*len("chatcmpl-") // role, finish, [DONE]
	leastCompletions = 173 + 14
	leastGenerate    = 104 + 14
	leastResponses   = 1800
	leastMessages    = 400

	// Of other engines, whose streams have another shape: below what any stream with at least one token has.
	leastOtherChat = 300
	leastOther     = 150
)

// LeastStream is how many bytes a complete stream has at least, to a request of an id; 0: not known. vllm is
// whether the engine is vLLM, started with --enable-request-id-headers or not.
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
