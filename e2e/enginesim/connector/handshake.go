package connector

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"math"
	"net"
	"slices"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
	"github.com/vmihailenco/msgpack/v5"
)

// The side channel of a NIXL engine is a ZeroMQ ROUTER that answers get_meta_msg with the engine's metadata and, from
// 0.26 on, its clock (0.32.0, nixl/base_scheduler.py:340-378). Routers ask it, simulators do not: the same port has
// both, told apart by a connection's first bytes.

// zeroMQ is how the greeting of ZMTP begins. A frame of the simulators has their opcode, never 0, in place of the last.
var zeroMQ = []byte{0xff, 0, 0, 0, 0}

// isZeroMQ reports whether a connection begins as ZeroMQ's do. Every frame of the simulators is longer than this.
func isZeroMQ(in *bufio.Reader) bool {
	first, _ := in.Peek(len(zeroMQ))
	return slices.Equal(first, zeroMQ)
}

// peeked is a connection whose first bytes were looked at.
type peeked struct {
	net.Conn
	in *bufio.Reader
}

// Read implements [net.Conn].
func (c peeked) Read(b []byte) (int, error) { return c.in.Read(b) }

// handshakes are what a side channel answers them with.
type handshakes struct {
	engineID    string
	clock       func() time.Duration
	unreachable func() bool
}

// answer answers get_meta_msg until the connection closes or brings something else.
func (h handshakes) answer(conn net.Conn, in *bufio.Reader) error {
	peer, err := zmq4.Open(peeked{conn, in}, null.Security(), zmq4.Router, nil, true, nil)
	if err != nil {
		return err
	}
	for {
		asked, err := peer.RecvMsg() // a REQ sends an empty frame, then the question
		if err != nil || h.unreachable() {
			return err
		}
		var question []any
		if len(asked.Frames) != 2 || len(asked.Frames[0]) > 0 || msgpack.Unmarshal(asked.Frames[1], &question) != nil ||
			len(question) != 3 || !isMetaMessage(question[0]) {
			return fmt.Errorf("a side channel was asked %q", asked.Frames)
		}
		if err := h.tell(peer); err != nil {
			return err
		}
	}
}

func isMetaMessage(name any) bool {
	b, ok := name.([]byte)
	return ok && string(b) == "get_meta_msg"
}

func (h handshakes) tell(peer *zmq4.Conn) error {
	agent, err := msgpack.Marshal(map[string]any{"engine_id": h.engineID})
	if err != nil {
		return err
	}
	metadata, err := msgpack.Marshal(map[string]any{"agent_metadata_bytes": agent})
	if err != nil {
		return err
	}
	clock := binary.BigEndian.AppendUint64([]byte{0xcb}, math.Float64bits(h.clock().Seconds()))
	return peer.SendMsg(zmq4.NewMsgFrom(nil, metadata, clock))
}
