package kvevents

import (
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/prefixindex"
)

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	require.NoError(t, err)
	return b
}

// The golden batches of three generations of vLLM, made with its own code: tokens 1..4 in a block of four.
const (
	goldenArray = `93cb41d954fc4020000093 9cab426c6f636b53746f72656491cf1122334455667788c0940102030404c0a3475055c0c0c0c0c0
		94ac426c6f636b52656d6f76656491cf1122334455667788a3475055c0 91b0416c6c426c6f636b73436c6561726564 00`
	goldenMap = `93cb41d954fc4020000093 de0008a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf1122334455667788
		b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394 01020304 aa626c6f636b5f73697a6504a76c6f72615f6964c0
		a66d656469756da3475055a96c6f72615f6e616d65c0 83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf
		1122334455667788a66d656469756da3475055 81a474797065b0416c6c426c6f636b73436c6561726564 00`
	golden092 = `93cb41d954fc402000009296ab426c6f636b53746f7265649105c0940102030404c092ac426c6f636b52656d6f7665649105c0`
)

func golden(t testing.TB, s string) []byte {
	return unhex(t, strings.Join(strings.Fields(s), ""))
}

func block1234() []uint64 {
	return []uint64{prefixindex.TokenBlock([]byte{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0}, 0)}
}

func TestDecodeGolden(t *testing.T) {
	stored := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: []uint64{0x1122334455667788}, Blocks: block1234(), Root: prefixindex.TokenRoot("", 4), BlockSize: 4}
	removed := prefixindex.BlockEvent{Kind: prefixindex.BlocksRemoved, Keys: []uint64{0x1122334455667788}}
	cleared := prefixindex.BlockEvent{Kind: prefixindex.AllBlocksCleared}
	for _, text := range []string{goldenArray, goldenMap} {
		var d Decoder
		batch, err := d.Batch(golden(t, text))
		require.NoError(t, err)
		require.Equal(t, Batch{Time: 1700000000.5, Rank: 0, Events: []prefixindex.BlockEvent{stored, removed, cleared}}, batch)
	}
	stored.Keys, removed.Keys = []uint64{5}, []uint64{5}
	var d Decoder
	batch, err := d.Batch(golden(t, golden092))
	require.NoError(t, err)
	require.Equal(t, Batch{Time: 1700000000.5, Rank: -1, Events: []prefixindex.BlockEvent{stored, removed}}, batch)
}

// pack writes MessagePack, as plainly as can be.
func pack(v any) []byte {
	switch v := v.(type) {
	case nil:
		return []byte{0xc0}
	case int:
		if v < 0 {
			return append([]byte{0xd3}, be(uint64(v), 8)...)
		}
		return append([]byte{0xcf}, be(uint64(v), 8)...)
	case uint64:
		return append([]byte{0xcf}, be(v, 8)...)
	case float64:
		return append([]byte{0xcb}, be(math.Float64bits(v), 8)...)
	case string:
		return append(append([]byte{0xdb}, be(uint64(len(v)), 4)...), v...)
	case []byte:
		return append(append([]byte{0xc6}, be(uint64(len(v)), 4)...), v...)
	case []any:
		out := append([]byte{0xdd}, be(uint64(len(v)), 4)...)
		for _, e := range v {
			out = append(out, pack(e)...)
		}
		return out
	case fields:
		out := append([]byte{0xdf}, be(uint64(len(v)/2), 4)...)
		for _, e := range v {
			out = append(out, pack(e)...)
		}
		return out
	case compact:
		return v.pack()
	case []int:
		var all []any
		for _, e := range v {
			all = append(all, e)
		}
		return pack(all)
	}
	panic(fmt.Sprintf("no MessagePack for %T", v))
}

// fields are the keys and values of a map, in order.
type fields []any

func be(v uint64, n int) []byte {
	var out []byte
	for i := n - 1; i >= 0; i-- {
		out = append(out, byte(v>>(8*i)))
	}
	return out
}

