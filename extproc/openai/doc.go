// Package openai reads and edits the bodies of OpenAI-style requests without modelling them.
//
// A body is scanned once ([Request.Scan]): all of it is validated as JSON (RFC 8259), and the positions of the few
// members that Tandem uses are recorded. Changes are planned as byte ranges ([Patch], [Edits]), so everything else
// (unknown members, key order, white space, numbers beyond float64, escapes) passes through unchanged, and every
// change can be undone exactly ([Edits.Inverse]). One request takes these steps:
//
//	api := openai.Classify(method, path)   // its API
//	err := r.Scan(api, body, limits)       // *Error, a 400: the client's mistake, and its place
//	if r.HasControl() { body = r.Clean(nil); err = r.Scan(api, body, limits) }
//	hashes = r.PromptHash(hashes, 512, 64) // the keys by which its prefix is looked up
//	if r.Unsplittable() == "" {            // two engines may share it
//		p.Reset(&r)
//		p.Set("max_tokens", openai.FieldMaxTokens, []byte("1"))
//		p.Delete(openai.FieldStop)
//		edits := p.Edits()
//		leg := edits.Apply(nil, body)      // the prefill endpoint's body
//		undo := edits.Inverse(nil, body)   // undo.Apply(nil, leg) is body again, byte for byte
//	}
//
// All memory is reused: a warm Request and Patch allocate nothing.
//
// The files: api.go (which requests are read), request.go (the scan, its members' values, and those that a client must
// not send), fields.go (which members), lex.go (JSON below the members), prompt.go (prefix hashes, and requests that
// one engine must serve), patch.go (changes), answer.go (engines' answers), encode.go (requests to encode endpoints),
// errors.go (answers of Tandem's own).
// The package knows neither Envoy nor endpoints nor dialects of KV transfer.
//
// It is stricter than engines: Python's json accepts NaN and Infinity, UTF-16 and UTF-32, a repeated key (the last
// wins) and any depth up to its recursion limit; here these are errors, because two parties that read a body
// differently are a security hole. Like Python's (and unlike RFC 8259) a string may hold an unpaired surrogate escape.
// The raw bytes of member names and of the model must be UTF-8; other strings are left to the engine.
package openai
