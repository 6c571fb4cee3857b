package engine

import (
	"strings"
	"testing"
)

// BenchmarkEvents encodes what a prompt of 100k tokens leads to on an engine whose cache is full: its blocks are stored,
// and as many are removed.
func BenchmarkEvents(b *testing.B) {
	tokens := NewTokenizer(16, true)
	tokens.Piece([]byte(strings.Repeat("Disaggregated serving runs prefill and decode apart. ", 400_000/53)))
	prompt := tokens.Finish("")
	e := &Events{cfg: &Config{EventSteps: 16}, wake: make(chan struct{}, 1)}
	b.ReportAllocs()
	for b.Loop() {
		e.stored(prompt, 0, len(prompt.Full), 16)
		for i := range prompt.Full {
			e.removed(prompt.key(i), mediumGPU)
		}
		e.next()
	}
}