func decode(t *testing.T, d *Decoder, events ...any) []prefixindex.BlockEvent {
	t.Helper()
	batch, err := d.Batch(pack([]any{1, events, nil}))
	require.NoError(t, err)
	return append([]prefixindex.BlockEvent(nil), batch.Events...)
}

func TestDecodeVariants(t *testing.T) {
	one := []int{1, 2, 3, 4}
	salted := prefixindex.TokenBlock([]byte{1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0}, prefixindex.FoldExtraKey(0, []byte("salt")))
	stored := func(change func(*prefixindex.BlockEvent)) []prefixindex.BlockEvent {
		e := prefixindex.BlockEvent{Kind: prefixindex.BlocksStored, Keys: []uint64{7}, Blocks: block1234(), Root: prefixindex.TokenRoot("", 4), BlockSize: 4}
		if change != nil {
			change(&e)
		}
		return []prefixindex.BlockEvent{e}
	}
	digest := append(make([]byte, 24), 0, 0, 0, 0, 0, 0, 0, 7)
	for _, c := range []struct {
		name  string
		event any
		want  []prefixindex.BlockEvent
	}{
		{"a digest for a name: its last eight bytes", []any{"BlockStored", []any{digest}, nil, one, 4, nil}, stored(nil)},
		{"negative names, as SGLang has them", []any{"BlockStored", []any{-2}, -3, one, 4, nil},
			stored(func(e *prefixindex.BlockEvent) { e.Keys[0], e.Parent, e.HasParent = 1<<64-2, 1<<64-3, true })},
		{"parent 0 is a parent", []any{"BlockStored", []any{7}, 0, one, 4, nil}, stored(func(e *prefixindex.BlockEvent) { e.HasParent = true })},
		{"more fields than we know", []any{"BlockStored", []any{7}, nil, one, 4, nil, "GPU", nil, nil, nil, nil, nil, 1, "x", []any{fields{"a", 1}}}, stored(nil)},
		{"CPU tier", []any{"BlockStored", []any{7}, nil, one, 4, nil, "CPU"}, stored(func(e *prefixindex.BlockEvent) { e.Tier = prefixindex.TierCPU })},
		{"CPU tier of older releases: names only", []any{"BlockStored", []any{7}, nil, []int{}, 0, nil, "CPU"},
			[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksStored, Keys: []uint64{7}, Tier: prefixindex.TierCPU}}},
		{"SGLang's disk", fields{"type", "BlockRemoved", "block_hashes", []any{7}, "medium", "DISK"},
			[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: []uint64{7}, Tier: prefixindex.TierDisk}}},
		{"SGLang's CPU memory", fields{"type", "BlockRemoved", "block_hashes", []any{7}, "medium", "CPU_PINNED"},
			[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: []uint64{7}, Tier: prefixindex.TierCPU}}},
		{"SGLang's store", fields{"type", "BlockRemoved", "block_hashes", []any{7}, "medium", "EXTERNAL"},
			[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: []uint64{7}, Tier: prefixindex.TierRemote}}},
		{"vLLM's storage", fields{"type", "BlockRemoved", "block_hashes", []any{7}, "medium", "STORAGE"},
			[]prefixindex.BlockEvent{{Kind: prefixindex.BlocksRemoved, Keys: []uint64{7}, Tier: prefixindex.TierDisk}}},
		{"an adapter by name", fields{"type", "BlockStored", "block_hashes", []any{7}, "token_ids", one, "block_size", 4, "lora_id", 3, "lora_name", "sql", "extra_keys", []any{[]any{"sql"}}},
			stored(func(e *prefixindex.BlockEvent) { e.Root, e.LoRA = prefixindex.TokenRoot("sql", 4), []byte("sql") })},
		{"an adapter by number is none that a request can name", []any{"BlockStored", []any{7}, nil, one, 4, 3},
			stored(func(e *prefixindex.BlockEvent) {
				e.Root, e.LoRA = prefixindex.TokenRoot("\x00lora_id 3", 4), []byte("\x00lora_id 3")
			})},
		{"vLLM's cache salt", fields{"block_hashes", []any{7}, "type", "BlockStored", "token_ids", one, "block_size", 4, "extra_keys", []any{[]any{"salt"}}},
			stored(func(e *prefixindex.BlockEvent) { e.Blocks[0] = salted })},
		{"SGLang's cache salt", fields{"type", "BlockStored", "block_hashes", []any{7}, "token_ids", one, "block_size", 4, "cache_salt", "salt"},
			stored(func(e *prefixindex.BlockEvent) { e.Blocks[0] = salted })},
		{"blocks that the tokens do not make up (hybrid models)", []any{"BlockStored", []any{7}, nil, []int{1, 2, 3, 4, 5, 6, 7, 8}, 4, nil}, nil},
		{"a sliding window", fields{"type", "BlockStored", "block_hashes", []any{7}, "token_ids", one, "block_size", 4, "group_idx", 1, "kv_cache_spec_kind", "sliding_window"}, nil},
		{"a kind of event from the future", fields{"type", "BlockMoved", "block_hashes", []any{7}}, nil},
	} {
		var d Decoder
		require.Equal(t, c.want, decode(t, &d, c.event), c.name)
	}
	image := fields{"type", "BlockStored", "block_hashes", []any{7}, "token_ids", one, "block_size", 4, "extra_keys", []any{[]any{[]any{"imgA", 3}}}}
	var d Decoder
	require.NotEqual(t, stored(nil), decode(t, &d, image), "an image is part of the block")
}

