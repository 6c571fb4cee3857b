// Package openai reads and edits the bodies of OpenAI-style requests without modelling them.
//
// A body is scanned once ([Request.Scan]): the whole of it is validated as JSON (RFC 8259), and where the few
// members lie that somebody needs is noted. Changes are planned as byte ranges ([Patch], [Edits]), so everything
// else (unknown members, key order, white space, numbers beyond float64, escapes) passes through as it came, and
// every change can be undone exactly ([Edits.Inverse]). One request goes through it like this:
//
//	api := openai.Classify(method, path)   // which shape is it
//	err := r.Scan(api, body, limits)       // *Error, a 400: what a client did wrong, and where
//	if r.HasControl() { body = r.Clean(nil); err = r.Scan(api, body, limits) }
//	hashes = r.PromptHash(hashes, 512, 64) // where may its prefix be cached
//	if r.Unsplittable() == "" {            // may two engines share it
//		p.Reset(&r)
//		p.Set("max_tokens", openai.FieldMaxTokens, []byte("1"))
//		p.Delete(openai.FieldStop)
//		edits := p.Edits()
//		leg := edits.Apply(nil, body)      // what the prefill endpoint gets
//		undo := edits.Inverse(nil, body)   // undo.Apply(nil, leg) is body again, byte for byte
//	}
//
// All memory is reused: a warm Request and Patch allocate nothing.
//
// The files: api.go (which requests are read), fields.go (which members), lex.go (JSON below the members), scan.go
// (the members), request.go (what a scanned body says), control.go (what a client must not say), split.go (what
// must stay with one engine), prompt.go (prefix hashes), edits.go and patch.go (changes), answer.go (engines'
// answers), encode.go (what encode endpoints are sent), errors.go and headers.go (what clients are told). Nothing
// here knows Envoy, endpoints or a KV transfer dialect.
//
// Where this differs from what engines accept: Python's json takes NaN and Infinity, UTF-16 and UTF-32, a repeated
// key (the last wins) and any depth up to its recursion limit; here these are errors, because two parties that read
// a body differently are a hole. Like Python's (and unlike RFC 8259) a string may hold an unpaired surrogate
// escape. Raw bytes of string values are not checked to be UTF-8, that is left to the engine; those of member names
// and the model are.
package openai
