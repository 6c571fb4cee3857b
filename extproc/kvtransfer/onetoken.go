package kvtransfer

import "tandem/extproc/openai"

// oneToken is the common prefill leg of vLLM's dialects: P generates one token, which is discarded. D computes it
// again, so its answer is complete and its limits stay the client's.
//
// The one token must end because of its length: a P that stops for any other reason keeps no blocks (vLLM 0.12 to
// 0.20, where a first token that ends the text counts as stopped; from 0.21 NIXL keeps them for both). Hence
// min_tokens 1, which masks that token, and no stop strings. A limit that stays together with max_tokens would run its
// full length, min_tokens above it and stream_options without stream are refused with 400, and stream true answers
// without parameters (all run on 0.32.0).
type oneToken struct {
	one, no, tokens []byte // values as JSON text, kept so that a patch allocates nothing
}

func newOneToken() oneToken {
	return oneToken{one: []byte("1"), no: []byte("false"), tokens: []byte(`"tokens"`)}
}

// plan plans the limits of a prefill leg. Values that no engine accepts stay as the client wrote them, so that P
// refuses the request before it computes, and not D afterwards: counts out of range, log probabilities, and stream
// options without a stream.
func (d oneToken) plan(r *openai.Request, p *openai.Patch) {
	switch r.API() {
	case openai.Generate:
		d.generate(r, p)
	case openai.Chat:
		d.limit(r, p, "max_tokens", openai.FieldMaxTokens)
		if r.Wants(openai.FieldMaxCompletionTokens) ||
			!outOfRange(r.Raw(openai.FieldMaxTokens), openai.FieldMaxTokens) {
			d.limit(r, p, "max_completion_tokens", openai.FieldMaxCompletionTokens) // it overrides max_tokens
		}
		d.limit(r, p, "min_tokens", openai.FieldMinTokens)
		d.limit(r, p, "n", openai.FieldN)
	case openai.Completions:
		d.limit(r, p, "max_tokens", openai.FieldMaxTokens)
		d.limit(r, p, "min_tokens", openai.FieldMinTokens)
		d.limit(r, p, "n", openai.FieldN)
		d.limitOwn(r, p, "max_completion_tokens", openai.FieldMaxCompletionTokens)
	case openai.Responses:
		d.limit(r, p, "max_output_tokens", openai.FieldMaxOutputTokens)
		d.limitOwn(r, p, "max_tokens", openai.FieldMaxTokens)
		d.limitOwn(r, p, "min_tokens", openai.FieldMinTokens)
	case openai.Messages:
		d.limit(r, p, "max_tokens", openai.FieldMaxTokens)
		d.limitOwn(r, p, "min_tokens", openai.FieldMinTokens)
	}
	d.unstream(r, p)
}

// unstream asks for an answer that is not streamed, and removes the conditions by which P must not stop.
func (d oneToken) unstream(r *openai.Request, p *openai.Patch) {
	p.Set("stream", openai.FieldStream, d.no)
	if r.StreamOptionsAllowed() {
		p.Delete(openai.FieldStreamOptions)
	}
	for _, f := range [...]openai.Field{
		openai.FieldMinCompletionTokens,
		openai.FieldStop, openai.FieldStopTokenIDs, openai.FieldStopSequences, openai.FieldIncludeStop,
		openai.FieldBestOf,
	} {
		p.Delete(f)
	}
}

// generate is plan for /inference/v1/generate (0.12), which has its limits in sampling_params. output_mode (0.33)
// decides the kind of answer, and kv_transfer_params come with tokens.
func (d oneToken) generate(r *openai.Request, p *openai.Patch) {
	for _, limit := range [...]struct {
		key   string
		field openai.Field
	}{{"max_tokens", openai.FieldMaxTokens}, {"min_tokens", openai.FieldMinTokens}, {"n", openai.FieldN}} {
		if !outOfRange(r.Sampling(limit.field), limit.field) {
			p.SetSampling(limit.key, limit.field, d.one)
		}
	}
	for _, f := range [...]openai.Field{openai.FieldStop, openai.FieldStopTokenIDs, openai.FieldIncludeStop,
		openai.FieldBestOf} {
		p.DeleteSampling(f)
	}
	if r.Has(openai.FieldOutputMode) {
		p.Set("output_mode", openai.FieldOutputMode, d.tokens)
	}
}

// limit sets a count to one, unless no engine accepts the client's.
func (d oneToken) limit(r *openai.Request, p *openai.Patch, key string, f openai.Field) {
	if !outOfRange(r.Raw(f), f) {
		p.Set(key, f, d.one)
	}
}

// limitOwn is limit, but only if the client's body has the count: the engine may not know the member.
func (d oneToken) limitOwn(r *openai.Request, p *openai.Patch, key string, f openai.Field) {
	if r.Has(f) {
		d.limit(r, p, key, f)
	}
}

// outOfRange reports whether every engine refuses a count: it reads no integer from it, or one below the minimum.
func outOfRange(raw []byte, f openai.Field) bool {
	if len(raw) == 0 || string(raw) == "null" {
		return false
	}
	least := int64(1)
	if f == openai.FieldMinTokens {
		least = 0
	}
	n, ok := openai.Count(raw)
	return !ok || n < least
}

// usage reads the token counts of P's answer, and its kv_transfer_params as they stand there: nil if there are none, or
// null. It is an error if the answer is not a JSON object, or has a member twice.
func usage(body []byte) (Answer, []byte, error) {
	scanned, err := openai.ScanAnswer(body)
	return counts(&scanned), scanned.Params, err
}

// counts returns the counts of the prompt's tokens in an answer.
func counts(a *openai.Answer) Answer {
	return Answer{PromptTokens: a.PromptTokens, CachedTokens: a.CachedTokens, WrittenTokens: a.WrittenTokens + 1}
}
