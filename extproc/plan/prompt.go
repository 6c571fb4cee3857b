package plan

import (
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// BlockBytes is the number of bytes of a prompt in one block of the prefix index, MaxBlocks the number of blocks
// that it covers.
const (
	BlockBytes = 512
	MaxBlocks  = 2048
)

// Prompt is what is known of a request's prompt.
type Prompt struct {
	Hashes      []uint64                // of its text blocks
	Known       prefixindex.KnownTokens // of its tokens
	IDs         []uint32                // scratch for token ids
	tokenBlocks []uint64                // scratch for their blocks
}

// Hash computes the hashes of the prompt's text blocks.
func (r *Request) Hash() { r.Hashes = r.Client.PromptHash(r.Hashes[:0], BlockBytes, MaxBlocks) }

// LastBlock returns what a ticket stores of the prompt for the replica that continues the request: only the last of
// its block hashes, because all of them would not fit. The index has the others ([kvstate.Pool.TextOf]), since the
// prompt was routed.
func (r *Request) LastBlock() uint64 {
	if len(r.Hashes) == 0 {
		return 0
	}
	return r.Hashes[len(r.Hashes)-1]
}

// RecallTokens finds the tokens of the prompt, as far as they are known, if engines of the pool report blocks of
// tokens. It reports whether an engine should be asked for the rest.
func (r *Request) RecallTokens() (ask bool) {
	r.Known = prefixindex.KnownTokens{}
	if len(r.Pool.TokenBlockSizes()) == 0 || len(r.Hashes) == 0 {
		return false
	}
	if ids := r.Client.PromptIDs(); ids != nil {
		var ok bool
		if r.IDs, ok = openai.TokenIDs(r.IDs[:0], ids); ok && len(r.IDs) > 0 {
			r.Known.TextBlocks = len(r.Hashes) // there is nothing to learn
		}
		return false
	}
	r.Known = r.Pool.KnownTokens(r.Hashes)
	return 2*r.Known.TextBlocks < len(r.Hashes)
}

// CountTokens sets r.Tokens: to estimate, or to what is known from [Request.RecallTokens].
func (r *Request) CountTokens(estimate int64) {
	switch {
	case r.Known.TextBlocks == 0:
		r.Tokens = estimate
	case r.Client.PromptIDs() != nil:
		r.Tokens = int64(len(r.IDs))
	default:
		rest := max(r.Client.PromptBytes()-r.Known.TextBlocks*BlockBytes, 0)
		r.Tokens = int64(r.Known.Tokens) + r.Pool.PromptTokens(rest)
	}
}

// MatchTokens raises the hits of a view of pool, which may be a later version of r.Pool, to the blocks of tokens that
// engines reported.
func (r *Request) MatchTokens(pool *kvstate.Pool, v *kvstate.View) {
	sizes := pool.TokenBlockSizes()
	if len(sizes) == 0 || r.Known.TextBlocks == 0 {
		return
	}
	if r.Client.PromptIDs() == nil {
		matchKnown(pool, v, r.Hashes, &r.Known, r.Tokens)
		return
	}
	pool.DropGuesses(r.Hashes, r.Known.TextBlocks, v)
	prompt := r.TokenPrompt(pool)
	prompt.IDs = r.IDs
	for _, size := range sizes {
		r.tokenBlocks = prompt.Blocks(r.tokenBlocks[:0], size)
		pool.TokenHits(r.tokenBlocks, size, int64(len(r.IDs)), len(r.Hashes), v)
	}
}

func matchKnown(pool *kvstate.Pool, v *kvstate.View, hashes []uint64, known *prefixindex.KnownTokens, tokens int64) {
	pool.DropGuesses(hashes, known.TextBlocks, v)
	for _, size := range pool.TokenBlockSizes() {
		pool.TokenHits(known.Blocks(size), size, tokens, len(hashes), v)
	}
}

// MatchReported is MatchTokens in pass 2, for a prompt of so many tokens whose text is not there.
func (r *Request) MatchReported(v *kvstate.View, tokens int64) {
	if len(r.Pool.TokenBlockSizes()) == 0 || len(r.Hashes) == 0 {
		return
	}
	if known := r.Pool.KnownTokens(r.Hashes); known.TextBlocks > 0 {
		matchKnown(r.Pool, v, r.Hashes, &known, tokens)
	}
}

// TokenPrompt returns what identifies the blocks of the prompt's tokens, without the tokens.
func (r *Request) TokenPrompt(pool *kvstate.Pool) prefixindex.TokenPrompt {
	salt, _ := r.Client.String(openai.FieldCacheSalt)
	return prefixindex.TokenPrompt{LoRA: pool.LoRA(r.Client.Model()), Salt: prefixindex.SaltKey(salt)}
}

// learns reports whether to ask prefill for the prompt's token ids: if there are KV events and some of the tokens
// are unknown. vLLM returns them since 0.10.2 for chat and completions; earlier releases and other engines ignore
// the member.
func (r *Request) learns(p *Policy) bool {
	api := r.Client.API()
	return p.LearnTokens && r.Known.TextBlocks < len(r.Hashes) && (api == openai.Chat || api == openai.Completions)
}

// toLearn returns what the ticket of a prefill leg stores in addition, if the prompt's tokens are to be learned
// from P's answer.
func (r *Request) toLearn() kvtransfer.Learn {
	prompt := r.TokenPrompt(r.Pool)
	return kvtransfer.Learn{Bytes: r.Client.PromptBytes(), LoRA: prompt.LoRA, Salt: prompt.Salt}
}
