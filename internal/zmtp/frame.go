package zmtp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

const (
	greetingLen = 64

	// Flags of a frame.
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// Greeting: signature (0xFF, padding, 0x7F), version 3.0, mechanism, as-server, filler. All of 3.x understands 3.0.
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

// newCommand returns a short command frame.
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

// property returns a property of a READY command's metadata; names are case-insensitive.
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
