package kvstate

import (
	"tandem/kvstate/prefixindex"
	"tandem/kvstate/residency"
)

// The prefix index of a pool and the known tokens of its prompts, as decisions use them.

// Loads are the blocks of a hit that an engine keeps outside GPU memory, by tier: in CPU memory, on disk, and in a
// remote store.
type Loads [prefixindex.Tiers - 1]int32

// Blocks returns the number of blocks in all tiers.
func (l *Loads) Blocks() int { return int(l[0] + l[1] + l[2]) }

// HeldBlocks is the part of a prompt that an endpoint holds, in blocks.
type HeldBlocks struct {
	Hit   int32 // leading blocks
	Loads Loads // of those, blocks outside GPU memory
}

// HeldBlocks returns [Candidate.Hit] and [Candidate.Loads], for [Candidate.SetHeld].
func (c *Candidate) HeldBlocks() HeldBlocks { return HeldBlocks{int32(c.Hit), c.Loads} }

// SetHeld sets [Candidate.Hit] and [Candidate.Loads].
func (c *Candidate) SetHeld(h HeldBlocks) { c.Hit, c.Loads = int(h.Hit), h.Loads }

// guessHits raises each candidate's Hit to the number of the prompt's text blocks that it is thought to hold, by what
// was routed to it and what its memory can have kept since. of selects what was routed: ever, or moments ago. Memory
// does not limit an engine that gets KV from a store: vLLM then counts external tokens, although no engine hands KV
// over in such a pool.
func (p *Pool) guessHits(hashes []uint64, v *View, of func(*prefixindex.Owner) []int32) {
	deepest := int32(0)
	for i, depth := range p.find(hashes, v, of) {
		c := &v.Endpoints[i]
		c.Hit = max(c.Hit, int(depth))
		deepest = max(deepest, depth)
	}
	if deepest == 0 {
		return
	}
	last := [2]uint64{hashes[len(hashes)-1], hashes[deepest-1]}
	p.residents.Limit(last, len(v.Endpoints), func(i int) (*residency.Engine, *int) {
		c := &v.Endpoints[i]
		if p.Spec.Store && c.Signals != nil && c.Signals.Transfers.Tokens > 0 {
			return nil, nil
		}
		return &c.Endpoint.state.memory.holds, &c.Hit
	})
}

// find returns how many leading blocks of a prompt each candidate holds; none if none holds any.
func (p *Pool) find(hashes []uint64, v *View, of func(*prefixindex.Owner) []int32) []int32 {
	if len(hashes) == 0 {
		return nil
	}
	return v.lookup.Find(p.index, hashes, len(v.Endpoints), func(i int) []int32 {
		return of(&v.Endpoints[i].Endpoint.state.blocks)
	})
}

// UseStep is the popularity of a part of a prompt.
type UseStep = prefixindex.UseStep

// Bounds of [View.Uses].
const (
	MaxUseSteps = prefixindex.MaxUseSteps
	UsesWindow  = prefixindex.UsesWindow
)

// CountPrompt counts a prompt that has arrived, once for each request and before its first decision.
func (s *State) CountPrompt(p *Pool, hashes []uint64) { p.uses.Note(hashes, s.o.Now()) }

// FindUses sets the popularity of the prompt's blocks.
func (s *State) FindUses(p *Pool, hashes []uint64, v *View) {
	v.Uses = p.uses.Steps(v.Uses[:0], hashes, s.o.Now())
}

// DropGuesses resets the hits of endpoints whose engines report their blocks, because the reports are exact. Prompts
// that were routed there moments ago still count. Where the tokens are known of fewer leading text blocks than an
// endpoint was thought to hold, the guess is put aside for [Pool.TokenHits], which is to be called next.
func (p *Pool) DropGuesses(text []uint64, known int, v *View) {
	for i := range v.Endpoints {
		c := &v.Endpoints[i]
		if c.guess = 0; !c.Endpoint.state.blocks.Reported() {
			continue
		}
		if c.Hit > known {
			c.guess = int32(c.Hit)
		}
		c.SetHeld(HeldBlocks{})
	}
	p.guessHits(text, v, (*prefixindex.Owner).Fresh)
}

// TokenBlockSizes returns the block sizes of the engines whose KV events the pool receives.
func (p *Pool) TokenBlockSizes() []int { return p.index.TokenBlockSizes() }

