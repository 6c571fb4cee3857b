package main

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"

	"tandem/internal/budget"

	"github.com/stretchr/testify/require"
)

// slowTokens is the tokenizer's dumb twin: it lists every token and hashes blocks of the list.
func slowTokens(pieces [][]byte, blockSize int) *prompt {
	p := &prompt{}
	for _, b := range pieces {
		for len(b) > 0 {
			n := min(tokenBytes, len(b))
			p.ids = append(p.ids, tokenID(b[:n]))
			b = b[n:]
		}
	}
	p.n = len(p.ids)
	chain := uint64(chainSeed)
	hash := func(ids []uint32) uint64 {
		var b []byte
		for _, id := range ids {
			b = append(b, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
		}
		return hashBlock(chain, b)
	}
	rest := p.ids
	for len(rest) >= blockSize {
		chain = hash(rest[:blockSize])
		p.full = append(p.full, chain)
		rest = rest[blockSize:]
	}
	if len(rest) > 0 {
		p.tail = hash(rest)
	}
	return p
}

func TestTokenizerTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 500 {
		blockSize := 1 + r.IntN(20)
		fast := newTokenizer(blockSize, true)
		byID := newTokenizer(blockSize, false)
		var pieces [][]byte
		for range r.IntN(6) {
			piece := make([]byte, r.IntN(200))
			for i := range piece {
				piece[i] = byte('a' + r.IntN(26))
			}
			pieces = append(pieces, piece)
			fast.piece(piece)
		}
		want := slowTokens(pieces, blockSize)
		got := fast.finish("")
		require.Equal(t, want.n, got.n)
		require.Equal(t, want.ids, got.ids)
		require.Equal(t, want.full, got.full)
		require.Equal(t, want.tail, got.tail)
		byID.tokens(got.ids)
		again := byID.finish("")
		require.Equal(t, got.full, again.full, "text and ids are the same prompt")
		require.Equal(t, got.digest, again.digest)

		var back []byte
		for _, id := range got.ids {
			back = appendToken(back, id)
		}
		var all []byte
		for _, p := range pieces {
			all = append(all, p...)
		}
		require.Equal(t, string(all), string(back))
	}
}

// TestResume: a prompt and its answer together are the prompt of the next turn, where they were one text.
func TestResume(t *testing.T) {
	q := &request{maxTokens: 100}
	for n := range 70 {
		a := newTokenizer(16, false)
		a.piece([]byte(strings.Repeat("abcd", n+1)))
		p := a.finish("salt")
		out := q.answer(p.digest, 0, 1000, 0)
		ext := resume(p, 16)
		for i := range out.n {
			ext.token(tokenID([]byte(out.token(i))))
		}
		whole := newTokenizer(16, false)
		whole.piece([]byte(strings.Repeat("abcd", n+1) + out.whole()))
		want := whole.finish("salt")
		require.Equal(t, want.full, ext.p.full)
		require.Equal(t, want.n, ext.p.n)
		require.Equal(t, want.salt, ext.p.salt)
		require.Len(t, p.full, (n+1)/16, "the prompt itself is as it was")
	}
}

func TestEveryTokenCounts(t *testing.T) {
	text := []byte(strings.Repeat("0123456789abcdef", 40))
	digest := func(b []byte) uint64 {
		t := newTokenizer(16, false)
		t.piece(b)
		return t.finish("").digest
	}
	seen := map[uint64]bool{digest(text): true}
	for i := range text {
		b := append([]byte(nil), text...)
		b[i] ^= 1
		seen[digest(b)] = true
	}
	for i := 1; i < 100; i++ {
		seen[digest(text[:len(text)-i])] = true
	}
	require.Len(t, seen, len(text)+100)
}

