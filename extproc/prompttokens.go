package extproc

import (
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Tokenizer has prompts tokenized beside the request, by engines. [tandem/kvstate/tokenize] is one.
type Tokenizer interface {
	// Tokenize has the engine at path answer body, and calls learned with the token ids if that works out. key stands for
	// the prompt: it is not asked for twice at a time. done is closed in any case; nil: there is too much to do already.
	Tokenize(pool *kvstate.Pool, key uint64, path string, body []byte, learned func(ids []uint32)) (done <-chan struct{})
}

// TokenSource is where a pool's token ids come from, beside prefill's own answers.
type TokenSource uint8

// The sources of a pool's kvEvents.tokens.
const (
	LearnedTokens  TokenSource = iota // from prefill's answers alone
	TokenizeTokens                    // POST /tokenize
	RenderTokens                      // POST /v1/.../render
)

// countTokens raises hits to what engines said that they hold, as far as the prompt's tokens are known, and returns the
// prompt's length in tokens, better than estimate where they are.
func (x *exchange) countTokens(pool *kvstate.Pool, policy *Policy, estimate int64) int64 {
	x.known = kvstate.KnownTokens{}
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
		pool.TrustEngines(x.hashes, len(x.hashes), &x.view)
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
	pool.TrustEngines(x.hashes, x.known.TextBlocks, &x.view)
	rest := max(x.req.PromptBytes()-x.known.TextBlocks*blockBytes, 0)
	tokens := int64(x.known.Tokens) + pool.PromptTokens(rest)
	for _, size := range sizes {
		pool.TokenHits(x.known.Blocks(size), size, tokens, len(x.hashes), &x.view)
	}
	return tokens
}

func (x *exchange) tokenPrompt(pool *kvstate.Pool) kvstate.TokenPrompt {
	salt, _ := x.req.String(openai.FieldCacheSalt)
	return kvstate.TokenPrompt{LoRA: pool.LoRA(x.req.Model()), Salt: salt}
}

// tokenize asks for the tokens of a prompt of which less than half is known, and waits for them no longer than the pool's
// budget: what comes later is known to the next request.
func (x *exchange) tokenize(pool *kvstate.Pool, policy *Policy) {
	if policy.Tokens == LearnedTokens || x.s.Tokenizer == nil || 2*x.known.TextBlocks >= len(x.hashes) {
		return
	}
	path, body := x.tokenizeBody(policy.Tokens)
	if body == nil {
		return
	}
	note := x.note(pool)
	done := x.s.Tokenizer.Tokenize(pool, x.hashes[len(x.hashes)-1], path, body, func(ids []uint32) { note.learn(pool, ids) })
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

// tokenizeBody is what to ask. /tokenize of vLLM and SGLang takes what makes the prompt, render the client's body as it is.
func (x *exchange) tokenizeBody(source TokenSource) (path string, body []byte) {
	api := x.req.API()
	if source == RenderTokens {
		switch api {
		case openai.Chat:
			return "/v1/chat/completions/render", append([]byte(nil), x.body.bytes()...)
		case openai.Completions:
			return "/v1/completions/render", append([]byte(nil), x.body.bytes()...)
		default:
			return "", nil
		}
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

// promptNote is what is remembered of a prompt that went to prefill, for when its answer says what it was in tokens.
type promptNote struct {
	hashes   []uint64 // nil: its tokens are known
	bytes    int
	prompt   kvstate.TokenPrompt
	promised int64 // tokens that the endpoint was thought to hold
}

// note is what can be learned about the prompt.
func (x *exchange) note(pool *kvstate.Pool) promptNote {
	return promptNote{hashes: append([]uint64(nil), x.hashes...), bytes: x.req.PromptBytes(), prompt: x.tokenPrompt(pool)}
}

// learns reports whether prefill is to be asked for the prompt's token ids: where events tell of tokens and not all of these
// are known. vLLM answers them from 0.10.2 on, for chat and completions; before, and elsewhere, the member is ignored.
func (x *exchange) learns(policy Policy) bool {
	api := x.req.API()
	return policy.LearnTokens && x.known.TextBlocks < len(x.hashes) && (api == openai.Chat || api == openai.Completions)
}

// learn takes what P's answer says about the prompt: its token ids, and how much of it P held.
func (x *exchange) learn(pool *kvstate.Pool, prefill string, got *kvtransfer.Answer) {
	note, ok := x.s.notes.take(x.requestID)
	if !ok {
		return
	}
	if e := pool.Endpoint(prefill); e != nil && got.CachedTokens >= 0 {
		x.s.State.Prefilled(e, note.promised, got.CachedTokens)
	}
	if note.hashes == nil || got.PromptIDs == nil {
		return
	}
	if ids, ok := openai.TokenIDs(x.ids[:0], got.PromptIDs); ok {
		x.ids = ids
		note.learn(pool, ids)
	}
}

func (n *promptNote) learn(pool *kvstate.Pool, ids []uint32) {
	n.prompt.IDs = ids
	pool.LearnTokens(n.hashes, blockBytes, n.bytes, &n.prompt)
}

// promptNotes are the notes of the requests that are at prefill endpoints. They stay in this replica: where another one sees
// the answer nothing is learned from it. The oldest go first.
type promptNotes struct {
	mu   sync.Mutex
	ring []string
	next int
	of   map[string]promptNote // by request id
}

const maxPromptNotes = 4096

func newPromptNotes() *promptNotes {
	return &promptNotes{of: map[string]promptNote{}}
}

func (p *promptNotes) put(id string, n promptNote) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ring) < maxPromptNotes {
		p.ring = append(p.ring, id)
	} else {
		delete(p.of, p.ring[p.next])
		p.ring[p.next] = id
		p.next = (p.next + 1) % maxPromptNotes
	}
	p.of[id] = n
}

func (p *promptNotes) take(id string) (promptNote, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, ok := p.of[id]
	delete(p.of, id)
	return n, ok
}
