package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// The bounds of what a peer may send. What engines push is some hundred bytes.
const (
	MaxMessage = 64 << 10 // bytes of one message, all frames together
	maxFrames  = 8        // of one message
)

const (
	greetingLen = 64

	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Greeting: signature (0xFF, padding, 0x7F), version 3.0, mechanism, as-server, filler. 3.0 is understood by all of 3.x.
func greeting() []byte {
	g := make([]byte, greetingLen)
	g[0], g[9], g[10] = 0xFF, 0x7F, 3
	copy(g[12:], "NULL")
	return g
}

func checkGreeting(g []byte) error {
	switch {
	case g[0] != 0xFF || g[9] != 0x7F:
		return errors.New("not a ZMTP greeting")
	case g[10] < 3:
		return fmt.Errorf("ZMTP %d is too old", g[10])
	case !bytes.Equal(g[12:32], append([]byte("NULL"), make([]byte, 16)...)):
		return fmt.Errorf("mechanism %.20q is not NULL", bytes.TrimRight(g[12:32], "\x00"))
	}
	return nil
}

// frame is one frame as it stands on the wire.
type frame struct {
	flags byte
	body  []byte
}

// readFrame reads a frame of at most limit bytes. Nothing is allocated for a length before it was checked.
func readFrame(r io.Reader, limit int) (frame, error) {
	var head [9]byte
	if _, err := io.ReadFull(r, head[:2]); err != nil {
		return frame{}, err
	}
	f := frame{flags: head[0]}
	size := uint64(head[1])
	if f.flags&flagLong != 0 {
		if _, err := io.ReadFull(r, head[2:]); err != nil {
			return frame{}, err
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if f.flags&^(flagMore|flagLong|flagCommand) != 0 {
		return frame{}, fmt.Errorf("frame flags %#x", f.flags)
	}
	if size > uint64(limit) {
		return frame{}, fmt.Errorf("a frame of %d bytes, more than %d", size, limit)
	}
	f.body = make([]byte, size)
	_, err := io.ReadFull(r, f.body)
	return f, err
}

// newCommand is a short command frame.
func newCommand(name string, data []byte) []byte {
	f := append([]byte{flagCommand, byte(1 + len(name) + len(data)), byte(len(name))}, name...)
	return append(f, data...)
}

// command splits a command into its name and data.
func command(body []byte) (name string, data []byte, err error) {
	if len(body) == 0 || len(body) < 1+int(body[0]) {
		return "", nil, errors.New("a command without a name")
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:], nil
}

// property finds a property in the metadata of a READY command; names are matched without regard to case.
func property(data []byte, name string) ([]byte, error) {
	for len(data) > 0 {
		n := 1 + int(data[0])
		if len(data) < n+4 {
			return nil, errors.New("metadata is cut off")
		}
		key, size := data[1:n], uint64(binary.BigEndian.Uint32(data[n:]))
		data = data[n+4:]
		if size > uint64(len(data)) {
			return nil, errors.New("metadata is cut off")
		}
		if bytes.EqualFold(key, []byte(name)) {
			return slices.Clone(data[:size]), nil
		}
		data = data[size:]
	}
	return nil, nil
}

func appendProperty(dst []byte, name, value string) []byte {
	dst = append(append(dst, byte(len(name))), name...)
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(value)))
	return append(dst, value...)
}
