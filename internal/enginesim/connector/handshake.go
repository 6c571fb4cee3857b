package connector

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"net"
	"slices"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

// The side channel of a NIXL engine is a ZeroMQ ROUTER that answers get_meta_msg with the engine's metadata and, from
// 0.26 on, its clock (0.32.0, nixl/base_scheduler.py:340-378). Routers ask it, simulators do not: the same port has
// both, told apart by a connection's first bytes. This is as much of ZMTP 3.0 (rfc.zeromq.org/spec/23) as one question
// takes.

// zeroMQ is how the greeting of ZMTP begins. A frame of the simulators has their opcode, never 0, in place of the last.
var zeroMQ = []byte{0xff, 0, 0, 0, 0}

// isZeroMQ reports whether a connection begins as ZeroMQ's do. Every frame of the simulators is longer than this.
func isZeroMQ(in *bufio.Reader) bool {
	first, _ := in.Peek(len(zeroMQ))
	return slices.Equal(first, zeroMQ)
}

const (
	greetingBytes = 64
	flagMore      = 1
	flagCommand   = 4
	maxQuestion   = 255 // bytes of a frame
)

// handshakes are what a side channel answers them with.
type handshakes struct {
	engineID    string
	clock       func() time.Duration
	unreachable func() bool
}

// answer answers get_meta_msg until the connection closes or brings something else.
func (h handshakes) answer(conn net.Conn, in *bufio.Reader) error {
	greeting := make([]byte, greetingBytes) // of version 3.0, without security
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	ready := append([]byte("\x05READY\x0bSocket-Type\x00\x00\x00\x06"), "ROUTER"...)
	if _, err := conn.Write(appendFrame(greeting, flagCommand, ready)); err != nil {
		return err
	}
	if _, err := in.Discard(greetingBytes); err != nil {
		return err
	}
	for before := []byte("-"); ; {
		flags, body, err := readFrame(in)
		if err != nil || h.unreachable() {
			return err
		}
		if flags&flagCommand == 0 && flags&flagMore == 0 { // a REQ sends an empty frame, then the question
			var asked []any
			err := msgpack.Unmarshal(body, &asked)
			if err != nil || len(before) > 0 || len(asked) != 3 || !isMetaMessage(asked[0]) {
				return fmt.Errorf("a side channel was asked %q", body)
			}
			if err := h.tell(conn); err != nil {
				return err
			}
		}
		before = body
	}
}

func isMetaMessage(name any) bool {
	b, ok := name.([]byte)
	return ok && string(b) == "get_meta_msg"
}

func (h handshakes) tell(conn net.Conn) error {
	agent, err := msgpack.Marshal(map[string]any{"engine_id": h.engineID})
	if err != nil {
		return err
	}
	metadata, err := msgpack.Marshal(map[string]any{"agent_metadata_bytes": agent})
	if err != nil {
		return err
	}
	clock := binary.BigEndian.AppendUint64([]byte{0xcb}, math.Float64bits(h.clock().Seconds()))
	_, err = conn.Write(appendFrame(appendFrame(appendFrame(nil, flagMore, nil), flagMore, metadata), 0, clock))
	return err
}

// appendFrame appends a frame of at most 255 bytes.
func appendFrame(dst []byte, flags byte, body []byte) []byte {
	return append(append(dst, flags, byte(len(body))), body...)
}

// readFrame reads such a frame.
func readFrame(in *bufio.Reader) (flags byte, body []byte, err error) {
	var head [2]byte
	if _, err = io.ReadFull(in, head[:]); err != nil {
		return 0, nil, err
	}
	if flags = head[0]; flags&^(flagMore|flagCommand) != 0 {
		return 0, nil, fmt.Errorf("a frame of more than %d bytes, or of another kind: %x", maxQuestion, head)
	}
	body = make([]byte, head[1])
	_, err = io.ReadFull(in, body)
	return flags, body, err
}
