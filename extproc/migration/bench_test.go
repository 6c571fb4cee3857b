package migration

import (
	"strings"
	"testing"

	"tandem/extproc/openai"
	"tandem/internal/budget"
)

const (
	firstEvent = `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1795225319,"model":"tiny",` +
		`"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],` +
		`"prompt_token_ids":[1,2,3,4,5,6,7,8,9,10],"prompt_text":null}` + "\n\n"
	nextEvent = `data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1795225319,"model":"tiny",` +
		`"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":[31337]}]}` + "\n\n"
)

// flowing returns the stream of a chat that has begun, with memory for the ids of a benchmark.
func flowing(t testing.TB, joined bool) *Stream {
	t.Helper()
	r := scan(t, openai.Chat, `{"messages":[{"role":"user","content":"a"}],"stream":true}`)
	s := NewStream(r, Policy{MaxBytes: 1 << 30})
	s.Feed(s.Feed(nil, []byte(firstEvent)), []byte(nextEvent))
	if joined {
		if _, reason := continued(r, &s); reason != "" {
			t.Fatal(reason)
		}
		s.head.id = []byte(`"chatcmpl-ffff456789abcdef"`)
		first := strings.Replace(firstEvent, "9,10]", "9,10,31337]", 1)
		s.Feed(s.Feed(nil, []byte(first)), []byte(nextEvent))
	}
	return &s
}

func BenchmarkEvent(b *testing.B) {
	for name, joined := range map[string]bool{"first engine": false, "joined": true} {
		b.Run(name, func(b *testing.B) {
			s, out, next := flowing(b, joined), make([]byte, 0, 4096), []byte(nextEvent)
			b.SetBytes(int64(len(nextEvent)))
			b.ReportAllocs()
			for b.Loop() {
				s.Feed(out, next)
			}
		})
	}
	b.Run("in two pieces", func(b *testing.B) {
		s, out, next := flowing(b, false), make([]byte, 0, 4096), []byte(nextEvent)
		b.SetBytes(int64(len(nextEvent)))
		b.ReportAllocs()
		for b.Loop() {
			s.Feed(s.Feed(out, next[:100]), next[100:])
		}
	})
}

// TestEventAllocs: every token of an answer passes here, inside Envoy. Only the list of ids grows, now and then.
func TestEventAllocs(t *testing.T) {
	for _, joined := range []bool{false, true} {
		s, out := flowing(t, joined), make([]byte, 0, 4096)
		next := []byte(nextEvent)
		for range 5000 {
			s.Feed(out, next)
		}
		s.ids = append(make([]uint32, 0, 1<<16), s.ids...)
		budget.Allocs(t, 1000, 0, func() { s.Feed(out, next) })
		budget.Allocs(t, 1000, 0, func() { s.Feed(s.Feed(out, next[:100]), next[100:]) })
	}
}
