package prefixindex

import (
	"sort"
	"sync"
)

// TokenMemory records the token blocks of prompts whose text was seen before. Engines report the token ids of a
// whole prompt; the next turn of the conversation begins with the same text, and so with the same tokens. So exact
// token blocks are found without a tokenizer in the path.
//
// Where in the text a token ends is not reported, so it is interpolated: from the end of the last prompt that this
// one continues to its own end. A prompt that leaves a known one in the middle may get a block too many or too few.
//
// The oldest prompt is forgotten first. A prompt that continues a known one takes over its text, so the beginning
// of a text is never forgotten before its continuation, and bisection finds the deepest known block.
type TokenMemory struct {
	mu    sync.RWMutex
	limit int // bytes
	bytes int
	order []*learnedPrompt
	at    map[uint64]textPlace
}

// NewTokenMemory returns a memory of at most limit bytes.
func NewTokenMemory(limit int) *TokenMemory {
	return &TokenMemory{limit: limit, at: map[uint64]textPlace{}}
}

type textPlace struct {
	in *learnedPrompt
	i  int32
}

// learnedPrompt is one prompt; it is not changed after it was learned.
type learnedPrompt struct {
	text   []uint64 // hashes of its text blocks
	tokens []int32  // up to the end of each
	sizes  []int    // of token blocks
	blocks [][]uint64
	bytes  int
}

// KnownTokens are the known token blocks at the beginning of a prompt. The zero value is none.
type KnownTokens struct {
	in         *learnedPrompt
	TextBlocks int // leading text blocks of the prompt with known tokens
	Tokens     int // in those
}

// Blocks returns the hashes of the prompt's leading token blocks, as far as they are known. Do not modify.
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

// Known returns the known tokens of a prompt, given the hashes of its text blocks. It does not wait: it returns
// nothing while a prompt is being learned.
func (m *TokenMemory) Known(text []uint64) KnownTokens {
	if !m.mu.TryRLock() {
		return KnownTokens{}
	}
	defer m.mu.RUnlock()
	return m.find(text)
}

func (m *TokenMemory) find(text []uint64) KnownTokens {
	n := sort.Search(len(text), func(i int) bool { _, ok := m.at[text[i]]; return !ok })
	if n == 0 {
		return KnownTokens{}
	}
	p := m.at[text[n-1]]
	return KnownTokens{p.in, n, int(p.in.tokens[p.i])}
}

// TextPrompt is a prompt as text: the hashes of its text blocks, each of BlockBytes, and its length.
type TextPrompt struct {
	Blocks     []uint64
	BlockBytes int
	Bytes      int
}

// Learn records the tokens of a prompt in token blocks of the given sizes. It returns the part that other replicas
// lack; isNew is false if everything was known.
func (m *TokenMemory) Learn(text TextPrompt, sizes []int, prompt *TokenPrompt) (learned LearnedTokens, isNew bool) {
	if len(sizes) == 0 || len(text.Blocks) == 0 || len(prompt.IDs) == 0 {
		return LearnedTokens{}, false
	}
	l := &learnedPrompt{text: append([]uint64(nil), text.Blocks...), sizes: sizes}
	for _, size := range sizes {
		l.blocks = append(l.blocks, prompt.Blocks(nil, size))
	}
	known, isNew := m.learn(l, text.BlockBytes, text.Bytes, len(prompt.IDs))
	if !isNew {
		return LearnedTokens{}, false
	}
	return l.beyond(known, text.BlockBytes, text.Bytes, len(prompt.IDs)), true
}

// LearnedTokens is what one replica has learned of a prompt, for other replicas: the part after a prompt that was
// known before.
type LearnedTokens struct {
	Prompt     uint64 // hash of its last text block
	BlockBytes int    // in each of its text blocks
	Bytes      int    // in all of it
	Tokens     int    // in all of it
	Blocks     []LearnedBlocks
}

// LearnedBlocks are the hashes of a prompt's token blocks of one size. The first is a known one, unless From is 0:
// a replica with another hash there knows another prompt.
type LearnedBlocks struct {
	Size   int
	From   int
	Hashes []uint64
}

// beyond returns the part of a prompt after the known prompt that it continues.
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

// Prompts returns the number of known prompts.
func (m *TokenMemory) Prompts() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.order)
}

// Apply learns what another replica has learned. text are the text blocks of the prompt. If this replica does not
// know the prompt that it continues, nothing is learned.
func (m *TokenMemory) Apply(text []uint64, in *LearnedTokens) {
	known := m.Known(text)
	l := &learnedPrompt{text: text}
	for _, b := range in.Blocks {
		before := known.Blocks(b.Size)
		if b.Size <= 0 || b.From < 0 || len(b.Hashes) == 0 ||
			b.From > 0 && (b.From >= len(before) || before[b.From] != b.Hashes[0]) {
			continue
		}
		l.sizes = append(l.sizes, b.Size)
		l.blocks = append(l.blocks, append(append([]uint64(nil), before[:b.From]...), b.Hashes...))
	}
	if len(l.sizes) > 0 {
		m.learn(l, in.BlockBytes, in.Bytes, in.Tokens)
	}
}

// MaxLearnedText bounds the text blocks of a prompt that another replica has learned.
const MaxLearnedText = 1 << 14

// learn records a prompt and returns the part that was known before; isNew is false if everything was.
func (m *TokenMemory) learn(l *learnedPrompt, blockBytes, promptBytes, tokens int) (known KnownTokens, isNew bool) {
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

func (m *TokenMemory) forgetOldest() {
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

// LoRA returns the adapter that a model's name stands for: the name itself if engines have reported blocks under
// it, else "", the base model. An adapter that no engine has reported holds no blocks.
func (x *Index) LoRA(model string) string {
	if known := x.loras.Load(); known != nil {
		if name, ok := (*known)[model]; ok {
			return name
		}
	}
	return ""
}

// maxLoRAs bounds the adapters that are remembered.
const maxLoRAs = 512

// noteLoRA records an adapter that an engine named.
func (x *Index) noteLoRA(name []byte) {
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
