package kvstate

import (
	"sort"
	"sync"
)

// tokenMemory knows which token blocks a prompt begins with whose text has been seen before. Engines tell the token ids of
// a whole prompt; the next turn of the conversation begins with the same text, and so with the same tokens. So exact token
// blocks are found with no tokenizer in the path.
//
// Where in the text a token ends is not told, so that is interpolated: from the end of the last prompt that this one
// continues to its own end. A prompt that leaves a known one in the middle may get a block too many or too few.
//
// What is oldest goes first. A prompt that continues a known one takes over its text, so that the beginning of a
// text is never forgotten before what follows it, and the deepest known block is found by bisection.
type tokenMemory struct {
	mu    sync.RWMutex
	limit int // bytes
	bytes int
	order []*learnedPrompt
	at    map[uint64]textPlace
}

type textPlace struct {
	in *learnedPrompt
	i  int32
}

// learnedPrompt is one prompt; nothing in it changes.
type learnedPrompt struct {
	text   []uint64 // hashes of its text blocks
	tokens []int32  // up to the end of each
	sizes  []int    // of token blocks
	blocks [][]uint64
	bytes  int
}

// KnownTokens is what is known of the tokens that a prompt begins with. The zero value is nothing.
type KnownTokens struct {
	in         *learnedPrompt
	TextBlocks int // leading text blocks of the prompt whose tokens are known
	Tokens     int // in those
}

// Blocks are the hashes of the prompt's leading token blocks, as far as they are known. Do not modify.
func (k KnownTokens) Blocks(size int) []uint64 {
	if k.in == nil {
		return nil
	}
	for i, s := range k.in.sizes {
		if s == size {
			return k.in.blocks[i][:min(k.Tokens/size, len(k.in.blocks[i]))]
		}
	}
	return nil
}

// KnownTokens finds what is known of a prompt, given the hashes of its text blocks. It does not wait: while somebody is
// learning, nothing is known.
func (p *Pool) KnownTokens(text []uint64) KnownTokens {
	m := p.tokens
	if !m.mu.TryRLock() {
		return KnownTokens{}
	}
	defer m.mu.RUnlock()
	return m.find(text)
}

func (m *tokenMemory) find(text []uint64) KnownTokens {
	n := sort.Search(len(text), func(i int) bool { _, ok := m.at[text[i]]; return !ok })
	if n == 0 {
		return KnownTokens{}
	}
	p := m.at[text[n-1]]
	return KnownTokens{p.in, n, int(p.in.tokens[p.i])}
}

// TextOf are the hashes of a prompt's text blocks, given that of the last: those of the blocks before it are in the index, if
// the prompt was routed by a replica that this one hears. nil: they are not. At most so many, in the memory of dst.
func (p *Pool) TextOf(dst []uint64, last uint64, most int) []uint64 {
	return p.index.chain(dst, last, most)
}

// LearnTokens notes the tokens of a prompt: text are the hashes of its text blocks, each of blockBytes, of promptBytes in
// all. Without KV events, or where that is all known, it does nothing. Other replicas are told.
func (s *State) LearnTokens(p *Pool, text []uint64, blockBytes, promptBytes int, prompt *TokenPrompt) {
	sizes := p.TokenBlockSizes()
	if len(sizes) == 0 || len(text) == 0 || len(prompt.IDs) == 0 {
		return
	}
	l := &learnedPrompt{text: append([]uint64(nil), text...), sizes: sizes}
	for _, size := range sizes {
		l.blocks = append(l.blocks, prompt.Blocks(nil, size))
	}
	known, isNew := p.tokens.learn(l, blockBytes, promptBytes, len(prompt.IDs))
	if isNew && s.peers != nil {
		s.peers.Learned(p, l.beyond(known, blockBytes, promptBytes, len(prompt.IDs)))
	}
}

// LearnedTokens is what one replica has learned of a prompt, as others are told: what it has beyond a prompt that was known
// before.
type LearnedTokens struct {
	Prompt     uint64 // hash of its last text block
	BlockBytes int    // in each of its text blocks
	Bytes      int    // in all of it
	Tokens     int    // in all of it
	Blocks     []LearnedBlocks
}

// LearnedBlocks are the hashes of a prompt's token blocks of one size. The first is one that was known, unless From is 0: who
// has another there knows another prompt.
type LearnedBlocks struct {
	Size   int
	From   int
	Hashes []uint64
}