func TestAnswer(t *testing.T) {
	const digest = 42
	answer := func(q request, choice, room int) *output {
		o := q.answer(digest, choice, room, 0)
		return &o
	}
	base := answer(request{maxTokens: 64}, 0, 1000)
	require.Equal(t, 64, base.n)
	require.Equal(t, "length", base.finish)
	require.Len(t, base.whole(), 64*tokenBytes)
	require.Equal(t, base.whole()[:4], answer(request{maxTokens: 1}, 0, 1000).whole(), "P's token is D's first")
	require.NotEqual(t, base.whole(), answer(request{maxTokens: 64}, 1, 1000).whole())

	free := answer(request{maxTokens: -1}, 0, 1000)
	require.Equal(t, "stop", free.finish)
	require.GreaterOrEqual(t, free.n, shortestAnswer)
	require.LessOrEqual(t, free.n, longestAnswer)
	require.Equal(t, 90, answer(request{maxTokens: -1, minTokens: 90}, 0, 1000).n)
	require.Equal(t, 10, answer(request{maxTokens: -1}, 0, 10).n)

	stop := base.whole()[38:41] // across a token's border
	cut := answer(request{maxTokens: 64, stop: []string{stop}}, 0, 1000)
	require.Equal(t, "stop", cut.finish)
	require.Equal(t, strings.Split(base.whole(), stop)[0], cut.whole())
	require.Equal(t, string(appendQuoted(nil, stop)), cut.stopReason)
	var joined string
	for i := range cut.n {
		joined += cut.token(i)
	}
	require.Equal(t, cut.whole(), joined)
	kept := (&request{maxTokens: 64, stop: []string{stop}, includeStop: true}).answer(digest, 0, 1000, 0)
	require.True(t, strings.HasSuffix(kept.whole(), stop))

	id := tokenID([]byte(base.token(7)))
	byID := answer(request{maxTokens: 64, stopIDs: []uint32{id}}, 0, 1000)
	require.Equal(t, 8, byID.n)
	require.Equal(t, 64, answer(request{maxTokens: 64, minTokens: 64, stopIDs: []uint32{id}}, 0, 1000).n)
}

func TestOddTokens(t *testing.T) {
	for _, s := range oddTokens {
		require.Len(t, s, tokenBytes, "%q", s)
	}
	seen := map[string]bool{}
	for i := range uint64(20000) {
		o := output{digest: i}
		tok := o.token(int(i))
		require.Len(t, tok, tokenBytes)
		seen[tok] = true
	}
	require.Greater(t, len(seen), 1000)
	for _, s := range oddTokens {
		require.True(t, seen[s])
	}
}

func TestTools(t *testing.T) {
	const tools = `[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string"},"c":{"enum":["x"]},"d":{"type":"boolean"},"e":{"type":"array"},"g":{"type":"object","properties":{"h":{"type":"null"}}}}}}},{"type":"function","function":{"name":"second"}}]`
	e := startEngine(t)
	for choice, name := range map[string]string{`"required"`: "f", `{"type":"function","function":{"name":"second"}}`: "second"} {
		r := e.post(t, chatPath, "x", chat("hi", `"tools":`+tools, `"tool_choice":`+choice))
		require.Equal(t, "tool_calls", r.str("choices", "0", "finish_reason"))
		require.Equal(t, name, r.str("choices", "0", "message", "tool_calls", "0", "function", "name"))
		require.True(t, json.Valid([]byte(r.str("choices", "0", "message", "tool_calls", "0", "function", "arguments"))))
	}
	for _, choice := range []string{`"auto"`, `"none"`} {
		require.NotEmpty(t, e.post(t, chatPath, "x", chat("hi", `"tools":`+tools, `"tool_choice":`+choice)).content())
	}
	cut := e.post(t, chatPath, "x", chat("hi", `"tools":`+tools, `"tool_choice":"required"`, `"max_tokens":1`))
	require.Equal(t, `{"a"`, cut.content())
	require.Equal(t, "length", cut.str("choices", "0", "finish_reason"))

	plain := e.post(t, chatPath, "x", chat("hi", `"max_tokens":20`, `"tools":`+tools)).content()
	spaced := strings.ReplaceAll(tools, ",", " , ")
	require.Equal(t, plain, e.post(t, chatPath, "x", chat("hi", `"max_tokens":20`, `"tools":`+spaced)).content(), "space is no token")
	reordered := strings.Replace(tools, `"type":"function","function":{"name":"second"}`, `"function":{"name":"second"},"type":"function"`, 1)
	require.NotEqual(t, plain, e.post(t, chatPath, "x", chat("hi", `"max_tokens":20`, `"tools":`+reordered)).content(), "order is")
}

func TestRenderAllocates(t *testing.T) {
	body := []byte(chat(strings.Repeat("Some ordinary text. ", 11000)))
	q, bad := parseRequest(apiChat, body, nil, connectorNIXL, false)
	require.Nil(t, bad)
	budget.Allocs(t, 10, 12, func() { _, _ = q.render(16) })
}