// TokenHits raises each candidate's Hit to the blocks that its engine has reported. hashes are the prompt's leading
// token blocks, as far as its tokens are known ([prefixindex.TokenPrompt.Blocks]), of blockSize tokens each. Hit
// counts text blocks; the prompt has promptTokens tokens in textBlocks of them. Blocks that the engine keeps outside
// GPU memory are in Loads too. What comes after the known tokens is guessed only where the engine holds all of these:
// an engine that has discarded the beginning of a prompt has no use for its end.
func (p *Pool) TokenHits(hashes []uint64, blockSize int, promptTokens int64, textBlocks int, v *View) {
	if len(hashes) == 0 || promptTokens <= 0 { // less than a block is known
		for i := range v.Endpoints {
			v.Endpoints[i].Hit = max(v.Endpoints[i].Hit, int(v.Endpoints[i].guess))
		}
		return
	}
	tokens := int(max(promptTokens, int64(len(hashes)*blockSize)))
	scaled := func(blocks int32) int { return int(blocks) * blockSize * textBlocks / tokens }
	for i, depth := range p.find(hashes, v, (*prefixindex.Owner).Reports) {
		c := &v.Endpoints[i]
		hit := scaled(depth)
		if int(depth) == len(hashes) {
			hit = max(hit, int(c.guess))
		}
		if hit < c.Hit-1 { // a prompt that was routed to it moments ago, which it has not reported yet
			continue
		}
		held := c.Endpoint.state.blocks.Tiers(hashes, depth)
		for tier := range c.Loads {
			c.Loads[tier] = int32(scaled(held[tier+1]) - scaled(held[tier]))
		}
		c.Hit = max(c.Hit, hit) // hit is rounded down
	}
}

// ObserveCached compares the cached tokens that a prefill endpoint reported for a prompt with the expected ones. If
// an endpoint repeatedly holds less than expected, the index lowers its estimate of what the endpoint keeps.
func (s *State) ObserveCached(e *Endpoint, promised, found int64) {
	const slack = 256 // tokens: the engine's blocks have other boundaries
	e.state.blocks.Learn(promised, found, slack+promised/16)
}

// textBlockBytes is the number of bytes of a prompt in one block of the routed index.
const textBlockBytes = 512

// sizeRouted sets how many blocks the index remembers of the prompts routed to an endpoint: twice the engine's KV
// memory, CPU memory included. An engine keeps blocks that are used again, which the index does not see, and
// [State.ObserveCached] corrects an estimate that is too high. With half of it many hits were missed.
func (l *endpointState) sizeRouted(g *Signals) {
	if g.KVTokens > 0 && l.ratio != nil {
		tokens := g.KVTokens + g.Host.capacity(l.load.learnedTokenBytes())
		l.blocks.Keeps(int(min(2*float64(tokens)*l.ratio.bytesPerToken()/textBlockBytes, 1<<30)))
	}
}

// IndexStats returns the statistics of the pool's prefix index.
func (p *Pool) IndexStats() prefixindex.Stats { return p.index.Stats() }

// Blocks returns the number of blocks in the pool's prefix index.
func (p *Pool) Blocks() int { return p.index.Blocks() }

// ReserveBlocks allocates space for blocks that are about to be loaded.
func (p *Pool) ReserveBlocks(blocks int) { p.index.Reserve(blocks) }

// Feed returns a new feed for the KV events of an endpoint. The caller closes it. It has no effect after the
// endpoint has left the pool.
func (p *Pool) Feed(e *Endpoint) *prefixindex.Feed { return e.state.blocks.NewFeed() }

// EachBlock calls f for the blocks of prompts routed to an endpoint; see [prefixindex.Owner.EachBlock].
func (p *Pool) EachBlock(e *Endpoint, f func(parent uint64, hashes []uint64)) {
	e.state.blocks.EachBlock(f)
}

// LoadBlocks adds blocks from [Pool.EachBlock] of another replica; see [prefixindex.Owner.Load].
func (p *Pool) LoadBlocks(e *Endpoint, parent uint64, hashes []uint64) {
	e.state.blocks.Load(parent, hashes)
}

// KnownTokens returns the known tokens of a prompt, given the hashes of its text blocks. It does not wait: while
// the tokens of a prompt are being recorded, it returns none.
func (p *Pool) KnownTokens(text []uint64) prefixindex.KnownTokens { return p.tokens.Known(text) }

// KnownPrompts returns the number of prompts whose tokens are known.
func (p *Pool) KnownPrompts() int { return p.tokens.Prompts() }

// LoRA returns the adapter that a model name stands for; see [prefixindex.Index.LoRA].
func (p *Pool) LoRA(model string) string { return p.index.LoRA(model) }

// TextOf returns the hashes of a prompt's text blocks, given the last one, in the memory of dst: not more than most.
// It returns nil if no replica whose updates this one receives has routed the prompt.
func (p *Pool) TextOf(dst []uint64, last uint64, most int) []uint64 {
	return p.index.Chain(dst, last, most)
}

// LearnTokens records the tokens of a prompt and publishes them to other replicas. It does nothing without KV
// events, or if they are known already.
func (s *State) LearnTokens(p *Pool, text prefixindex.TextPrompt, prompt *prefixindex.TokenPrompt) {
	if learned, isNew := p.tokens.Learn(text, p.TokenBlockSizes(), prompt); isNew && s.link.replicas != nil {
		s.link.replicas.Learned(p, learned)
	}
}

// ApplyLearned applies [State.LearnTokens] of another replica. It does nothing if this replica knows neither the
// prompt nor the one that it continues.
func (s *State) ApplyLearned(p *Pool, in *prefixindex.LearnedTokens) {
	p.index.Settle()
	text := p.TextOf(nil, in.Prompt, prefixindex.MaxLearnedText)
	if text == nil || in.Tokens <= 0 || in.BlockBytes <= 0 {
		return
	}
	p.tokens.Apply(text, in)
}