// beyond is what others are told of a prompt that continues a known one.
func (l *learnedPrompt) beyond(known KnownTokens, blockBytes, promptBytes, tokens int) LearnedTokens {
	out := LearnedTokens{Prompt: l.text[len(l.text)-1], BlockBytes: blockBytes, Bytes: promptBytes, Tokens: tokens}
	for i, size := range l.sizes {
		same, before := 0, known.Blocks(size)
		for same < len(before) && same < len(l.blocks[i]) && before[same] == l.blocks[i][same] {
			same++
		}
		from := max(same-1, 0)
		out.Blocks = append(out.Blocks, LearnedBlocks{size, from, l.blocks[i][from:]})
	}
	return out
}

// KnownPrompts is how many prompts there are whose tokens are known.
func (p *Pool) KnownPrompts() int {
	p.tokens.mu.RLock()
	defer p.tokens.mu.RUnlock()
	return len(p.tokens.order)
}

// ApplyLearned is [State.LearnTokens] by another replica. Where the prompt is not known here, or not what it continues, nothing
// is learned.
func (s *State) ApplyLearned(p *Pool, in *LearnedTokens) {
	p.index.settle()
	text := p.TextOf(nil, in.Prompt, maxLearnedText)
	if text == nil || in.Tokens <= 0 || in.BlockBytes <= 0 {
		return
	}
	known := p.KnownTokens(text)
	l := &learnedPrompt{text: text}
	for _, b := range in.Blocks {
		before := known.Blocks(b.Size)
		if b.Size <= 0 || b.From < 0 || len(b.Hashes) == 0 || b.From > 0 && (b.From >= len(before) || before[b.From] != b.Hashes[0]) {
			continue
		}
		l.sizes = append(l.sizes, b.Size)
		l.blocks = append(l.blocks, append(append([]uint64(nil), before[:b.From]...), b.Hashes...))
	}
	if len(l.sizes) > 0 {
		p.tokens.learn(l, in.BlockBytes, in.Bytes, in.Tokens)
	}
}

// maxLearnedText bounds the text blocks of a prompt that others have learned about.
const maxLearnedText = 1 << 14

// learn takes a prompt in, and says what was known of it before; false where that is all.
func (m *tokenMemory) learn(l *learnedPrompt, blockBytes, promptBytes, tokens int) (known KnownTokens, isNew bool) {
	text := l.text
	l.tokens = make([]int32, len(text))
	l.bytes = len(text)*(8+4+40) + 200 // 40: an entry of the map
	for _, blocks := range l.blocks {
		l.bytes += 8 * len(blocks)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	known = m.find(text)
	if known.TextBlocks == len(text) && len(known.in.text) == len(text) {
		return known, false
	}
	if known.Tokens > tokens { // another template, or tokenizer
		known = KnownTokens{}
	}
	for i := range text {
		if i < known.TextBlocks {
			place := m.at[text[i]]
			l.tokens[i] = min(place.in.tokens[place.i], int32(tokens))
			continue
		}
		done, all := (i+1-known.TextBlocks)*blockBytes, max(promptBytes-known.TextBlocks*blockBytes, 1)
		l.tokens[i] = int32(known.Tokens + (tokens-known.Tokens)*min(done, all)/all)
	}
	for i, h := range text {
		m.at[h] = textPlace{l, int32(i)}
	}
	m.order = append(m.order, l)
	for m.bytes += l.bytes; m.bytes > m.limit && len(m.order) > 1; {
		m.forgetOldest()
	}
	return known, true
}

func (m *tokenMemory) forgetOldest() {
	old := m.order[0]
	m.order[0] = nil
	m.order = m.order[1:]
	m.bytes -= old.bytes
	for _, h := range old.text {
		if m.at[h].in == old {
			delete(m.at, h)
		}
	}
}

func newTokenMemory(limit int) *tokenMemory {
	return &tokenMemory{limit: limit, at: map[uint64]textPlace{}}
}

// LoRA is the adapter that a model's name stands for: the name itself where engines have told of blocks under it, else "",
// the base model. An adapter that no engine has told of holds no blocks.
func (p *Pool) LoRA(model string) string {
	if known := p.index.loras.Load(); known != nil {
		if name, ok := (*known)[model]; ok {
			return name
		}
	}
	return ""
}

// maxLoRAs bounds the adapters that are remembered.
const maxLoRAs = 512

// noteLoRA notes an adapter that an engine named.
func (x *prefixIndex) noteLoRA(name []byte) {
	known := x.loras.Load()
	if known != nil {
		if _, ok := (*known)[string(name)]; ok || len(*known) >= maxLoRAs {
			return
		}
	}
	grown := map[string]string{string(name): string(name)}
	if known != nil {
		for n := range *known {
			grown[n] = n
		}
	}
	x.loras.Store(&grown)
}
