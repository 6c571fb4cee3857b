// Package decode decodes entries of the streams in which replicas publish to each other, without an allocation for what
// each request's entry has.
package decode

import (
	"encoding/binary"
	"errors"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	statev1 "tandem/protos/state/v1"
)

// Reader decodes entries into memory that it uses again. Addresses, blocks and loads cost no allocation; rarer fields
// are decoded by the protobuf library. One goroutine uses it. The zero value is ready.
type Reader struct {
	batch        statev1.Batch
	text         []byte // the entry
	rest         []byte // its other fields
	restOfBlocks []byte
	addresses    map[string]string // decoded before
	loads        []*statev1.Load   // to be used again
	blocks       []*statev1.Blocks
}

// Numbers of the fields of statev1.Batch that are decoded here.
const (
	addressesField = 8
	blocksField    = 9
	loadsField     = 10

	hashesField = 3 // of statev1.Blocks
	alsoField   = 5
)

// Bounds of the memory that a reader keeps.
const (
	maxKeptEntry     = 1 << 20 // bytes
	maxKeptAddresses = 1 << 14
	maxKeptAddress   = 256 // bytes of one: a longer one is no endpoint's
)

var (
	errNotText = errors.New("an address is not UTF-8")
	errCutOff  = errors.New("a hash is cut off")
)

// Read decodes an entry. The batch is valid until the next call, except its strings.
func (r *Reader) Read(text string) (*statev1.Batch, error) {
	if cap(r.text) > maxKeptEntry || len(r.addresses) > maxKeptAddresses {
		*r = Reader{}
	}
	r.text, r.rest = append(r.text[:0], text...), r.rest[:0]
	b := &r.batch
	addresses, blocks, loads := b.Addresses[:0], b.Blocks[:0], b.Loads[:0]
	proto.Reset(b)
	b.Addresses, b.Blocks, b.Loads = addresses, blocks, loads
	rest, err := split(r.text, r.rest, r.add)
	r.rest = rest
	if err != nil {
		return nil, err
	}
	return b, proto.UnmarshalOptions{Merge: true}.Unmarshal(rest, b)
}

// split calls take for the fields of a message that have a length, and appends to rest those that it does not take,
// and all others.
func split(message, rest []byte, take func(number protowire.Number, value []byte) (bool, error)) ([]byte, error) {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return rest, protowire.ParseError(n)
		}
		size := protowire.ConsumeFieldValue(number, kind, message[n:])
		if size < 0 {
			return rest, protowire.ParseError(size)
		}
		taken := false
		if kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(message[n:])
			var err error
			if taken, err = take(number, value); err != nil {
				return rest, err
			}
		}
		if !taken {
			rest = append(rest, message[:n+size]...)
		}
		message = message[n+size:]
	}
	return rest, nil
}

// add takes an address, the blocks of a prompt, or a load.
func (r *Reader) add(number protowire.Number, value []byte) (taken bool, err error) {
	b := &r.batch
	switch number {
	case addressesField:
		addr, err := r.address(value)
		b.Addresses = append(b.Addresses, addr)
		return true, err
	case blocksField:
		at := len(b.Blocks)
		if at == len(r.blocks) {
			r.blocks = append(r.blocks, &statev1.Blocks{})
		}
		b.Blocks = append(b.Blocks, r.blocks[at])
		return true, r.readBlocks(r.blocks[at], value)
	case loadsField:
		at := len(b.Loads)
		if at == len(r.loads) {
			r.loads = append(r.loads, &statev1.Load{})
		}
		b.Loads = append(b.Loads, r.loads[at])
		return true, proto.UnmarshalOptions{}.Unmarshal(value, r.loads[at])
	}
	return false, nil
}

// readBlocks decodes the blocks of a prompt. The protobuf library allocates every list of numbers anew.
func (r *Reader) readBlocks(to *statev1.Blocks, message []byte) error {
	hashes, also := to.Hashes[:0], to.Also[:0]
	rest, err := split(message, r.restOfBlocks[:0], func(number protowire.Number, value []byte) (bool, error) {
		switch number {
		case hashesField:
			for ; len(value) >= 8; value = value[8:] {
				hashes = append(hashes, binary.LittleEndian.Uint64(value))
			}
		case alsoField:
			for len(value) > 0 {
				v, n := protowire.ConsumeVarint(value)
				if n < 0 {
					return true, protowire.ParseError(n)
				}
				also, value = append(also, uint32(v)), value[n:]
			}
		default:
			return false, nil
		}
		if len(value) > 0 {
			return true, errCutOff
		}
		return true, nil
	})
	r.restOfBlocks = rest
	if err != nil {
		return err
	}
	proto.Reset(to)
	to.Hashes, to.Also = hashes, also
	return proto.UnmarshalOptions{Merge: true}.Unmarshal(rest, to)
}

func (r *Reader) address(value []byte) (string, error) {
	if addr, ok := r.addresses[string(value)]; ok {
		return addr, nil
	}
	if !utf8.Valid(value) {
		return "", errNotText
	}
	if r.addresses == nil {
		r.addresses = map[string]string{}
	}
	addr := string(value)
	if len(addr) <= maxKeptAddress {
		r.addresses[addr] = addr
	}
	return addr, nil
}
