package engine

import (
	"encoding/binary"
	"math/bits"
	"slices"
)

// TokenBytes is the length of a token: its id is those bytes as a little-endian number. Every piece of a prompt (a
// role, a message, a tool list) starts a new token, so that a growing conversation keeps its tokens; a remainder of
// less than four bytes is one shorter token. Ids are reversible, and no vocabulary is needed.
const TokenBytes = 4

// shortMark marks the id of a token of n < 4 bytes: 0xF8 and above never begin a UTF-8 character, so these ids cannot
// collide with those of four-byte tokens.
const shortMark = 0xF8

// TokenID returns the id of a token of at most four bytes.
func TokenID(b []byte) uint32 {
	if len(b) >= TokenBytes {
		return binary.LittleEndian.Uint32(b)
	}
	id := uint32(shortMark+len(b)) << 24
	for i, c := range b {
		id |= uint32(c) << (8 * i)
	}
	return id
}

// AppendToken appends the text of a token.
func AppendToken(dst []byte, id uint32) []byte {
	if mark := id >> 24; mark > shortMark && mark < shortMark+TokenBytes {
		for i := range mark - shortMark {
			dst = append(dst, byte(id>>(8*i)))
		}
		return dst
	}
	return binary.LittleEndian.AppendUint32(dst, id)
}

// Prompt is a token sequence reduced to the data that an engine needs: the content of each KV block it fills, as a
// hash over every token from the start up to the end of that block.
type Prompt struct {
	N        int      // tokens
	Full     []uint64 // content of each full block
	tail     uint64   // content of the last, partly filled block; 0 if the last block is full
	salt     uint64   // of the cache keys only: KV itself does not depend on it
	Ids      []uint32 // only if requested
	saltText string   // of salt
	Digest   uint64   // of the whole sequence; the answer is a function of it
	open     []byte   // the tokens of the partly filled block
}

// BlocksFor returns the number of blocks that n tokens occupy.
func BlocksFor(n, blockSize int) int { return (n + blockSize - 1) / blockSize }

// Content returns the content of block i of the prompt.
func (p *Prompt) Content(i int) uint64 {
	if i < len(p.Full) {
		return p.Full[i]
	}
	return p.tail
}

// key returns the cache key of full block i.
func (p *Prompt) key(i int) uint64 { return max(p.Full[i]^p.salt, 1) }

// Tokenizer turns text into tokens and tokens into block contents. It lists the tokens only if requested: text of
// four-byte tokens is already the byte form of its ids.
type Tokenizer struct {
	blockBytes int
	keep       bool // list the ids too
	open       []byte
	chain      uint64
	p          Prompt
}

const chainSeed = 0x9E3779B97F4A7C15

// NewTokenizer returns a tokenizer for blocks of blockSize tokens. keep lists the ids too.
func NewTokenizer(blockSize int, keep bool) *Tokenizer {
	return &Tokenizer{blockBytes: blockSize * TokenBytes, keep: keep, chain: chainSeed}
}

// resume continues a prompt's sequence, for the tokens that are generated after it.
func resume(p *Prompt, blockSize int) *Tokenizer {
	t := NewTokenizer(blockSize, p.Ids != nil)
	t.p.Full, t.p.Ids, t.p.saltText = slices.Clip(p.Full), slices.Clip(p.Ids), p.saltText
	if len(p.Full) > 0 {
		t.chain = p.Full[len(p.Full)-1]
	}
	t.open = append(t.open, p.open...)
	t.p.N = p.N
	t.p.salt = p.salt
	return t
}

// Piece adds one piece of text.
func (t *Tokenizer) Piece(b []byte) {
	even := len(b) &^ (TokenBytes - 1)
	if t.keep {
		for i := 0; i < even; i += TokenBytes {
			t.p.Ids = append(t.p.Ids, binary.LittleEndian.Uint32(b[i:]))
		}
	}
	t.p.N += even / TokenBytes
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
		t.token(TokenID(b[even:]))
	}
}

// token adds one token by its id.
func (t *Tokenizer) token(id uint32) {
	if t.keep {
		t.p.Ids = append(t.p.Ids, id)
	}
	t.p.N++
	t.open = binary.LittleEndian.AppendUint32(t.open, id)
	t.closeFull()
}

func (t *Tokenizer) closeFull() {
	if len(t.open) == t.blockBytes {
		t.push(t.open)
		t.open = t.open[:0]
	}
}

func (t *Tokenizer) push(block []byte) {
	t.chain = hashBlock(t.chain, block)
	t.p.Full = append(t.p.Full, t.chain)
}

// Finish closes the sequence; salt enters the cache keys (cache_salt of the request).
func (t *Tokenizer) Finish(salt string) *Prompt {
	t.p.Digest = t.digest()
	if salt != "" {
		t.p.salt, t.p.saltText = hashString(salt), salt
	}
	t.p.open = t.open
	return &t.p
}

// digest returns the digest of the sequence so far.
func (t *Tokenizer) digest() uint64 {
	if t.p.tail = 0; len(t.open) > 0 {
		t.p.tail = hashBlock(t.chain, t.open)
	}
	return Mix(t.chain^k2, t.p.tail^uint64(t.p.N)^K1)
}

// K0, K1 and K2 are odd constants of wyhash, for Mix.
const (
	K0 = 0xA0761D6478BD642F
	K1 = 0xE7037ED1A0B428DB
	k2 = 0x8EBC6AF09C88C6E3
)

// Mix returns the 128-bit multiply-and-fold of wyhash: fast, well mixed, and the same on every machine, which
// hash/maphash is not. P and D must agree.
func Mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}

// hashBlock returns the content of a block whose predecessor's content is chain. It is never 0, which means "unknown".
func hashBlock(chain uint64, b []byte) uint64 {
	h := chain ^ K0 ^ uint64(len(b))
	for len(b) >= 16 {
		h = Mix(binary.LittleEndian.Uint64(b)^K1, binary.LittleEndian.Uint64(b[8:])^h)
		b = b[16:]
	}
	var last [16]byte
	copy(last[:], b)
	h = Mix(binary.LittleEndian.Uint64(last[:])^k2, binary.LittleEndian.Uint64(last[8:])^h)
	return max(h, 1)
}

func hashString(s string) uint64 { return hashBlock(k2, []byte(s)) }

// Tokens adds tokens by their ids.
func (t *Tokenizer) Tokens(ids []uint32) {
	for _, id := range ids {
		t.token(id)
	}
}

// Expect allocates memory for a prompt of that many bytes.
func (t *Tokenizer) Expect(bytes int) { t.p.Full = make([]uint64, 0, bytes/t.blockBytes+1) }
