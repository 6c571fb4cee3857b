// Package migration moves a streamed answer to another engine. It keeps the token ids of an answer while the answer
// passes, writes the request by which another engine continues it from these ids, and joins the two streams into the
// one that a single engine would have sent. It reads bytes and returns bytes, and knows neither transports nor
// endpoints.
//
//	if migration.Refusal(&r, policy) == "" {       // r: the client's scanned request
//		s := migration.NewStream(&r, policy)
//		s.Ask(&r, &p)                              // p: a patch of r; the engine will answer token ids
//		out = s.Feed(out[:0], chunk)               // what the client gets of a chunk of the engine's answer
//	}
//	// the engine has died, or s.Broken() says that its answer ends before its time
//	reason := s.Continue()                         // why there is no next engine; "": there is
//	p.Reset(&r)
//	s.Ask(&r, &p)                                  // the request to it. An engine that prefills for it: s.AskPrompt
//	out = s.Feed(out[:0], chunk)                   // of the next engine's answer: what the client lacks
//
// A request goes on at the prompt's ids followed by those of the answer's first k tokens: a chat in
// kv_transfer_params.prompt_token_ids, which vLLM takes instead of rendering messages (0.32.0,
// renderers/online_renderer.py:105), a completion as its prompt. k is not always the number of tokens that arrived.
// An engine must not begin inside a UTF-8 character: its detokenizer would answer the prompt's text (0.32.0,
// v1/engine/detokenizer.py:188). And it must see enough text to find a stop string that began before k. So k is the
// last place where both hold, the next engine generates the tokens behind it again, and what the client has already is
// taken out of its stream. These tokens must be the same ones: else the stream is broken.
//
// An answer with tool calls, reasoning or a grammar is repeated instead: the next engine gets the same request, and
// what the client has is compared with what that engine writes, and taken out ([ADR 112]).
//
// The files: refusal.go (which requests), event.go (an event's members), stream.go (what passes), resume.go (the next
// request, and the joined stream), repeat.go, messages.go and responses.go (answers that are
// repeated).
//
// [ADR 112]: ../../docs/adr/0112-agents-answers-are-repeated.md
package migration
