package main

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// A token is four bytes of text: its id is those bytes as a little-endian number. Every piece of a prompt (a role, a
// message, a tool list) starts a token of its own, so that a conversation which grows keeps its tokens; the rest of a
// piece that is no multiple of four bytes is one shorter token. Ids are reversible, and no vocabulary is needed.
const tokenBytes = 4

// shortMark makes the id of a token of n < 4 bytes: 0xF8 and above never begin a UTF-8 character, so these ids cannot
// meet those of four-byte tokens.
const shortMark = 0xF8

func tokenID(b []byte) uint32 {
	if len(b) >= tokenBytes {
		return binary.LittleEndian.Uint32(b)
	}
	id := uint32(shortMark+len(b)) << 24
	for i, c := range b {
		id |= uint32(c) << (8 * i)
	}
	return id
}

// appendToken appends the text of a token.
func appendToken(dst []byte, id uint32) []byte {
	if mark := id >> 24; mark > shortMark && mark < shortMark+tokenBytes {
		for i := range mark - shortMark {
			dst = append(dst, byte(id>>(8*i)))
		}
		return dst
	}
	return binary.LittleEndian.AppendUint32(dst, id)
}

// prompt is a token sequence reduced to what an engine needs: the content of each KV block it fills, as a hash over
// every token from the start up to the end of that block.
type prompt struct {
	n        int      // tokens
	full     []uint64 // content of each full block
	tail     uint64   // content of the last, partly filled block; 0 when the prompt fills its last block
	salt     uint64   // of the cache keys only: KV itself does not depend on it
	ids      []uint32 // only when asked for
	saltText string   // of salt
	digest   uint64   // of the whole sequence; what the answer is a function of
	open     []byte   // the tokens of the partly filled block
}

// blocks is the number of blocks that n tokens occupy.
func blocksFor(n, blockSize int) int { return (n + blockSize - 1) / blockSize }

// content is what block i of the prompt holds.
func (p *prompt) content(i int) uint64 {
	if i < len(p.full) {
		return p.full[i]
	}
	return p.tail
}

// key is the cache key of full block i.
func (p *prompt) key(i int) uint64 { return max(p.full[i]^p.salt, 1) }

// tokenizer turns text into tokens and tokens into block contents, without ever listing the tokens unless asked to:
// text of four-byte tokens is already the byte form of its ids.
type tokenizer struct {
	blockBytes int
	keep       bool // list the ids too
	open       []byte
	chain      uint64
	p          prompt
}

const chainSeed = 0x9E3779B97F4A7C15

func newTokenizer(blockSize int, keep bool) *tokenizer {
	return &tokenizer{blockBytes: blockSize * tokenBytes, keep: keep, chain: chainSeed}
}

// resume continues a prompt's sequence, for the tokens that are generated after it.
func resume(p *prompt, blockSize int) *tokenizer {
	t := newTokenizer(blockSize, p.ids != nil)
	t.p.full, t.p.ids, t.p.saltText = slices.Clip(p.full), slices.Clip(p.ids), p.saltText
	if len(p.full) > 0 {
		t.chain = p.full[len(p.full)-1]
	}
	t.open = append(t.open, p.open...)
	t.p.n = p.n
	t.p.salt = p.salt
	return t
}

// piece adds one piece of text.
func (t *tokenizer) piece(b []byte) {
	even := len(b) &^ (tokenBytes - 1)
	if t.keep {
		for i := 0; i < even; i += tokenBytes {
			t.p.ids = append(t.p.ids, binary.LittleEndian.Uint32(b[i:]))
		}
	}
	t.p.n += even / tokenBytes
	rest := b[:even]
	if len(t.open) > 0 {
		n := min(len(rest), t.blockBytes-len(t.open))
		t.open = append(t.open, rest[:n]...)
		rest = rest[n:]
		t.closeFull()
	}
	for len(rest) >= t.blockBytes {
		t.push(rest[:t.blockBytes])
		rest = rest[t.blockBytes:]
	}
	t.open = append(t.open, rest...)
	if even < len(b) {
		t.token(tokenID(b[even:]))
	}
}

// token adds one token by its id.
func (t *tokenizer) token(id uint32) {
	if t.keep {
		t.p.ids = append(t.p.ids, id)
	}
	t.p.n++
	t.open = binary.LittleEndian.AppendUint32(t.open, id)
	t.closeFull()
}

func (t *tokenizer) closeFull() {
	if len(t.open) == t.blockBytes {
		t.push(t.open)
		t.open = t.open[:0]
	}
}

func (t *tokenizer) push(block []byte) {
	t.chain = hashBlock(t.chain, block)
	t.p.full = append(t.p.full, t.chain)
}

// finish closes the sequence; salt enters the cache keys (cache_salt of the request).
func (t *tokenizer) finish(salt string) *prompt {
	if len(t.open) > 0 {
		t.p.tail = hashBlock(t.chain, t.open)
	}
	if salt != "" {
		t.p.salt, t.p.saltText = hashString(salt), salt
	}
	t.p.open = t.open
	t.p.digest = mix(t.chain^k2, t.p.tail^uint64(t.p.n)^k1)
	return &t.p
}

const (
	k0 = 0xA0761D6478BD642F
	k1 = 0xE7037ED1A0B428DB
	k2 = 0x8EBC6AF09C88C6E3
)

// mix is the 128-bit multiply-and-fold of wyhash: fast, well mixed, and the same on every machine, which hash/maphash
// is not. P and D must agree.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// hashBlock is the content of a block whose predecessor's content is chain. Never 0, which means "unknown".
func hashBlock(chain uint64, b []byte) uint64 {
	h := chain ^ k0 ^ uint64(len(b))
	for len(b) >= 16 {
		h = mix(binary.LittleEndian.Uint64(b)^k1, binary.LittleEndian.Uint64(b[8:])^h)
		b = b[16:]
	}
	var last [16]byte
	copy(last[:], b)
	h = mix(binary.LittleEndian.Uint64(last[:])^k2, binary.LittleEndian.Uint64(last[8:])^h)
	return max(h, 1)
}

func hashString(s string) uint64 { return hashBlock(k2, []byte(s)) }
