package kvstate

// routedSlots are an endpoint's slots in the prefix index for what was routed to it.
func routedSlots(e *Endpoint) []int32 { return e.own[:] }

// feedSlots are its slots for what its engine said that it holds.
func feedSlots(e *Endpoint) []int32 {
	if slots := e.feeds.Load(); slots != nil {
		return *slots
	}
	return nil
}

// freshSlots are its slots for what was routed to it moments ago.
func freshSlots(e *Endpoint) []int32 {
	if f := e.fresh.Load(); f != nil {
		return f.slot
	}
	return nil
}

// TrustEngines takes back the guesses about endpoints whose engines tell what they hold, as far as their word can be asked
// for: where the tokens of as many leading text blocks of the prompt are known as the endpoint was thought to hold. What was
// routed there moments ago still counts. [Pool.TokenHits] is to follow.
func (p *Pool) TrustEngines(text []uint64, known int, v *View) {
	for i := range v.Endpoints {
		if c := &v.Endpoints[i]; c.Hit <= known && c.Endpoint.heard.Load() {
			c.Hit = 0
		}
	}
	if len(text) > 0 {
		p.index.hits(text, v, 1, 1, freshSlots)
	}
}

// TokenBlockSizes are the block sizes of the engines whose KV events the pool takes; none where it takes none.
func (p *Pool) TokenBlockSizes() []int {
	if sizes := p.index.sizes.Load(); sizes != nil {
		return *sizes
	}
	return nil
}

// TokenHits raises the Hit of every candidate to what its engine said that it holds: hashes are those of the leading token
// blocks of the prompt as far as they are known ([TokenPrompt.Blocks]), of blockSize tokens each. A Hit counts blocks of
// which the prompt, of promptTokens tokens, has textBlocks.
func (p *Pool) TokenHits(hashes []uint64, blockSize int, promptTokens int64, textBlocks int, v *View) {
	if len(hashes) > 0 && promptTokens > 0 {
		p.index.hits(hashes, v, blockSize*textBlocks, int(max(promptTokens, int64(len(hashes)*blockSize))), feedSlots)
	}
}

// Prefilled tells what a prefill endpoint found of a prompt in its cache, beside what it was thought to hold when the
// prompt was routed there, both in tokens. An endpoint that keeps less than it is thought to is thought to keep less
// from then on.
func (s *State) Prefilled(e *Endpoint, promised, found int64) {
	const slack = 256 // tokens: blocks begin and end elsewhere in the engine
	e.routed.learn(promised, found, slack+promised/16, s.o.EndpointBlocks)
}

// IndexStats are the numbers of a pool's prefix index.
type IndexStats struct {
	Blocks  int // different ones
	Entries int // blocks and who holds them: a block that three hold counts three
	Members int
}

// IndexStats are the numbers of the pool's prefix index now.
func (p *Pool) IndexStats() IndexStats {
	x := p.index
	x.writing.Lock()
	defer x.unlock()
	s := IndexStats{Blocks: x.store.blocks}
	for _, m := range x.members {
		if m != nil {
			s.Members++
			s.Entries += m.held
		}
	}
	return s
}
