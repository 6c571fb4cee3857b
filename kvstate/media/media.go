// Package media learns how many tokens an image, a sound or a video has for an engine: that depends on the model, and
// not on the bytes of the file.
package media

import "sync"

// Kind is a kind of media.
type Kind uint8

// The kinds. Their order is that of extproc/openai.
const (
	Image Kind = iota
	Audio
	Video
	File
	Kinds
)

// Count counts the media of a prompt by kind.
type Count [Kinds]int32

// Any reports whether there are any.
func (c Count) Any() bool { return c != Count{} }

// start is the number of tokens that is assumed of a medium until engines have counted some, by the rules of engines:
//
//   - Image: a token covers 28 x 28 pixels (vLLM 0.32.0, model_executor/models/qwen2_vl.py: patches of 14, merged by
//     2 x 2), so an image of 1024 x 784 pixels has 1,024.
//   - Audio: 30 s, the longest that an encoder of Whisper's kind takes at once, have 750 (qwen2_audio.py: 1,500
//     positions, halved).
//   - Video: 32 frames are taken of it (multimodal/media/video.py, num_frames), each of which has 196 tokens
//     (llava_onevision.py: 14 x 14 after pooling).
//   - File: no engine takes one yet; a page as an image.
func start(k Kind) float64 {
	switch k {
	case Audio:
		return 750
	case Video:
		return 32 * 196
	case Image, File:
	}
	return 1024
}

const (
	// most is the largest number of tokens that is believed of one medium: an hour of video.
	most      = 1 << 20
	prior     = 2   // media that the start value counts for
	kept      = 256 // media of a kind at which old ones are halved
	maxModels = 200 // that have values of their own: clients may choose names
	// share is the least share of a prompt that its media must have to be learned from: otherwise the error in the
	// estimate of its text would count as theirs.
	share = 1. / 3
)

// Tokens is what was learned of a pool's media. It is safe for concurrent use.
type Tokens struct {
	mu     sync.RWMutex
	models map[string]*ofModel
	asked  uint64
}

type ofModel struct {
	kinds [Kinds]struct {
		n, tokens float64
		fresh     bool // since the last Forget
	}
	at uint64 // how many observations there had been when it got its last one
}

// Estimate returns the number of tokens that media have for a model.
func (t *Tokens) Estimate(model string, c Count) int64 {
	if !c.Any() {
		return 0
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	m := t.models[model]
	sum := 0.
	for k, n := range c {
		sum += float64(max(n, 0)) * m.mean(Kind(k))
	}
	return int64(sum)
}

// mean returns the tokens of a medium; m may be nil.
func (m *ofModel) mean(k Kind) float64 {
	if m == nil {
		return start(k)
	}
	return (m.kinds[k].tokens + prior*start(k)) / (m.kinds[k].n + prior)
}

// Observe learns from a prompt in which an engine has counted some tokens, of which text is the estimate for what is
// not media. Nothing is learned from a prompt with several kinds of media, or mostly of text.
func (t *Tokens) Observe(model string, c Count, tokens, text int64) {
	kind, n := Kinds, int32(0)
	for k, of := range c {
		if of > 0 {
			if kind != Kinds {
				return
			}
			kind, n = Kind(k), of
		}
	}
	of := float64(tokens - text)
	if kind == Kinds || of < share*float64(tokens) || of > float64(n)*most {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.asked++
	m := t.models[model]
	if m == nil {
		if t.models == nil {
			t.models = map[string]*ofModel{}
		}
		if len(t.models) >= maxModels {
			t.dropOldest()
		}
		m = &ofModel{}
		t.models[model] = m
	}
	m.at = t.asked
	k := &m.kinds[kind]
	k.fresh = true
	if k.n, k.tokens = k.n+float64(n), k.tokens+of; k.n > kept {
		k.n, k.tokens = k.n/2, k.tokens/2
	}
}

// Forget lowers the trust in what was learned of a model's media, if no prompt of them was counted since the last call:
// to a quarter, and to a few media at most.
func (t *Tokens) Forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, m := range t.models {
		for i := range m.kinds {
			k := &m.kinds[i]
			if !k.fresh && k.n > 0 {
				left := min(k.n, 16*prior) / 4 / k.n
				k.n, k.tokens = k.n*left, k.tokens*left
			}
			k.fresh = false
		}
	}
}

// dropOldest drops the model whose last prompt is the oldest.
func (t *Tokens) dropOldest() {
	oldest, at := "", t.asked
	for name, m := range t.models {
		if m.at < at {
			oldest, at = name, m.at
		}
	}
	delete(t.models, oldest)
}
