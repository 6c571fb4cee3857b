package kvtransfer

import "tandem/extproc/openai"

// oneToken is what vLLM's dialects have in common on the prefill leg: P is asked for one token, which is thrown away. D
// computes it again, so its answer is complete and its limits stay the client's.
//
// The one token must end for its length: a P that stops for any other reason keeps no blocks (vLLM 0.12 to 0.20, where a
// first token that ends the text counts as stopped; from 0.21 NIXL keeps them for both). Hence min_tokens 1, which masks
// that token, and no stop of the client's. A limit left beside max_tokens runs its full length, min_tokens above it and
// stream_options without stream are refused with 400, stream true answers without parameters (all run on 0.32.0).
type oneToken struct {
	one, no, tokens []byte // values as JSON text, kept so that a patch allocates nothing
}

func newOneToken() oneToken {
	return oneToken{one: []byte("1"), no: []byte("false"), tokens: []byte(`"tokens"`)}
}

// plan plans the limits of a prefill leg.
func (d oneToken) plan(r *openai.Request, p *openai.Patch) {
	switch r.API() {
	case openai.Generate:
		d.generate(r, p)
	case openai.Chat:
		p.Set("max_tokens", openai.FieldMaxTokens, d.one)
		p.Set("max_completion_tokens", openai.FieldMaxCompletionTokens, d.one)
		p.Set("min_tokens", openai.FieldMinTokens, d.one)
		p.Set("n", openai.FieldN, d.one)
	case openai.Completions:
		p.Set("max_tokens", openai.FieldMaxTokens, d.one)
		p.Set("min_tokens", openai.FieldMinTokens, d.one)
		p.Set("n", openai.FieldN, d.one)
		d.replace(r, p, "max_completion_tokens", openai.FieldMaxCompletionTokens, d.one)
	case openai.Responses:
		p.Set("max_output_tokens", openai.FieldMaxOutputTokens, d.one)
		d.replace(r, p, "max_tokens", openai.FieldMaxTokens, d.one)
		d.replace(r, p, "min_tokens", openai.FieldMinTokens, d.one)
	case openai.Messages:
		p.Set("max_tokens", openai.FieldMaxTokens, d.one)
		d.replace(r, p, "min_tokens", openai.FieldMinTokens, d.one)
	}
	p.Set("stream", openai.FieldStream, d.no)
	for _, f := range [...]openai.Field{
		openai.FieldStreamOptions, openai.FieldMinCompletionTokens,
		openai.FieldStop, openai.FieldStopTokenIDs, openai.FieldStopSequences, openai.FieldIncludeStop,
		openai.FieldBestOf, openai.FieldLogprobs, openai.FieldTopLogprobs,
	} {
		p.Delete(f)
	}
}

// generate is plan for /inference/v1/generate (0.12), which has its limits in sampling_params. output_mode (0.33) decides
// what kind of answer there is, and kv_transfer_params come with tokens.
func (d oneToken) generate(r *openai.Request, p *openai.Patch) {
	p.SetSampling("max_tokens", openai.FieldMaxTokens, d.one)
	p.SetSampling("min_tokens", openai.FieldMinTokens, d.one)
	p.SetSampling("n", openai.FieldN, d.one)
	for _, f := range [...]openai.Field{
		openai.FieldStop, openai.FieldStopTokenIDs, openai.FieldIncludeStop,
		openai.FieldBestOf, openai.FieldLogprobs, openai.FieldTopLogprobs,
	} {
		p.DeleteSampling(f)
	}
	d.replace(r, p, "output_mode", openai.FieldOutputMode, d.tokens)
}

// replace sets a member only where the client has it: the path need not know it.
func (oneToken) replace(r *openai.Request, p *openai.Patch, key string, f openai.Field, value []byte) {
	if r.Has(f) {
		p.Set(key, f, value)
	}
}

// Speaks: vLLM's engines take kv_transfer_params on all APIs.
func (oneToken) Speaks(openai.API) bool { return true }

// usage reads what P's answer says about tokens, and its kv_transfer_params.
func usage(body []byte) (Answer, []byte, error) {
	scanned, err := openai.ScanAnswer(body)
	return Answer{PromptTokens: scanned.PromptTokens, CachedTokens: scanned.CachedTokens}, scanned.Params, err
}
