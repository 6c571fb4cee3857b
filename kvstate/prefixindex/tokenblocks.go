package prefixindex

import (
	"encoding/binary"
	"math/bits"

	"github.com/cespare/xxhash/v2"
)

// Hashes of token blocks. They are ours: events contain the token ids, so neither the engine's seed nor its hash
// function matters. All replicas of a release compute the same. What separates prompts in an engine is part of the
// hash: the LoRA adapter and the block size from the start, the cache salt and the identity of media in the blocks
// that they belong to.

// TokenRoot returns the hash that the first block of every prompt is chained to. lora is the adapter's name, "" for
// the base model.
func TokenRoot(lora string, blockSize int) uint64 {
	return ChainTokenBlock(uint64(blockSize)*0x9E3779B97F4A7C15, xxhash.Sum64String(lora))
}

// TokenBlock returns the hash of one block by itself: its token ids, four bytes each, little endian, and the engine's
// extra keys of the block, folded with [FoldExtraKey] (0: none).
func TokenBlock(ids []byte, extra uint64) uint64 { return xxhash.Sum64(ids) ^ extra }

// FoldExtraKey adds one of a block's extra keys to those before it: a cache salt, or the identity of an image.
func FoldExtraKey(extra uint64, key []byte) uint64 {
	return bits.RotateLeft64(extra, 17)*0x9E3779B185EBCA87 + xxhash.Sum64(key) | 1
}

// SaltKey returns the extra key of a request's cache_salt in its first block; 0 for none.
func SaltKey(salt string) uint64 {
	if salt == "" {
		return 0
	}
	return FoldExtraKey(0, []byte(salt))
}

// ChainTokenBlock returns the hash of a block and everything before it, from that of the block before and
// [TokenBlock].
func ChainTokenBlock(parent, block uint64) uint64 {
	return (bits.RotateLeft64(parent, 27) ^ block) * 0xff51afd7ed558ccd
}

// TokenPrompt is a prompt as engines see it.
type TokenPrompt struct {
	IDs  []uint32
	LoRA string // the adapter's name, "" for the base model
	Salt uint64 // SaltKey of the request's cache_salt
}

// Blocks appends the hashes of the prompt's full blocks of blockSize tokens to dst.
func (p *TokenPrompt) Blocks(dst []uint64, blockSize int) []uint64 {
	if blockSize <= 0 {
		return dst
	}
	extra := p.Salt
	var room [1024]byte
	bytes, h := room[:0], TokenRoot(p.LoRA, blockSize)
	for ids := p.IDs; len(ids) >= blockSize; ids = ids[blockSize:] {
		bytes = bytes[:0]
		for _, id := range ids[:blockSize] {
			bytes = binary.LittleEndian.AppendUint32(bytes, id)
		}
		h = ChainTokenBlock(h, TokenBlock(bytes, extra))
		dst, extra = append(dst, h), 0
	}
	return dst
}
