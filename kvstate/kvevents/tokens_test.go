package kvevents

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/prefixindex"
)

// slowTokens is cursor.tokens in its simplest form.
func slowTokens(c *cursor) (ids []byte) {
	for n := c.array(); n > 0 && !c.bad; n-- {
		id := c.integer()
		c.bad = c.bad || id > math.MaxUint32
		ids = binary.LittleEndian.AppendUint32(ids, uint32(id))
	}
	return ids
}

// Token ids in every form that MessagePack has for numbers, cut short or not, and with what is no token id among them.
func TestTokensAgainstTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 5))
	good := 0
	for range 20_000 {
		n := r.IntN(24)
		payload := append([]byte{0xdc}, be(uint64(n), 2)...)
		for range n {
			switch r.IntN(40) {
			case 0:
				payload = append(payload, 0xcf, 0, 0, 0, 0, 1, 2, 3, 4)
			case 1:
				payload = append(payload, 0xd2, 0, 1, 2, 3)
			case 2:
				payload = append(payload, byte(r.Uint32())) // anything
			default:
				payload = append(payload, compact{int(r.Uint64() >> (32 + r.IntN(32)))}.pack()[3:]...)
			}
		}
		payload = append(payload, make([]byte, r.IntN(10))...)
		if r.IntN(8) == 0 {
			payload = payload[:r.IntN(len(payload)+1)]
		}
		want, got := cursor{b: payload}, cursor{b: payload}
		slow, fast := slowTokens(&want), got.tokens(nil)
		require.Equal(t, want.bad, got.bad, "%x", payload)
		if !want.bad {
			good++
			require.Equal(t, want.at, got.at, "%x", payload)
			require.Equal(t, string(slow), string(fast), "%x", payload)
		}
	}
	require.Greater(t, good, 5000)
}

// Fields of a map may come in any order, the event's type too.
func TestTokensBeforeTheirType(t *testing.T) {
	var d Decoder
	events := decode(t, &d,
		fields{"token_ids", []any{1, 2, 3, 4}, "block_size", 4, "type", "BlockStored", "block_hashes", []any{7}},
		fields{"block_hashes", []any{8}, "block_size", 4, "type", "BlockStored"}) // and the tokens of one are not the next one's
	require.Equal(t, block1234(), events[0].Blocks)
	require.Equal(t, prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: []uint64{8}, BlockSize: 4}, events[1])
}
