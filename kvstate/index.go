package kvstate

import "tandem/kvstate/prefixindex"

// The pool's prefix index, and the tokens known of its prompts, as decisions ask for them.

// noteHits raises the Hit of every candidate to the blocks of the prompt that its members hold, times num/den. of selects
// the members.
func (p *Pool) noteHits(hashes []uint64, v *View, num, den int, of func(*prefixindex.Owner) []int32) {
	depths := v.lookup.Find(p.index, hashes, len(v.Endpoints), func(i int) []int32 { return of(&v.Endpoints[i].Endpoint.blocks) })
	for i, depth := range depths {
		hit := int(depth)
		if num != den {
			hit = hit * num / den
		}
		c := &v.Endpoints[i]
		c.Hit = max(c.Hit, hit)
	}
}

// UseStep is how popular a part of a prompt is.
type UseStep = prefixindex.UseStep

// The bounds of [View.Uses].
const (
	MaxUseSteps = prefixindex.MaxUseSteps
	UsesWindow  = prefixindex.UsesWindow
)

// Asked counts a prompt that has arrived: once for a request, before its first decision.
func (s *State) Asked(p *Pool, hashes []uint64) { p.uses.Note(hashes, s.o.Now()) }

// FindUses fills in how popular the prompt's blocks are.
func (s *State) FindUses(p *Pool, hashes []uint64, v *View) {
	v.Uses = p.uses.Steps(v.Uses[:0], hashes, s.o.Now())
}

// TrustEngines takes back the guesses about endpoints whose engines report their blocks, as far as the reports can be looked
// up: where the tokens of as many leading text blocks of the prompt are known as the endpoint was thought to hold. Prompts
// routed there moments ago still count. [Pool.TokenHits] is to follow.
func (p *Pool) TrustEngines(text []uint64, known int, v *View) {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Hit <= known && c.Endpoint.blocks.Reported() {
			c.Hit = 0
		}
	}
	if len(text) > 0 {
		p.noteHits(text, v, 1, 1, (*prefixindex.Owner).Fresh)
	}
}

// TokenBlockSizes are the block sizes of the engines whose KV events the pool receives; none if there are none.
func (p *Pool) TokenBlockSizes() []int { return p.index.TokenBlockSizes() }

// TokenHits raises the Hit of every candidate to the blocks that its engine has reported: hashes are the leading token
// blocks of the prompt as far as they are known ([prefixindex.TokenPrompt.Blocks]), of blockSize tokens each. A Hit counts
// text blocks, of which the prompt, of promptTokens tokens, has textBlocks.
func (p *Pool) TokenHits(hashes []uint64, blockSize int, promptTokens int64, textBlocks int, v *View) {
	if len(hashes) > 0 && promptTokens > 0 {
		p.noteHits(hashes, v, blockSize*textBlocks, int(max(promptTokens, int64(len(hashes)*blockSize))), (*prefixindex.Owner).Reports)
	}
}

// Prefilled notes what a prefill endpoint found of a prompt in its cache, and what it was thought to hold when the prompt
// was routed there, both in tokens. An endpoint that keeps less than it is thought to is thought to keep less from then on.
func (s *State) Prefilled(e *Endpoint, promised, found int64) {
	const slack = 256 // tokens: blocks begin and end elsewhere in the engine
	e.blocks.Learn(promised, found, slack+promised/16)
}

// textBlockBytes is how much of a prompt's text one block of what is routed stands for.
const textBlockBytes = 512

// keepTwice has the index remember twice of what is routed to an endpoint as its engine has KV memory for: an engine keeps what is used again,
// which the index does not see, and what it does not keep is found out ([State.Prefilled]). With half of the memory many hits are not found.
func (l *live) keepTwice(kvTokens int64) {
	if kvTokens > 0 && l.ratio != nil {
		l.blocks.Keeps(int(min(2*float64(kvTokens)*l.ratio.bytesPerToken()/textBlockBytes, 1<<30)))
	}
}

// IndexStats are the numbers of the pool's prefix index now.
func (p *Pool) IndexStats() prefixindex.Stats { return p.index.Stats() }

// Blocks is how many blocks the pool's prefix index has.
func (p *Pool) Blocks() int { return p.index.Blocks() }

// ReserveBlocks makes space for so many blocks that are about to be loaded.
func (p *Pool) ReserveBlocks(blocks int) { p.index.Reserve(blocks) }

// Feed returns a new feed for KV events of an endpoint of the pool. The caller closes it; it is of no use after the endpoint
// has left the pool.
func (p *Pool) Feed(e *Endpoint) *prefixindex.Feed { return e.blocks.NewFeed() }

// EachBlock calls f for the blocks of prompts routed to an endpoint; see [prefixindex.Owner.EachBlock].
func (p *Pool) EachBlock(e *Endpoint, f func(parent uint64, hashes []uint64)) { e.blocks.EachBlock(f) }

// LoadBlocks notes blocks from [Pool.EachBlock] of another replica; see [prefixindex.Owner.Load].
func (p *Pool) LoadBlocks(e *Endpoint, parent uint64, hashes []uint64) { e.blocks.Load(parent, hashes) }

// KnownTokens returns the known tokens of a prompt, given the hashes of its text blocks. It does not wait: while a prompt is
// being learned, nothing is known.
func (p *Pool) KnownTokens(text []uint64) prefixindex.KnownTokens { return p.tokens.Known(text) }

// KnownPrompts is how many prompts there are whose tokens are known.
func (p *Pool) KnownPrompts() int { return p.tokens.Prompts() }

// LoRA is the adapter that a model's name stands for; see [prefixindex.Index.LoRA].
func (p *Pool) LoRA(model string) string { return p.index.LoRA(model) }

// TextOf returns the hashes of a prompt's text blocks, given that of the last: the index has them if the prompt was routed by
// a replica that this one receives from. nil: it does not. At most so many, in the memory of dst.
func (p *Pool) TextOf(dst []uint64, last uint64, most int) []uint64 {
	return p.index.Chain(dst, last, most)
}

// LearnTokens notes the tokens of a prompt and publishes them to other replicas. Without KV events, or if all of it is known,
// it does nothing.
func (s *State) LearnTokens(p *Pool, text prefixindex.TextPrompt, prompt *prefixindex.TokenPrompt) {
	if learned, isNew := p.tokens.Learn(text, p.TokenBlockSizes(), prompt); isNew && s.peers != nil {
		s.peers.Learned(p, learned)
	}
}

// ApplyLearned is [State.LearnTokens] by another replica. If the prompt is not known here, or not the one that it continues,
// nothing is learned.
func (s *State) ApplyLearned(p *Pool, in *prefixindex.LearnedTokens) {
	p.index.Settle()
	text := p.TextOf(nil, in.Prompt, prefixindex.MaxLearnedText)
	if text == nil || in.Tokens <= 0 || in.BlockBytes <= 0 {
		return
	}
	p.tokens.Apply(text, in)
}
