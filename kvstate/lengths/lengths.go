// Package lengths learns how many tokens answers have.
package lengths

import "sync"

const (
	// Needed is the number of answers before their mean is used.
	Needed = 20
	// Longest is the largest number of tokens that is believed of an answer: no engine generates more.
	Longest = 1 << 20

	kept      = 1000 // answers at which old ones are halved
	maxModels = 200  // that have a mean of their own: clients may choose names
)

// Mean is the mean length of recent answers.
type Mean struct{ n, tokens float64 }

// Add adds some answers. Tokens that they cannot have are left out.
func (m *Mean) Add(answers, tokens int64) {
	if answers <= 0 || tokens < 0 || tokens > answers*Longest {
		return
	}
	m.n, m.tokens = m.n+float64(answers), m.tokens+float64(tokens)
	if m.n > kept {
		m.n, m.tokens = m.n/2, m.tokens/2
	}
}

// Value returns the mean tokens of an answer, 0 without enough of them.
func (m *Mean) Value() float64 {
	if m.n < Needed {
		return 0
	}
	return max(m.tokens/m.n, 1)
}

// ByModel is the mean length of each model's answers. It is safe for concurrent use.
type ByModel struct {
	mu     sync.RWMutex
	models map[string]*ofModel
	added  uint64
}

type ofModel struct {
	Mean
	at uint64 // how many answers had been added when it got its last one
}

// Add adds an answer of a model. The model whose last answer is the oldest makes room for a new one.
func (b *ByModel) Add(model string, tokens int64) {
	if model == "" {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.added++
	m := b.models[model]
	if m == nil {
		if b.models == nil {
			b.models = map[string]*ofModel{}
		}
		if len(b.models) >= maxModels {
			b.dropOldest()
		}
		m = &ofModel{}
		b.models[model] = m
	}
	m.at = b.added
	m.Add(1, tokens)
}

func (b *ByModel) dropOldest() {
	oldest, at := "", b.added
	for name, m := range b.models {
		if m.at < at {
			oldest, at = name, m.at
		}
	}
	delete(b.models, oldest)
}

// Mean returns the mean tokens of an answer of a model, 0 without enough of them.
func (b *ByModel) Mean(model string) float64 {
	b.mu.RLock()
	defer b.mu.RUnlock()
	if m := b.models[model]; m != nil {
		return m.Value()
	}
	return 0
}
