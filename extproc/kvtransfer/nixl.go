package kvtransfer

import (
	"fmt"
	"strconv"

	"tandem/extproc/openai"
)

// nixl is vLLM's NixlConnector, pull (NixlPullConnector from 0.24): P computes the prompt, keeps its blocks under a lease
// and answers where they are; D reads them from P's memory.
//
// Read from vllm/distributed/kv_transfer/kv_connector/v1/nixl* of vLLM 0.9.2 to 0.33.0; run against vLLM 0.32.0.
type nixl struct {
	one, no, tokens, ask []byte // values as JSON text, kept so that a patch allocates nothing
}

func newNIXL() nixl {
	return nixl{
		one:    []byte("1"),
		no:     []byte("false"),
		tokens: []byte(`"tokens"`),
		// P tests do_remote_decode alone; remote_block_ids must not be true-ish, or P reads from D (bidirectional, 0.21).
		// The nulls are what vLLM's own proxies send.
		ask: []byte(`{"do_remote_decode":true,"do_remote_prefill":false,` +
			`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`),
	}
}

func (nixl) Name() string { return "nixl" }

// Prefill asks P for one token, which is thrown away: D computes it again, so its answer is complete and its limits stay
// the client's.
//
// The one token must end for its length: a P that stops for any other reason keeps no blocks (vLLM 0.12 to 0.20, where a
// first token that ends the text counts as stopped; from 0.21 NIXL keeps them for both). Hence min_tokens 1, which masks
// that token, and no stop of the client's. A limit left beside max_tokens runs its full length, min_tokens above it and
// stream_options without stream are refused with 400, stream true answers without parameters (all run on 0.32.0).
func (d nixl) Prefill(r *openai.Request, p *openai.Patch) {
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
	p.Set("kv_transfer_params", openai.FieldKVTransferParams, d.ask)
	for _, f := range [...]openai.Field{
		openai.FieldStreamOptions, openai.FieldMinCompletionTokens,
		openai.FieldStop, openai.FieldStopTokenIDs, openai.FieldStopSequences, openai.FieldIncludeStop,
		openai.FieldBestOf, openai.FieldLogprobs, openai.FieldTopLogprobs,
	} {
		p.Delete(f)
	}
}

// generate is Prefill for /inference/v1/generate (0.12), which has its limits in sampling_params. output_mode (0.33)
// decides what kind of answer there is, and kv_transfer_params come with tokens.
func (d nixl) generate(r *openai.Request, p *openai.Patch) {
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
func (nixl) replace(r *openai.Request, p *openai.Patch, key string, f openai.Field, value []byte) {
	if r.Has(f) {
		p.Set(key, f, value)
	}
}

// ReadAnswer takes kv_transfer_params from P's answer. null or none is no error: the prompt ended in a state that keeps
// no blocks, or P has no connector.
func (nixl) ReadAnswer(body []byte, prefillAddr string) (Answer, error) {
	scanned, err := openai.ScanAnswer(body)
	if err != nil {
		return Answer{}, fmt.Errorf("reading P's answer: %w", err)
	}
	a := Answer{PromptTokens: scanned.PromptTokens, CachedTokens: scanned.CachedTokens, PromptIDs: scanned.PromptIDs}
	if scanned.Params == nil {
		return a, nil
	}
	pull, err := readPull(scanned.Params)
	if err != nil {
		return Answer{}, fmt.Errorf("kv_transfer_params of P's answer: %w: %w", ErrParams, err)
	}
	a.Params = pull.repairHost(prefillAddr)
	// These two count what the usage may leave out: messages say input_tokens without the cached ones, and engines say
	// cached tokens only when told to (0.21 and 0.31).
	if n, ok := count(pull.numTokens); ok {
		a.PromptTokens = n
	}
	if n, ok := count(pull.cachedTokens); ok {
		a.CachedTokens = n
	}
	return a, nil
}

// count reads a count that nothing depends on; anything else is as if it was not there.
func count(value []byte) (int64, bool) {
	n, err := strconv.ParseInt(string(value), 10, 64)
	return n, err == nil && n >= 0
}

// DecodeMember hands P's object on. Nothing else of the client's body changes on D.
func (nixl) DecodeMember(dst, params []byte) []byte {
	return append(append(dst, `"kv_transfer_params":`...), params...)
}
