package extproc

import (
	"context"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// Tokenizer asks engines to tokenize prompts while the request goes on. [tandem/kvstate/tokenize] implements it.
type Tokenizer interface {
	// Tokenize sends body to path of an engine, and calls learned with the token ids of its answer. key identifies
	// the prompt, which is not asked for twice at a time. done is closed in any case; nil: too many calls are in
	// progress.
	Tokenize(ctx context.Context, pool *kvstate.Pool, key uint64, path string, body []byte, learned func(ids []uint32)) (done <-chan struct{})
}

// TokenSource is the source of a pool's token ids, in addition to prefill's own answers.
type TokenSource uint8

// The sources of a pool's kvEvents.tokens.
const (
	LearnedTokens  TokenSource = iota // from prefill's answers only
	TokenizeTokens                    // POST /tokenize
	RenderTokens                      // POST /v1/.../render
)

// countTokens counts the prompt's tokens, and raises hits to the blocks that engines reported, as far as its tokens are
// known. It may ask an engine for them.
func (x *planning) countTokens(policy *Policy) {
	if x.req.RecallTokens() {
		x.tokenize(x.req.Pool, policy)
	}
	x.req.CountTokens(x.req.Pool.PromptTokens(x.body.Len()))
	x.req.MatchTokens(x.req.Pool, &x.view)
}

// tokenize asks for the tokens of a prompt, and waits for them no longer than
// the pool's budget. If they come later, the next request will use them.
func (x *planning) tokenize(pool *kvstate.Pool, policy *Policy) {
	if policy.Tokens == LearnedTokens || x.s.Tokenizer == nil {
		return
	}
	path, body := x.tokenizeBody(policy.Tokens)
	if body == nil {
		return
	}
	text, size, prompt := slices.Clone(x.req.Hashes), x.req.PromptBytes(), x.req.TokenPrompt(pool)
	observer := x.s.observer
	done := x.s.Tokenizer.Tokenize(guard.With(x.stream.Context(), x.s.guard), pool, text[len(text)-1], path, body, func(ids []uint32) {
		prompt.IDs = ids
		observer.Learned(pool.Spec.Name, "tokenizer", len(ids))
		x.s.State.LearnTokens(pool, prefixindex.TextPrompt{Blocks: text, BlockBytes: plan.BlockBytes, Bytes: size}, &prompt)
	})
	if done == nil || policy.TokenBudget <= 0 {
		return
	}
	budget := time.NewTimer(policy.TokenBudget)
	defer budget.Stop()
	select {
	case <-done:
		x.req.Known = pool.KnownTokens(x.req.Hashes)
	case <-budget.C:
	case <-x.stream.Context().Done():
	}
}

// tokenizeBody returns the request to send. /tokenize of vLLM and SGLang takes the members that make the prompt,
// render the client's body unchanged.
func (x *planning) tokenizeBody(source TokenSource) (path string, body []byte) {
	api := x.req.API()
	if source == RenderTokens {
		if path = renderPath(api); path != "" {
			body = slices.Clone(x.body.Bytes())
		}
		return path, body
	}
	fields := []struct {
		key string
		f   openai.Field
	}{
		{"model", openai.FieldModel}, {"messages", openai.FieldMessages}, {"tools", openai.FieldTools},
		{"chat_template", openai.FieldChatTemplate}, {"chat_template_kwargs", openai.FieldChatTemplateKwargs},
	}
	switch api {
	case openai.Chat:
	case openai.Completions:
		fields[1].key, fields[1].f = "prompt", openai.FieldPrompt
		fields = fields[:2]
	default:
		return "", nil
	}
	body = append(body, '{')
	for _, f := range fields {
		if raw := x.req.Raw(f.f); raw != nil {
			if len(body) > 1 {
				body = append(body, ',')
			}
			body = append(append(append(body, '"'), f.key...), `":`...)
			body = append(body, raw...)
		}
	}
	return "/tokenize", append(body, '}')
}

// renderPath returns where vLLM renders an API's requests, with --enable-scale-out: chat and completions from 0.24,
// messages from 0.29, responses from 0.30 (entrypoints/scale_out/render/api_router.py). "": nowhere. An engine that
// lacks the route is not asked again for a while.
func renderPath(api openai.API) string {
	switch api {
	case openai.Chat:
		return "/v1/chat/completions/render"
	case openai.Completions:
		return "/v1/completions/render"
	case openai.Messages:
		return "/v1/messages/render"
	case openai.Responses:
		return "/v1/responses/render"
	default:
		return ""
	}
}

// learn records from P's answer the prompt's token ids, and how much of the prompt P had in its cache.
func (x *prefillAnswer) learn(pool *kvstate.Pool, t *kvtransfer.Ticket, got *kvtransfer.Answer) {
	if e := pool.Endpoint(t.Prefill); e != nil && got.CachedTokens >= 0 {
		x.s.State.ObserveCached(e, t.ExpectedCached, got.CachedTokens)
	}
	if t.Learn.Bytes == 0 || got.PromptIDs == nil {
		return
	}
	text := pool.TextOf(nil, t.Prompt, plan.MaxBlocks)
	if text == nil {
		return
	}
	if ids, ok := openai.TokenIDs(x.ids[:0], got.PromptIDs); ok {
		x.ids = ids
		x.Learned(pool.Spec.Name, "prefill", len(ids))
		learned := prefixindex.TextPrompt{Blocks: text, BlockBytes: plan.BlockBytes, Bytes: t.Learn.Bytes}
		x.s.State.LearnTokens(pool, learned, &prefixindex.TokenPrompt{IDs: ids, LoRA: t.Learn.LoRA, Salt: t.Learn.Salt})
	}
}
