package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"tandem/internal/budget"
	"tandem/kvstate/prefixindex"

	"github.com/stretchr/testify/require"
)

// eventPool returns a pool with one engine that reported blocks of 16 tokens.
func eventPool(o Options) (*State, *Pool, *prefixindex.Feed) {
	s := New(o)
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 0))
	p := s.Pool("p")
	f := p.Feed(p.Endpoints()[0])
	f.Apply([]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: []uint64{1}, Blocks: []uint64{1}, Root: prefixindex.TokenRoot("", 16), BlockSize: 16}})
	return s, p, f
}

// text returns a prompt as text, in blocks of 512 bytes.
func text(blocks []uint64, bytes int) prefixindex.TextPrompt {
	return prefixindex.TextPrompt{Blocks: blocks, BlockBytes: 512, Bytes: bytes}
}

func ids(n int, from uint32) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = from + uint32(i)
	}
	return out
}

// A conversation grows: the known tokens of a turn serve the next turn, whose text begins with the same bytes.
func TestTokensAreLearnedTurnByTurn(t *testing.T) {
	s, p, f := eventPool(Options{})
	first, second := long(4, 0, 1), long(10, 4, 2)
	second = append(append([]uint64(nil), first...), second[4:]...)
	require.Zero(t, p.KnownTokens(first))

	turn1 := prefixindex.TokenPrompt{IDs: ids(640, 0)} // 4.5 text blocks of 512 bytes
	s.LearnTokens(p, text(first, 4*512+256), &turn1)
	known := p.KnownTokens(second)
	require.Equal(t, []int{4, 640 * 8 / 9}, []int{known.TextBlocks, known.Tokens})
	require.Equal(t, turn1.Blocks(nil, 16)[:640*8/9/16], known.Blocks(16))
	require.Empty(t, known.Blocks(32), "no engine has blocks of 32")

	turn2 := prefixindex.TokenPrompt{IDs: ids(640+1000, 0)}
	s.LearnTokens(p, text(second, 10*512), &turn2)
	require.Equal(t, 640*8/9, p.KnownTokens(first).Tokens, "what was exact stays so")
	require.Equal(t, 1640, p.KnownTokens(second).Tokens)

	// The engine holds the first turn: 40 blocks of 16 tokens.
	blocks := turn1.Blocks(nil, 16)
	e := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Root: prefixindex.TokenRoot("", 16), BlockSize: 16}
	h := e.Root
	for i, b := range blocks {
		e.Keys, e.Blocks = append(e.Keys, uint64(i+100)), append(e.Blocks, unchain(h, b))
		h = b
	}
	f.Apply([]prefixindex.BlockEvent{e})
	var v View
	s.View(p, second, &v)
	require.Zero(t, v.Endpoints[0].Hit)
	p.TokenHits(p.KnownTokens(second).Blocks(16), 16, 1640, len(second), &v)
	require.Equal(t, 640*10/1640, v.Endpoints[0].Hit, "in text blocks")
}

// unchain returns the block that makes hash of parent.
func unchain(parent, hash uint64) uint64 {
	inverse := uint64(1)
	for range 6 { // Newton
		inverse *= 2 - 0xff51afd7ed558ccd*inverse
	}
	return hash*inverse ^ (parent<<27 | parent>>37)
}

// learner is another replica, which receives only learned prompts.
type learner struct {
	Replicas
	learned []prefixindex.LearnedTokens
}

func (*learner) Changed()                                       {}
func (*learner) Routed(*Pool, *Endpoint, []uint64)              {}
func (o *learner) Learned(_ *Pool, l prefixindex.LearnedTokens) { o.learned = append(o.learned, l) }
func (o *learner) hashes(i int) (n int) {
	for _, b := range o.learned[i].Blocks {
		n += len(b.Hashes)
	}
	return n
}

