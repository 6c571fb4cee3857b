package extproc

import (
	"context"
	"slices"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
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

// countTokens raises hits to the blocks that engines reported, as far as the prompt's tokens are known. It returns
// the prompt's length in tokens, which is more exact than estimate if they are.
func (x *planning) countTokens(pool *kvstate.Pool, policy *Policy, estimate int64) int64 {
	x.known = prefixindex.KnownTokens{}
	sizes := pool.TokenBlockSizes()
	if len(sizes) == 0 || len(x.hashes) == 0 {
		return estimate
	}
	if ids := x.req.PromptIDs(); ids != nil {
		var ok bool
		if x.ids, ok = openai.TokenIDs(x.ids[:0], ids); !ok || len(x.ids) == 0 {
			return estimate
		}
		prompt := x.tokenPrompt(pool)
		prompt.IDs = x.ids
		pool.DropGuesses(x.hashes, len(x.hashes), &x.view)
		for _, size := range sizes {
			x.tokenHashes = prompt.Blocks(x.tokenHashes[:0], size)
			pool.TokenHits(x.tokenHashes, size, int64(len(x.ids)), len(x.hashes), &x.view)
		}
		x.known.TextBlocks = len(x.hashes) // there is nothing to learn
		return int64(len(x.ids))
	}
	x.known = pool.KnownTokens(x.hashes)
	x.tokenize(pool, policy)
	if x.known.TextBlocks == 0 {
		return estimate
	}
	pool.DropGuesses(x.hashes, x.known.TextBlocks, &x.view)
	rest := max(x.req.PromptBytes()-x.known.TextBlocks*blockBytes, 0)
	tokens := int64(x.known.Tokens) + pool.PromptTokens(rest)
	for _, size := range sizes {
		pool.TokenHits(x.known.Blocks(size), size, tokens, len(x.hashes), &x.view)
	}
	return tokens
}

// hitsNow sets the hits of a view for a prompt of so many tokens, as countTokens does.
func (x *planning) hitsNow(pool *kvstate.Pool, v *kvstate.View, tokens int64) {
	x.s.State.Hits(pool, x.hashes, v)
	sizes := pool.TokenBlockSizes()
	if len(sizes) == 0 || x.known.TextBlocks == 0 {
		return
	}
	pool.DropGuesses(x.hashes, x.known.TextBlocks, v)
	prompt := x.tokenPrompt(pool)
	prompt.IDs = x.ids
	for _, size := range sizes {
		if x.req.PromptIDs() != nil {
			x.tokenHashes = prompt.Blocks(x.tokenHashes[:0], size)
			pool.TokenHits(x.tokenHashes, size, int64(len(x.ids)), len(x.hashes), v)
		} else {
			pool.TokenHits(x.known.Blocks(size), size, tokens, len(x.hashes), v)
		}
	}
}

func (x *planning) tokenPrompt(pool *kvstate.Pool) prefixindex.TokenPrompt {
	salt, _ := x.req.String(openai.FieldCacheSalt)
	return prefixindex.TokenPrompt{LoRA: pool.LoRA(x.req.Model()), Salt: prefixindex.SaltKey(salt)}
}

// tokenize asks for the tokens of a prompt if less than half of them is known, and waits for them no longer than
// the pool's budget. If they come later, the next request will use them.
func (x *planning) tokenize(pool *kvstate.Pool, policy *Policy) {
	if policy.Tokens == LearnedTokens || x.s.Tokenizer == nil || 2*x.known.TextBlocks >= len(x.hashes) {
		return
	}
	path, body := x.tokenizeBody(policy.Tokens)
	if body == nil {
		return
	}
	text, size, prompt := slices.Clone(x.hashes), x.req.PromptBytes(), x.tokenPrompt(pool)
	metrics := x.s.metrics
	done := x.s.Tokenizer.Tokenize(guard.With(x.stream.Context(), x.s.guard), pool, text[len(text)-1], path, body, func(ids []uint32) {
		prompt.IDs = ids
		metrics.Learned(pool.Spec.Name, "tokenizer", len(ids))
		x.s.State.LearnTokens(pool, prefixindex.TextPrompt{Blocks: text, BlockBytes: blockBytes, Bytes: size}, &prompt)
	})
	if done == nil || policy.TokenBudget <= 0 {
		return
	}
	budget := time.NewTimer(policy.TokenBudget)
	defer budget.Stop()
	select {
	case <-done:
		x.known = pool.KnownTokens(x.hashes)
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

// learns reports whether to ask prefill for the prompt's token ids: if there are KV events and some of the tokens
// are unknown. vLLM returns them since 0.10.2 for chat and completions; earlier releases and other engines ignore
// the member.
func (x *planning) learns(policy Policy) bool {
	api := x.req.API()
	return policy.LearnTokens && x.known.TextBlocks < len(x.hashes) && (api == openai.Chat || api == openai.Completions)
}

// lastBlock returns what a ticket stores of the prompt for the replica that continues the request: only the last of
// its block hashes, because all of them would not fit. The index has the others ([kvstate.Pool.TextOf]), since the
// prompt was routed.
func (x *planning) lastBlock() uint64 {
	if len(x.hashes) == 0 {
		return 0
	}
	return x.hashes[len(x.hashes)-1]
}

// toLearn returns what the ticket of a prefill leg stores in addition, if the prompt's tokens are to be learned
// from P's answer.
func (x *planning) toLearn(pool *kvstate.Pool) kvtransfer.Learn {
	prompt := x.tokenPrompt(pool)
	return kvtransfer.Learn{Bytes: x.req.PromptBytes(), LoRA: prompt.LoRA, Salt: prompt.Salt}
}

// learn records from P's answer the prompt's token ids, and how much of the prompt P had in its cache.
func (x *prefillAnswer) learn(pool *kvstate.Pool, t *kvtransfer.Ticket, got *kvtransfer.Answer) {
	if e := pool.Endpoint(t.Prefill); e != nil && got.CachedTokens >= 0 {
		x.s.State.ObserveCached(e, t.ExpectedCached, got.CachedTokens)
	}
	if t.Learn.Bytes == 0 || got.PromptIDs == nil {
		return
	}
	text := pool.TextOf(nil, t.Prompt, maxBlocks)
	if text == nil {
		return
	}
	if ids, ok := openai.TokenIDs(x.ids[:0], got.PromptIDs); ok {
		x.ids = ids
		x.s.metrics.Learned(pool.Spec.Name, "prefill", len(ids))
		learned := prefixindex.TextPrompt{Blocks: text, BlockBytes: blockBytes, Bytes: t.Learn.Bytes}
		x.s.State.LearnTokens(pool, learned, &prefixindex.TokenPrompt{IDs: ids, LoRA: t.Learn.LoRA, Salt: t.Learn.Salt})
	}
}
