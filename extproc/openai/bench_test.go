package openai

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// chatBody returns a chat request of about n bytes: many turns of English text with the escapes that JSON puts into it.
func chatBody(n int) []byte {
	rng := rand.New(rand.NewPCG(1, 2))
	words := strings.Fields("the model answers a question about \"routing\" in\nlarge clusters of machines that hold a cache each and must not lose it")
	var b strings.Builder
	b.WriteString(`{"model":"meta-llama/Llama-3.1-8B-Instruct","stream":true,"stream_options":{"include_usage":true},"messages":[`)
	for turn := 0; b.Len() < n-200; turn++ {
		if turn > 0 {
			b.WriteByte(',')
		}
		var text strings.Builder
		for text.Len() < min(2000, n/4) {
			text.WriteString(words[rng.IntN(len(words))])
			if text.WriteByte(' '); rng.IntN(40) == 0 {
				text.WriteString("\n\n")
			}
		}
		content, err := json.Marshal(text.String())
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(&b, `{"role":%q,"content":%s}`, []string{"user", "assistant"}[turn%2], content)
	}
	b.WriteString(`],"temperature":0.7,"top_p":0.95,"max_tokens":512,"stop":["\n\nUser:","<|end|>"],"seed":9223372036854775807}`)
	return []byte(b.String())
}

// denseBody returns a completion of about n bytes whose prompt is token ids: JSON with hardly a string in it.
func denseBody(n int) []byte {
	rng := rand.New(rand.NewPCG(3, 4))
	b := []byte(`{"model":"m","max_tokens":512,"prompt":[1`)
	for len(b) < n {
		b = fmt.Appendf(b, ",%d", rng.IntN(128256))
	}
	return append(b, `],"stop":"x"}`...)
}

// toolsBody returns a chat request of about n bytes with nothing but small objects and short strings, indented.
func toolsBody(n int) []byte {
	var b strings.Builder
	b.WriteString("{\n  \"model\": \"m\",\n  \"messages\": [],\n  \"tools\": [")
	for i := 0; b.Len() < n; i++ {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "\n    {\n      \"type\": \"function\",\n      \"function\": {\n        \"name\": \"f%d\",\n        \"strict\": true,\n"+
			"        \"parameters\": {\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"number\", \"minimum\": -1.5e3}}}\n      }\n    }", i)
	}
	b.WriteString("\n  ],\n  \"max_tokens\": 10\n}")
	return []byte(b.String())
}

// prefillEdits returns the changes that a prefill leg needs.
func prefillEdits(p *Patch, r *Request) Edits {
	p.Reset(r)
	p.Set("max_tokens", FieldMaxTokens, []byte("1"))
	p.Set("max_completion_tokens", FieldMaxCompletionTokens, []byte("1"))
	p.Set("min_tokens", FieldMinTokens, []byte("1"))
	p.Set("n", FieldN, []byte("1"))
	p.Set("stream", FieldStream, []byte("false"))
	p.Set("kv_transfer_params", FieldKVTransferParams, []byte(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null}`))
	p.Delete(FieldStreamOptions)
	p.Delete(FieldStop)
	return p.Edits()
}

func bodies() map[string][]byte {
	return map[string][]byte{
		"text/1KB": chatBody(1 << 10), "text/220KB": chatBody(220 << 10), "text/8MB": chatBody(8 << 20),
		"dense/1KB": denseBody(1 << 10), "dense/220KB": denseBody(220 << 10), "dense/8MB": denseBody(8 << 20),
		"tools/220KB":  toolsBody(220 << 10),
		"hangul/220KB": fmt.Appendf(nil, `{"messages":[{"role":"user","content":%q}]}`, strings.Repeat("한국어 문장입니다. ", 220<<10/26)),
	}
}

var bodyNames = [...]string{"text/1KB", "text/220KB", "text/8MB", "dense/1KB", "dense/220KB", "dense/8MB", "tools/220KB", "hangul/220KB"}

func BenchmarkScan(b *testing.B) {
	all := bodies()
	for _, name := range bodyNames {
		body := all[name]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			var r Request
			for b.Loop() {
				if err := r.Scan(Chat, body, Limits{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkLeg is all work on the prefill leg's body: scan, patch, undo, apply.
func BenchmarkLeg(b *testing.B) {
	all := bodies()
	for _, name := range bodyNames {
		body := all[name]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			var r Request
			var p Patch
			var undo Edits
			var leg []byte
			for b.Loop() {
				if err := r.Scan(Chat, body, Limits{}); err != nil {
					b.Fatal(err)
				}
				edits := prefillEdits(&p, &r)
				undo = edits.Inverse(undo[:0], body)
				leg = edits.Apply(leg[:0], body)
			}
		})
	}
}

func BenchmarkPromptHash(b *testing.B) {
	all := bodies()
	for _, name := range []string{"text/1KB", "text/220KB", "text/8MB"} {
		body := all[name]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var r Request
			if err := r.Scan(Chat, body, Limits{}); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(r.PromptBytes()))
			var hashes []uint64
			for b.Loop() {
				hashes = r.PromptHash(hashes[:0], 512, 1<<20)
			}
		})
	}
}

// BenchmarkManyMembers is the worst case of the search for duplicate members.
func BenchmarkManyMembers(b *testing.B) {
	body := []byte("{")
	for i := range 511 {
		body = fmt.Appendf(body, `"%d":0,`, i)
	}
	body = append(body, `"x":0}`...)
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	var r Request
	for b.Loop() {
		if err := r.Scan(Chat, body, Limits{}); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkEncodingJSON is the reference for the others.
func BenchmarkEncodingJSON(b *testing.B) {
	body := chatBody(220 << 10)
	b.Run("valid", func(b *testing.B) {
		b.SetBytes(int64(len(body)))
		for b.Loop() {
			json.Valid(body)
		}
	})
	b.Run("map", func(b *testing.B) {
		b.ReportAllocs()
		b.SetBytes(int64(len(body)))
		for b.Loop() {
			var m map[string]json.RawMessage
			if err := json.Unmarshal(body, &m); err != nil {
				b.Fatal(err)
			}
			if _, err := json.Marshal(m); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkContinuation is one event of a chat that decode continues as a completion.
func BenchmarkContinuation(b *testing.B) {
	c := newContinuation(true)
	event := []byte(`data: {"id":"y","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" b","logprobs":null,"finish_reason":null}]}` + "\n\n")
	var events Events
	out := make([]byte, 0, 4096)
	each := func(event []byte) { out = c.Event(out[:0], event) }
	b.SetBytes(int64(len(event)))
	b.ReportAllocs()
	for b.Loop() {
		if err := events.Feed(event, each); err != nil {
			b.Fatal(err)
		}
	}
}