// Other replicas apply one replica's learned tokens, as far as they know the text; a publication has only the hashes
// of the new part.
func TestLearnedTokensArePublished(t *testing.T) {
	told := &learner{}
	s, p, _ := eventPool(Options{})
	s.Connect(told)
	first, second := long(4, 0, 1), long(10, 4, 2)
	second = append(append([]uint64(nil), first...), second[4:]...)
	turn1, turn2 := prefixindex.TokenPrompt{IDs: ids(640, 0)}, prefixindex.TokenPrompt{IDs: ids(640+1000, 0)}
	require.Nil(t, p.TextOf(nil, first[3], 100), "nobody routed it")
	s.LearnTokens(p, text(first, 4*512+256), &turn1)
	s.LearnTokens(p, text(second, 10*512), &turn2)
	s.LearnTokens(p, text(second, 10*512), &turn2)
	require.Len(t, told.learned, 2, "what is known is not told again")
	require.Equal(t, []int{40, 102 - 40*8/9 + 1}, []int{told.hashes(0), told.hashes(1)})

	other, q, _ := eventPool(Options{})
	other.ApplyLearned(q, &told.learned[0])
	require.Zero(t, q.KnownTokens(first), "it does not know the text")
	other.ApplyRouted(q, q.Endpoints()[0], second)
	require.Equal(t, first, q.TextOf(nil, first[3], 100))
	require.Nil(t, q.TextOf(nil, second[9], 9), "more than asked for")
	other.ApplyLearned(q, &told.learned[1])
	require.Zero(t, q.KnownTokens(second), "it does not know what came before")
	for range 2 {
		other.ApplyLearned(q, &told.learned[0])
		other.ApplyLearned(q, &told.learned[1])
		for _, text := range [][]uint64{first, second} {
			require.Equal(t, p.KnownTokens(text).Tokens, q.KnownTokens(text).Tokens)
			require.Equal(t, p.KnownTokens(text).Blocks(16), q.KnownTokens(text).Blocks(16))
		}
	}
	for _, bad := range []prefixindex.LearnedTokens{
		{}, {Prompt: first[3], BlockBytes: 512, Bytes: 1, Tokens: -1},
		{Prompt: second[9], BlockBytes: 512, Bytes: 1 << 30, Tokens: 1 << 30, Blocks: []prefixindex.LearnedBlocks{{}, {Size: 16, From: 1 << 30, Hashes: first}, {Size: -1, Hashes: first}, {Size: 16, From: -1, Hashes: first}}},
	} {
		other.ApplyLearned(q, &bad)
	}
}

func TestTokensAreNotLearnedForNothing(t *testing.T) {
	s := New(Options{})
	s.SetPool(PoolSpec{Name: "p"}, pd(1, 0))
	p := s.Pool("p")
	s.LearnTokens(p, text(long(4, 0, 1), 2048), &prefixindex.TokenPrompt{IDs: ids(100, 0)})
	require.Zero(t, p.KnownTokens(long(4, 0, 1)), "no engine publishes events")
}

// If the engine reports its blocks, the reports replace the guesses from routing, except for the latest ones.
func TestEnginesAreTrusted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, f := eventPool(Options{})
		go s.Run(t.Context())
		blocks, prompt := long(8, 0, 1), prefixindex.TokenPrompt{IDs: ids(256, 0)}
		hit := func() int {
			var v View
			s.View(p, blocks, &v)
			known := p.KnownTokens(blocks)
			p.DropGuesses(blocks, known.TextBlocks, &v)
			p.TokenHits(known.Blocks(16), 16, 256, len(blocks), &v)
			return v.Endpoints[0].Hit
		}
		s.Routed(p, p.Endpoints()[0], blocks)
		require.Equal(t, 8, hit(), "guessed: the engine cannot have told yet")
		<-time.After(40 * time.Second)
		require.Equal(t, 8, hit(), "nor can it be asked, for nobody knows the tokens")
		s.LearnTokens(p, text(blocks, 8*512), &prompt)
		require.Zero(t, hit(), "it holds nothing of it")

		e := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Root: prefixindex.TokenRoot("", 16), BlockSize: 16}
		h := e.Root
		for i, b := range prompt.Blocks(nil, 16)[:4] {
			e.Keys, e.Blocks = append(e.Keys, uint64(i+100)), append(e.Blocks, unchain(h, b))
			h = b
		}
		f.Apply([]prefixindex.BlockEvent{e})
		require.Equal(t, 2, hit(), "4 of 16 token blocks are 2 of 8 text blocks")
		f.Close()
		require.Equal(t, 8, hit(), "without its word the guess is all there is")
		require.Equal(t, 1, p.IndexStats().Members)
	})
}

