package main

import (
	"fmt"
	"strings"
	"testing"
)

// BenchmarkTwoLegs measures the engines' share in other benchmarks: both HTTP requests and the transfer, client
// included.
func BenchmarkTwoLegs(b *testing.B) {
	for _, size := range []int{1 << 10, 220 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			p, d := startEngine(b, "-role", "prefill", "-record=false"), startEngine(b, "-role", "decode", "-record=false")
			i := 0
			b.ReportAllocs()
			for b.Loop() {
				i++
				prompt := fmt.Sprint(i) + strings.Repeat("text", size/4)
				id := fmt.Sprint("r", i)
				params := p.prefill(b, id, prompt)
				d.post(b, chatPath, id, chat(prompt, `"max_tokens":4`, decodeMembers(params)))
			}
		})
	}
}

func BenchmarkStream256(b *testing.B) {
	e := startEngine(b, "-record=false")
	b.ReportAllocs()
	for b.Loop() {
		e.post(b, chatPath, "s", chat("hello", `"max_tokens":256,"stream":true`))
	}
}
