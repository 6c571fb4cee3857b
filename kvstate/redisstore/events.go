package redisstore

import (
	"encoding/binary"
	"errors"

	"tandem/kvstate/prefixindex"
)

// KV events as they are told: runs of blocks, packed. A block that is stored takes 16 bytes, the engine's name of it and its
// content's hash, from which each replica makes our hash; one that is removed takes 8. Both are hashes: nothing shorter says
// as much. Around them:
//
//	head     1 byte: what happened, and the flags below
//	blocks   uvarint
//	size     uvarint, tokens in a block; stored, unless it is as in the run before
//	adapter  uvarint and so many bytes; with flagLoRA
//	parent   8 bytes; with flagParent. With flagGoesOn it is the last block of the run before that stored something
//	names    8 bytes each
//	contents 8 bytes each; stored, unless with flagCopied
const (
	runStored  = 1
	runRemoved = 2
	runCleared = 3
	runKind    = 3

	flagHost   = 1 << 2
	flagParent = 1 << 3
	flagGoesOn = 1 << 4
	flagCopied = 1 << 5
	flagLoRA   = 1 << 6
	flagSize   = 1 << 7 // as in the run before
)

// appendEvents appends events, packed.
func appendEvents(dst []byte, events []prefixindex.BlockEvent) []byte {
	size, last, goesOn := -1, uint64(0), false
	for i := range events {
		e := &events[i]
		head := byte(e.Kind)
		if e.Host {
			head |= flagHost
		}
		stored := e.Kind == prefixindex.BlocksStored && len(e.Blocks) == len(e.Keys)
		switch {
		case !stored:
			if e.Kind == prefixindex.BlocksStored {
				head |= flagCopied
			}
			dst = binary.AppendUvarint(append(dst, head), uint64(len(e.Keys)))
		default:
			if e.HasParent && goesOn && e.Parent == last {
				head |= flagGoesOn
			} else if e.HasParent {
				head |= flagParent
			}
			if len(e.LoRA) > 0 {
				head |= flagLoRA
			}
			if e.BlockSize == size {
				head |= flagSize
			}
			dst = binary.AppendUvarint(append(dst, head), uint64(len(e.Keys)))
			if e.BlockSize != size {
				size = e.BlockSize
				dst = binary.AppendUvarint(dst, uint64(size))
			}
			if len(e.LoRA) > 0 {
				dst = append(binary.AppendUvarint(dst, uint64(len(e.LoRA))), e.LoRA...)
			}
			if head&flagParent != 0 {
				dst = binary.LittleEndian.AppendUint64(dst, e.Parent)
			}
			if n := len(e.Keys); n > 0 {
				last, goesOn = e.Keys[n-1], true
			}
		}
		dst = appendWords(dst, e.Keys)
		if stored {
			dst = appendWords(dst, e.Blocks)
		}
	}
	return dst
}

func appendWords(dst []byte, words []uint64) []byte {
	for _, w := range words {
		dst = binary.LittleEndian.AppendUint64(dst, w)
	}
	return dst
}

// eventReader unpacks events into memory that is used again.
type eventReader struct {
	events []prefixindex.BlockEvent
	words  []uint64
	b      []byte
	bad    bool
}

var errPacked = errors.New("redisstore: not packed events")

// maxPackedBlock is more tokens than a block has.
const maxPackedBlock = 1 << 20

// read unpacks events. They are good until the next call.
func (r *eventReader) read(packed []byte) ([]prefixindex.BlockEvent, error) {
	r.events, r.words, r.b, r.bad = r.events[:0], r.words[:0], packed, false
	if need := len(packed) / 8; cap(r.words) < need { // so that it does not move
		r.words = make([]uint64, 0, need)
	}
	size, last := 0, uint64(0)
	for len(r.b) > 0 && !r.bad {
		head := r.b[0]
		r.b = r.b[1:]
		n := r.uvarint(uint64(len(r.b)) / 8)
		e := prefixindex.BlockEvent{Host: head&flagHost != 0}
		switch head & runKind {
		case runStored:
			e.Kind = prefixindex.BlocksStored
			if head&flagCopied == 0 {
				r.stored(&e, head, &size, last)
			}
		case runRemoved:
			e.Kind = prefixindex.BlocksRemoved
		case runCleared:
			e.Kind = prefixindex.AllBlocksCleared
		default:
			r.bad = true
		}
		if head&flagCopied != 0 && n == 0 {
			r.bad = true
		}
		e.Keys = r.take(n)
		if e.Kind == prefixindex.BlocksStored && head&flagCopied == 0 {
			if e.Blocks = r.take(n); n > 0 && !r.bad {
				last = e.Keys[n-1]
			}
		}
		r.events = append(r.events, e)
	}
	if r.bad {
		return nil, errPacked
	}
	return r.events, nil
}

// stored reads what a run of stored blocks has before their names.
func (r *eventReader) stored(e *prefixindex.BlockEvent, head byte, size *int, last uint64) {
	if head&flagSize == 0 {
		*size = int(r.uvarint(maxPackedBlock))
	}
	e.BlockSize = *size
	if head&flagLoRA != 0 {
		e.LoRA = r.bytes(r.uvarint(uint64(len(r.b))))
	}
	if head&flagGoesOn != 0 {
		e.Parent, e.HasParent = last, true
	} else if head&flagParent != 0 {
		if parent := r.bytes(8); parent != nil {
			e.Parent, e.HasParent = binary.LittleEndian.Uint64(parent), true
		}
	}
	e.Root = prefixindex.TokenRoot(string(e.LoRA), e.BlockSize)
}

func (r *eventReader) uvarint(most uint64) uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > most {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *eventReader) bytes(n uint64) []byte {
	if n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	out := r.b[:n:n]
	r.b = r.b[n:]
	return out
}

func (r *eventReader) take(n uint64) []uint64 {
	text := r.bytes(8 * n)
	from := len(r.words)
	for ; len(text) > 0; text = text[8:] {
		r.words = append(r.words, binary.LittleEndian.Uint64(text))
	}
	return r.words[from:]
}
