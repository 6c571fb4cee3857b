package migration

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/openai"
)

// FuzzFeed feeds any bytes as an engine's answer: in one piece, and in pieces. The client gets the same, and without
// members that Tandem asked for it gets every byte.
func FuzzFeed(f *testing.F) {
	const chat = `{"messages":[{"role":"user","content":"a"}],"temperature":0,"stream":true%s}`
	body := []byte(`{"messages":[{"role":"user","content":"a"}],"temperature":0,"max_tokens":5,"return_token_ids":true}`)
	f.Add(engine{id: "a"}.stream(f, body), uint16(7), uint16(3))
	f.Add([]byte(": ping\r\n\r\ndata: {\"id\":1}\n\ndata: a\ndata: b\n\n"), uint16(1), uint16(20))
	f.Add([]byte("data: {\"error\":{}}\n\ndata: [DONE]\n\n\n"), uint16(2), uint16(2))
	f.Add([]byte("data: {\"id\":\"a\",\"created\":1,\"choices\":[{\"index\":0,\"delta\":{},\"token_ids\":[1]}]}\n\n"), uint16(0), uint16(0))
	f.Fuzz(func(t *testing.T, stream []byte, a, b uint16) {
		for _, limit := range []int{0, 64} {
			r := scan(t, openai.Chat, string(bytes.ReplaceAll([]byte(chat), []byte("%s"), nil)))
			whole := NewStream(r, Policy{MaxBytes: limit})
			want := whole.Release(whole.End(whole.Feed(nil, stream)))
			if limit == 0 && !bytes.Contains(stream, []byte("token_ids")) {
				require.Equal(t, string(want), string(stream))
			}
			pieces := NewStream(r, Policy{MaxBytes: limit})
			var got []byte
			for rest := stream; len(rest) > 0; a, b = b, a {
				n := min(int(a)%97+1, len(rest))
				got, rest = pieces.Feed(got, rest[:n]), rest[n:]
			}
			got = pieces.Release(pieces.End(got))
			if limit == 0 { // else it depends on the pieces when an event is too long
				require.Equal(t, string(want), string(got))
				require.Equal(t, whole.Reason(), pieces.Reason())
			}
			var p openai.Patch
			p.Reset(r)
			if pieces.Continue() == "" {
				pieces.Ask(r, &p)
				require.True(t, json.Valid(p.Edits().Apply(nil, r.Body())))
				pieces.Release(pieces.End(pieces.Feed(nil, stream))) // of another engine, which may write anything
			}
		}
		goesOn(t, stream, a, b)
	})
}

// goesOn has another engine continue an answer with a stream of any bytes behind some that are well formed. On the way
// the memory ends: by [Stream.Forget], or at the bound. What is held stays within that, and a second answer of the same
// bytes, which is not forgotten, gives the client no other ones.
func goesOn(t *testing.T, stream []byte, a, b uint16) {
	t.Helper()
	good := strings.Replace(firstEvent, "9,10]", "9,10,31337]", 1) + strings.Repeat(nextEvent, int(a)%5)
	for _, bound := range []bool{false, true} {
		kept, lost := flowing(t, false), flowing(t, false)
		for _, s := range []*Stream{kept, lost} {
			s.Feed(nil, []byte(strings.Repeat(nextEvent, int(b)%5)))
			require.Empty(t, s.Continue())
		}
		var want, got []byte
		for i, rest := 0, append([]byte(good), stream...); len(rest) > 0; i++ {
			n := min(int(a)%97+1, len(rest))
			if i == int(b)%64 && bound {
				lost.of.maxBytes = 4096
			} else if i == int(b)%64 {
				lost.Forget("memory")
				require.NotEmpty(t, lost.Continue())
			}
			want, got, rest = kept.Feed(want, rest[:n]), lost.Feed(got, rest[:n]), rest[n:]
			if i >= int(b)%64 && bound {
				require.LessOrEqual(t, lost.bytes(), 4096+len(good))
			}
		}
		want, got = kept.End(want), lost.End(got)
		require.True(t, bytes.HasPrefix(want, got) || bytes.HasPrefix(got, want), "%q\n%q", want, got)
	}
}

// FuzzEvent requires that what is taken for an event is JSON.
func FuzzEvent(f *testing.F) {
	f.Add([]byte(`{"id":"a","choices":[{"index":0,"delta":{"role":null,"content":"\ud83d\ude00"},"token_ids":[1]}],"usage":{}}`))
	f.Add([]byte(`{"choices": [ ] , "error": {}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		p := parser{b: data}
		e, ok := p.event()
		if !ok {
			return
		}
		require.True(t, json.Valid(data))
		if p.isString(e.text) {
			n := characters(p.text(e.text))
			require.Equal(t, e.text.to-1, e.text.from+afterCharacters(p.text(e.text), n))
		}
	})
}

// FuzzRepeat does both for answers that are repeated: any bytes are the first engine's answer, and then those of the engine
// that repeats another one. The client's part stays, in one piece and in pieces, and memory that ends changes nothing of it.
func FuzzRepeat(f *testing.F) {
	for seed := range uint64(3) {
		f.Add(agent{"a", seed, false}.chat(seed, true), uint16(7), uint16(seed))
		f.Add(agent{"a", seed, false}.messages(seed, true), uint16(3), uint16(99*seed))
		f.Add(agent{"a", seed, false}.responses(seed, true), uint16(3), uint16(99*seed))
	}
	f.Fuzz(func(t *testing.T, stream []byte, a, b uint16) {
		for _, x := range agentRequests {
			r := scan(t, x.api, x.body)
			first := x.answer(agent{"one", uint64(b % 5), strings.Contains(x.body, "tools")}, uint64(a%7), true)
			if s := NewStream(r, Policy{}); s.Repeats() {
				require.Equal(t, string(stream), string(s.Release(s.End(s.Feed(nil, stream)))))
			}
			kept, lost := NewStream(r, Policy{}), NewStream(r, Policy{})
			cut := int(b) % len(first)
			had := kept.Feed(nil, first[:cut])
			require.Equal(t, string(had), string(lost.Feed(nil, first[:cut])))
			if kept.Continue() != "" || lost.Continue() != "" || !kept.Repeats() {
				continue
			}
			want, got := slices.Clone(had), slices.Clone(had)
			for i, rest := 0, stream; len(rest) > 0; i++ {
				n := min(int(a)%97+1, len(rest))
				if i == int(b)%64 {
					lost.Forget("memory")
				}
				want, got, rest = kept.Feed(want, rest[:n]), lost.Feed(got, rest[:n]), rest[n:]
			}
			want, got = kept.End(want), lost.End(got)
			require.True(t, bytes.HasPrefix(want, had))
			require.True(t, bytes.HasPrefix(want, got) || bytes.HasPrefix(got, want), "%q\n%q", want, got)
			whole, piece := NewStream(r, Policy{}), slices.Clone(had)
			whole.Feed(nil, first[:cut])
			whole.Continue()
			require.Equal(t, string(want), string(whole.End(whole.Feed(piece, stream))))
		}
	})
}
