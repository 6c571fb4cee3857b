package kvevents

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
)

func from1(n, first int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = uint32(first + i)
	}
	return ids
}

// Vectors computed with vLLM 0.33.0's own hashing.py.
func TestVLLMHash(t *testing.T) {
	for _, c := range []struct {
		h            VLLMHash
		root, h1, h2 string
		k1, k2       uint64
	}{
		{VLLMHash{true, "0"}, "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e", "202da172482d928bbc42ab25b0151e2b895f13f41002e27b2ceabcfae6d332ea",
			"4a0a393805c6d2f0ed831000d41bb65980336c4c04895d5e26470bbec927f5bf", 3236607068019569386, 2758186210834249151},
		{VLLMHash{true, "vllm-none-hash"}, "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0", "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
			"2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf", 8866452693264111234, 807986237951177663},
		{VLLMHash{false, "0"}, "1973e23848344dc43a988a9b478663803cfffe1243480253f9a3cf004b14aa7c", "bea72b7d33de03c1aa715efbb492d0e0d3801f00c1f985756896072ae8b31325",
			"2744667f6645310ff670b0c5d7c64987ffa5940de5a549f17d92dcbb5b559e31", 7536218907325174565, 9048537298590080561},
		{VLLMHash{false, "vllm-none-hash"}, "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198", "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",
			"8e717becdc2054b7a3223b7b844f462c0db0ac86287b752b16d077ad0843c577", 1403909460543360175, 1643945449041937783},
	} {
		root := c.h.Root()
		h1 := c.h.Block(root, from1(16, 1), nil)
		h2 := c.h.Block(h1, from1(16, 17), nil)
		require.Equal(t, c.root, hex.EncodeToString(root[:]))
		require.Equal(t, c.h1, hex.EncodeToString(h1[:]))
		require.Equal(t, c.h2, hex.EncodeToString(h2[:]))
		require.Equal(t, []uint64{c.k1, c.k2}, []uint64{VLLMKey(h1), VLLMKey(h2)})
	}
	h := VLLMHash{true, "0"}
	for want, extra := range map[string][]byte{
		"514cf49bf0682b25752c8c2fae9a8206702d014068c8f86fc50567c71fbe22e8": append([]byte{0x81, 0x66}, "salt-1"...),
		"19ea00490951a1f0ce25d3ed16065b46cf758da30a7b0dd4faea257191d712fa": CBORStrings("cache_salt", "salt-1"),
		"07df9ef1b6800860b8c8d385e23a8a5b0eba8e3b5390de25d657793dd7c611fd": append([]byte{0x81, 0x67}, "my-lora"...),
		"41515ea0e1fbfecdfa49d3e7ad23ecfa25cb5bf5d91fddf405b550c9678fc39a": CBORStrings("lora", "my-lora", "/adapters/my-lora"),
	} {
		got := h.Block(h.Root(), from1(16, 1), extra)
		require.Equal(t, want, hex.EncodeToString(got[:]))
	}
	mixed := h.Block(h.Root(), []uint32{23, 24, 255, 256, 65535, 65536, 128000, 0, 1, 2, 3, 4, 5, 6, 7, 8}, nil)
	require.Equal(t, "129e0dd7f007cf99cce29738bbe471f5a2eed2dec7699aba1973b709d48ba103", hex.EncodeToString(mixed[:]))
	long := h.Block(h.Root(), from1(64, 1), nil)
	require.Equal(t, "92a056d1dd9aba6214118499ff4739c08aff20498fff20bb13b7ebe0afeef270", hex.EncodeToString(long[:]))
}

func TestSGLangHash(t *testing.T) {
	first := SGLangHash(nil, from1(16, 1))
	require.Equal(t, int64(8635429971592222890), SGLangKey(first))
	require.Equal(t, int64(1256577331724852459), SGLangKey(SGLangHash(first[:], from1(16, 17))))
	require.Equal(t, int64(-3488128144981237669), SGLangKey(SGLangHash(nil, from1(4, 1))))
}