// One group of a hybrid model counts: the first that holds whole prefixes.
func TestDecodeGroups(t *testing.T) {
	event := func(kind string, group int, spec string) any {
		return fields{"type", kind, "block_hashes", []any{group + 10}, "token_ids", []int{1, 2, 3, 4}, "block_size", 4, "group_idx", group, "kv_cache_spec_kind", spec}
	}
	var d Decoder
	got := decode(t, &d, event("BlockStored", 0, "sliding_window"), event("BlockStored", 1, "full_attention"), event("BlockStored", 2, "full_attention"),
		fields{"type", "BlockRemoved", "block_hashes", []any{10}, "group_idx", 0}, fields{"type", "BlockRemoved", "block_hashes", []any{11}, "group_idx", 1})
	require.Len(t, got, 2)
	require.Equal(t, []uint64{11}, got[0].Keys)
	require.Equal(t, []uint64{11}, got[1].Keys)
	require.Equal(t, DecoderStats{Events: 5, Ignored: 3}, d.Stats)
}

func TestDecodeMalformed(t *testing.T) {
	for _, text := range []string{"", "c0", "90", "91cb41d954fc40200000", "93cb41d954fc4020000091", "93cb41d954fc402000009190c0", "93cb41d954fc40200000dd7fffffffc0",
		"93cb41d954fc4020000091c1c0", "93c0 9080c0"} {
		var d Decoder
		_, err := d.Batch(unhex(t, text))
		require.ErrorIs(t, err, ErrMalformed, text)
	}
	deep := append(unhex(t, "93cb41d954fc402000009192a178"), []byte(strings.Repeat("\x91", 100)+"\xc0\xc0")...)
	var d Decoder
	_, err := d.Batch(deep)
	require.ErrorIs(t, err, ErrMalformed, "nested too deep")
}

func FuzzDecode(f *testing.F) {
	f.Add(golden(f, goldenArray))
	f.Add(golden(f, goldenMap))
	f.Add(golden(f, golden092))
	f.Add(pack([]any{1, []any{fields{"type", "BlockStored", "block_hashes", []any{7}, "token_ids", []int{1, 2}, "block_size", 1, "extra_keys", []any{[]any{"s", []any{"m", 3}}}}}, 2}))
	f.Fuzz(func(t *testing.T, payload []byte) {
		var d Decoder
		batch, err := d.Batch(payload)
		if err != nil {
			return
		}
		for _, e := range batch.Events {
			if e.Kind == prefixindex.BlocksStored && len(e.Blocks) > 0 {
				require.Len(t, e.Blocks, len(e.Keys))
				require.Positive(t, e.BlockSize)
			}
		}
		again, err := d.Batch(payload)
		require.NoError(t, err)
		require.Len(t, again.Events, len(batch.Events))
	})
}
