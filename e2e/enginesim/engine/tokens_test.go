package engine

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/jsontext"
)

// slowTokens is the tokenizer's dumb twin: it lists every token and hashes blocks of the list.
func slowTokens(pieces [][]byte, blockSize int) *Prompt {
	p := &Prompt{}
	for _, b := range pieces {
		for len(b) > 0 {
			n := min(TokenBytes, len(b))
			p.Ids = append(p.Ids, TokenID(b[:n]))
			b = b[n:]
		}
	}
	p.N = len(p.Ids)
	chain := uint64(chainSeed)
	hash := func(ids []uint32) uint64 {
		var b []byte
		for _, id := range ids {
			b = append(b, byte(id), byte(id>>8), byte(id>>16), byte(id>>24))
		}
		return hashBlock(chain, b)
	}
	rest := p.Ids
	for len(rest) >= blockSize {
		chain = hash(rest[:blockSize])
		p.Full = append(p.Full, chain)
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
		fast := NewTokenizer(blockSize, true)
		byID := NewTokenizer(blockSize, false)
		var pieces [][]byte
		for range r.IntN(6) {
			piece := make([]byte, r.IntN(200))
			for i := range piece {
				piece[i] = byte('a' + r.IntN(26))
			}
			pieces = append(pieces, piece)
			fast.Piece(piece)
		}
		want := slowTokens(pieces, blockSize)
		got := fast.Finish("")
		require.Equal(t, want.N, got.N)
		require.Equal(t, want.Ids, got.Ids)
		require.Equal(t, want.Full, got.Full)
		require.Equal(t, want.tail, got.tail)
		byID.Tokens(got.Ids)
		again := byID.Finish("")
		require.Equal(t, got.Full, again.Full, "text and ids are the same prompt")
		require.Equal(t, got.Digest, again.Digest)

		var back []byte
		for _, id := range got.Ids {
			back = AppendToken(back, id)
		}
		var all []byte
		for _, p := range pieces {
			all = append(all, p...)
		}
		require.Equal(t, string(all), string(back))
	}
}

// TestResume: a prompt and its answer together are the prompt of the next turn.
func TestResume(t *testing.T) {
	q := &Sampling{MaxTokens: 100}
	for n := range 70 {
		a := NewTokenizer(16, false)
		a.Piece([]byte(strings.Repeat("abcd", n+1)))
		p := a.Finish("salt")
		out := q.Answer(p.Digest, 0, 1000, 0)
		ext := resume(p, 16)
		for i := range out.N {
			ext.token(TokenID([]byte(out.Token(i))))
		}
		whole := NewTokenizer(16, false)
		whole.Piece([]byte(strings.Repeat("abcd", n+1) + out.Whole()))
		want := whole.Finish("salt")
		require.Equal(t, want.Full, ext.p.Full)
		require.Equal(t, want.N, ext.p.N)
		require.Equal(t, want.salt, ext.p.salt)
		require.Len(t, p.Full, (n+1)/16, "the prompt itself is as it was")
	}
}

func TestEveryTokenCounts(t *testing.T) {
	text := []byte(strings.Repeat("0123456789abcdef", 40))
	digest := func(b []byte) uint64 {
		t := NewTokenizer(16, false)
		t.Piece(b)
		return t.Finish("").Digest
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
	answer := func(q Sampling, choice, room int) *Output {
		o := q.Answer(digest, choice, room, 0)
		return &o
	}
	base := answer(Sampling{MaxTokens: 64}, 0, 1000)
	require.Equal(t, 64, base.N)
	require.Equal(t, "length", base.Finish)
	require.Len(t, base.Whole(), 64*TokenBytes)
	require.Equal(t, base.Whole()[:4], answer(Sampling{MaxTokens: 1}, 0, 1000).Whole(), "P's token is D's first")
	require.NotEqual(t, base.Whole(), answer(Sampling{MaxTokens: 64}, 1, 1000).Whole())

	free := answer(Sampling{MaxTokens: -1}, 0, 1000)
	require.Equal(t, "stop", free.Finish)
	require.GreaterOrEqual(t, free.N, shortestAnswer)
	require.LessOrEqual(t, free.N, longestAnswer)
	require.Equal(t, 90, answer(Sampling{MaxTokens: -1, MinTokens: 90}, 0, 1000).N)
	require.Equal(t, 10, answer(Sampling{MaxTokens: -1}, 0, 10).N)

	stop := base.Whole()[38:41] // across a token's border
	cut := answer(Sampling{MaxTokens: 64, Stop: []string{stop}}, 0, 1000)
	require.Equal(t, "stop", cut.Finish)
	require.Equal(t, strings.Split(base.Whole(), stop)[0], cut.Whole())
	require.Equal(t, string(jsontext.AppendQuoted(nil, stop)), cut.StopReason)
	var joined string
	for i := range cut.N {
		joined += cut.Token(i)
	}
	require.Equal(t, cut.Whole(), joined)
	kept := (&Sampling{MaxTokens: 64, Stop: []string{stop}, IncludeStop: true}).Answer(digest, 0, 1000, 0)
	require.True(t, strings.HasSuffix(kept.Whole(), stop))

	id := TokenID([]byte(base.Token(7)))
	byID := answer(Sampling{MaxTokens: 64, StopIDs: []uint32{id}}, 0, 1000)
	require.Equal(t, 8, byID.N)
	require.Equal(t, 64, answer(Sampling{MaxTokens: 64, MinTokens: 64, StopIDs: []uint32{id}}, 0, 1000).N)
}

func TestOddTokens(t *testing.T) {
	for _, s := range oddTokens {
		require.Len(t, s, TokenBytes, "%q", s)
	}
	seen := map[string]bool{}
	for i := range uint64(20000) {
		o := Output{Digest: i}
		tok := o.Token(int(i))
		require.Len(t, tok, TokenBytes)
		seen[tok] = true
	}
	require.Greater(t, len(seen), 1000)
	for _, s := range oddTokens {
		require.True(t, seen[s])
	}
}