// Where the tokens of a prompt's beginning are known, an engine that does not hold all of it is not thought to hold the
// rest: conversations whose turns a decode engine answers alone grow beyond what is known, and are evicted later.
func TestGuessesNeedTheirBeginning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, p, f := eventPool(Options{})
		go s.Run(t.Context())
		conversation, known, prompt := long(12, 0, 1), long(8, 0, 1), prefixindex.TokenPrompt{IDs: ids(256, 0)}
		hit := func() int {
			var v View
			s.View(p, conversation, &v)
			tokens := p.KnownTokens(conversation)
			require.Equal(t, 8, tokens.TextBlocks)
			p.DropGuesses(conversation, tokens.TextBlocks, &v)
			p.TokenHits(tokens.Blocks(16), 16, 384, len(conversation), &v)
			return v.Endpoints[0].Hit
		}
		s.Routed(p, p.Endpoints()[0], conversation)
		s.LearnTokens(p, text(known, 8*512), &prompt)
		e := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Root: prefixindex.TokenRoot("", 16), BlockSize: 16}
		h := e.Root
		for i, b := range prompt.Blocks(nil, 16) {
			e.Keys, e.Blocks = append(e.Keys, uint64(i+100)), append(e.Blocks, unchain(h, b))
			h = b
		}
		f.Apply([]prefixindex.BlockEvent{e})
		<-time.After(40 * time.Second)
		require.Equal(t, 12, hit(), "it holds all that is known")
		f.Apply([]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: e.Keys[10:]}})
		require.Equal(t, 5, hit(), "10 of 24 token blocks are 5 of 12 text blocks")
		f.Apply([]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: e.Keys}})
		require.Zero(t, hit(), "it has evicted the conversation")
		s.Routed(p, p.Endpoints()[0], conversation)
		require.Equal(t, 12, hit(), "it is on its way there")
	})
}

// Of what an engine reported, the blocks outside GPU memory count in the hit and as loads. A prompt that was routed to it
// moments ago will be in GPU memory.
func TestTokenHitsKnowTiersWithoutAllocation(t *testing.T) {
	s, p, f := eventPool(Options{})
	e := p.Endpoints()[0]
	text := long(10, 0, 1) // text blocks, of two token blocks each
	hashes, event := []uint64(nil), prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Root: prefixindex.TokenRoot("", 16), BlockSize: 16}
	h := event.Root
	for i := range uint64(20) {
		h = prefixindex.ChainTokenBlock(h, i)
		hashes, event.Keys, event.Blocks = append(hashes, h), append(event.Keys, 100+i), append(event.Blocks, i)
	}
	copied := func(from int, tier prefixindex.Tier) prefixindex.BlockEvent {
		return prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: event.Keys[from:], Tier: tier}
	}
	gone := func(from int, tier prefixindex.Tier) prefixindex.BlockEvent {
		return prefixindex.BlockEvent{Kind: prefixindex.BlocksRemoved, Keys: event.Keys[from:], Tier: tier}
	}
	var v View
	held := func(routed int) HeldBlocks {
		s.View(p, nil, &v)
		v.Endpoints[0].Hit = routed
		p.TokenHits(hashes, 16, 20*16, len(text), &v)
		return v.Endpoints[0].HeldBlocks()
	}
	f.Apply([]prefixindex.BlockEvent{event})
	require.Equal(t, HeldBlocks{Hit: 10}, held(0))
	f.Apply([]prefixindex.BlockEvent{copied(0, prefixindex.TierCPU), gone(12, prefixindex.TierGPU)})
	require.Equal(t, HeldBlocks{10, Loads{4}}, held(0))
	require.Equal(t, HeldBlocks{11, Loads{4}}, held(11), "all but a part of a block of what was routed to it moments ago")
	require.Equal(t, HeldBlocks{Hit: 12}, held(12), "not all of it")
	f.Apply([]prefixindex.BlockEvent{copied(0, prefixindex.TierRemote), gone(16, prefixindex.TierCPU)})
	require.Equal(t, HeldBlocks{10, Loads{2, 0, 2}}, held(0))
	f.Apply([]prefixindex.BlockEvent{gone(0, prefixindex.TierRemote)})
	require.Equal(t, HeldBlocks{8, Loads{2}}, held(0), "removed everywhere")
	f.Apply([]prefixindex.BlockEvent{gone(0, prefixindex.TierGPU)})
	require.Equal(t, HeldBlocks{8, Loads{8}}, held(0))

	s.View(p, text, &v)
	v.Endpoints[0].SetHeld(HeldBlocks{10, Loads{4}})
	p.DropGuesses(nil, 10, &v)
	require.Zero(t, v.Endpoints[0].HeldBlocks())
	require.Same(t, e, v.Endpoints[0].Endpoint)
	budget.Allocs(t, 100, 0, func() { p.TokenHits(hashes, 16, 20*16, len(text), &v) })
}
