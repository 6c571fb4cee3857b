package kvevents

import (
	"crypto/sha256"
	"encoding/binary"
)

// What vLLM and SGLang call their blocks, computed from token ids.

// VLLMHash is how a vLLM server chains its blocks (vllm/v1/core/kv_cache_utils.py, vllm/utils/hashing.py; 0.10.2 on).
type VLLMHash struct {
	CBOR bool   // --prefix-caching-hash-algo sha256_cbor; false: sha256, which is the default, over Python's pickle
	Seed string // PYTHONHASHSEED; from 0.29 on "vllm-none-hash" where that is not set, before a random number
}

// Root is what a prompt's first block is chained to.
func (h VLLMHash) Root() [32]byte {
	if h.CBOR {
		return sha256.Sum256(append(cborHead(nil, 3, uint64(len(h.Seed))), h.Seed...))
	}
	body := append([]byte{0x8c, byte(len(h.Seed))}, h.Seed...)
	return sha256.Sum256(pickle(append(body, 0x94, '.')))
}

// Block is the hash of a block of more than three tokens after the one with hash parent. extra are its extra keys as CBOR,
// nil for none; with pickle there may be none.
func (h VLLMHash) Block(parent [32]byte, ids []uint32, extra []byte) [32]byte {
	if h.CBOR {
		return sha256.Sum256(cborBlock(parent, ids, extra))
	}
	body := append([]byte{'C', 32}, parent[:]...)
	body = append(body, 0x94, '(')
	for _, id := range ids {
		switch {
		case id < 1<<8:
			body = append(body, 'K', byte(id))
		case id < 1<<16:
			body = append(body, 'M', byte(id), byte(id>>8))
		default:
			body = binary.LittleEndian.AppendUint32(append(body, 'J'), id)
		}
	}
	return sha256.Sum256(pickle(append(body, 't', 0x94, 'N', 0x87, 0x94, '.')))
}

// pickle puts Python's protocol 5 frame around a pickle.
func pickle(body []byte) []byte {
	return append(binary.LittleEndian.AppendUint64([]byte{0x80, 5, 0x95}, uint64(len(body))), body...)
}

func cborBlock(parent [32]byte, ids []uint32, extra []byte) []byte {
	b := append([]byte{0x83, 0x58, 32}, parent[:]...)
	b = cborHead(b, 4, uint64(len(ids)))
	for _, id := range ids {
		b = cborHead(b, 0, uint64(id))
	}
	if extra == nil {
		return append(b, 0xf6)
	}
	return append(b, extra...)
}

// cborHead appends the head of a CBOR item in its shortest form.
func cborHead(b []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, major<<5|byte(n))
	case n < 1<<8:
		return append(b, major<<5|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major<<5|25), uint16(n))
	case n < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, major<<5|26), uint32(n))
	}
	return binary.BigEndian.AppendUint64(append(b, major<<5|27), n)
}

// CBORStrings is an extra key made of strings, as vLLM 0.31 on tags them: ("cache_salt", salt). Several of them, or numbers,
// do not occur in what we compute.
func CBORStrings(parts ...string) []byte {
	b := cborHead([]byte{0x81}, 4, uint64(len(parts)))
	for _, s := range parts {
		b = append(cborHead(b, 3, uint64(len(s))), s...)
	}
	return b
}

// VLLMKey is what events call a block: the digest's last eight bytes as a big-endian number.
func VLLMKey(digest [32]byte) uint64 { return binary.BigEndian.Uint64(digest[24:]) }

// SGLangHash is the hash of a page after the one with hash parent, nil for the first (SGLang 0.5.10 on), and SGLangKey what
// events call it: its first eight bytes, as a number with a sign.
func SGLangHash(parent []byte, ids []uint32) [32]byte {
	b := append([]byte(nil), parent...)
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return sha256.Sum256(b)
}

// SGLangKey is what events call a page.
func SGLangKey(digest [32]byte) int64 { return int64(binary.BigEndian.Uint64(digest[:8])) }
