package pass

import (
	"context"
	"slices"
	"time"

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
	Tokenize(
		ctx context.Context, pool *kvstate.Pool, key uint64, path string, body []byte, learned func(ids []uint32),
	) (done <-chan struct{})
}

// TokenSource is the source of a pool's token ids, in addition to prefill's own answers.
type TokenSource uint8

// The sources of a pool's kvEvents.tokens.
const (
	LearnedTokens  TokenSource = iota // from prefill's answers only
	TokenizeTokens                    // POST /tokenize
	RenderTokens                      // POST /v1/.../render
)

// countTokens counts the prompt's tokens, as far as they are known. It may ask an engine for them.
func (x *Pass) countTokens(ctx context.Context) {
	if x.Req.RecallTokens() {
		x.tokenize(ctx)
	}
	x.Req.CountTokens(x.Req.Pool.PromptTokens(x.size()))
}

// tokenize asks for the tokens of a prompt, and waits for them no longer than the pool's budget. If they come later,
// the next request will use them.
func (x *Pass) tokenize(ctx context.Context) {
	s, policy, pool := x.shared, x.policy, x.Req.Pool
	if policy.Tokens == LearnedTokens || s.Tokenizer == nil {
		return
	}
	path, body := tokenizeBody(&x.Req, policy.Tokens)
	if body == nil {
		return
	}
	text, size, prompt := slices.Clone(x.Req.Hashes), x.Req.Client.PromptBytes(), x.Req.TokenPrompt(pool)
	done := s.Tokenizer.Tokenize(guard.With(ctx, s.Guard), pool, text[len(text)-1], path, body, func(ids []uint32) {
		prompt.IDs = ids
		s.Observer.Learned(pool.Spec.Name, "tokenizer", len(ids))
		learned := prefixindex.TextPrompt{Blocks: text, BlockBytes: plan.BlockBytes, Bytes: size}
		s.State.LearnTokens(pool, learned, &prompt)
	})
	if await(ctx, done, policy.TokenBudget) {
		x.Req.Known = pool.KnownTokens(x.Req.Hashes)
	}
}

// await waits for a call, for so long at most, and reports whether it is done. nil: it was not made.
func await(ctx context.Context, done <-chan struct{}, patience time.Duration) bool {
	if done == nil || patience <= 0 {
		return false
	}
	over := time.NewTimer(patience)
	defer over.Stop()
	select {
	case <-done:
		return true
	case <-over.C:
	case <-ctx.Done():
	}
	return false
}

// tokenizeBody returns the request to send. /tokenize of vLLM and SGLang takes the members that make the prompt,
// render the client's body unchanged.
func tokenizeBody(r *plan.Request, source TokenSource) (path string, body []byte) {
	api := r.Client.API()
	if source == RenderTokens {
		if path = renderPath(api); path != "" {
			body = slices.Clone(r.Client.Body())
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
		if raw := r.Client.Raw(f.f); raw != nil {
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
