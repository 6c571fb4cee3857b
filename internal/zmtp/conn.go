package zmtp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"
)

// Kind is the type of our socket.
type Kind string

// The kinds.
const (
	Sub    Kind = "SUB"
	Dealer Kind = "DEALER"
	Pull   Kind = "PULL"
)

// peers returns the kinds that may be at the other end.
func (k Kind) peers() []string {
	switch k {
	case Sub:
		return []string{"PUB", "XPUB"}
	case Pull:
		return []string{"PUSH"}
	case Dealer:
		return []string{"ROUTER", "DEALER", "REP"}
	}
	return nil
}

const (
	dialTime      = 2 * time.Second
	handshakeTime = 5 * time.Second // for greeting and READY, and for writes
	maxHandshake  = 64 << 10        // bytes of READY
	maxFrames     = 8               // of one message
)

// Conn is one connection after its handshake. Its methods are for one goroutine at a time, except Close.
type Conn struct {
	net    net.Conn
	r      *bufio.Reader
	limit  int // bytes of a message
	buf    []byte
	ends   []int
	frames [][]byte
}

// Open makes the handshake over a network connection, and closes it if that fails. limit bounds the bytes of a
// message, over all its frames.
func Open(ctx context.Context, nc net.Conn, kind Kind, limit int) (*Conn, error) {
	defer context.AfterFunc(ctx, func() { _ = nc.Close() })()
	_ = nc.SetDeadline(time.Now().Add(handshakeTime))
	c := &Conn{net: nc, r: bufio.NewReaderSize(nc, min(limit, 64<<10)), limit: maxHandshake}
	if err := c.exchangeGreetings(kind); err != nil {
		_ = nc.Close()
		return nil, err
	}
	_ = nc.SetDeadline(time.Time{}) // TCP keep-alive detects a dead peer
	c.limit = limit
	return c, nil
}

// Dial connects to a socket that is bound at an address.
func Dial(ctx context.Context, addr string, kind Kind, limit int) (*Conn, error) {
	d := net.Dialer{Timeout: dialTime,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}}
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return Open(ctx, nc, kind, limit)
}

// exchangeGreetings exchanges greetings and READY commands.
func (c *Conn) exchangeGreetings(kind Kind) error {
	ready := newCommand("READY", appendProperty(nil, "Socket-Type", string(kind)))
	if _, err := c.net.Write(append(greeting(), ready...)); err != nil {
		return err
	}
	var peerGreeting [greetingLen]byte
	if _, err := io.ReadFull(c.r, peerGreeting[:]); err != nil {
		return fmt.Errorf("reading a greeting: %w", err)
	}
	if err := checkGreeting(peerGreeting[:]); err != nil {
		return err
	}
	flags, body, err := c.frame()
	if err != nil {
		return fmt.Errorf("reading READY: %w", err)
	}
	name, data, err := command(body)
	if err != nil || flags&flagCommand == 0 || name != "READY" {
		return fmt.Errorf("the first frame is not READY: %w", errors.Join(err))
	}
	peer, err := property(data, "Socket-Type")
	if err != nil {
		return err
	}
	if !slices.Contains(kind.peers(), string(peer)) {
		return fmt.Errorf("a %.20q socket cannot talk to %s", peer, kind)
	}
	c.buf = c.buf[:0]
	return nil
}

// Read reads the next message. Its frames are valid until the next call. PING is answered (ZMTP 3.1, if the peer has
// heartbeats on).
func (c *Conn) Read() ([][]byte, error) {
	c.buf, c.ends, c.frames = c.buf[:0], c.ends[:0], c.frames[:0]
	for {
		from := len(c.buf)
		flags, body, err := c.frame()
		if err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := c.handleCommand(body); err != nil {
				return nil, err
			}
			c.buf = c.buf[:from]
			continue
		}
		c.ends = append(c.ends, len(c.buf))
		if flags&flagMore == 0 {
			break
		}
		if len(c.ends) == maxFrames {
			return nil, fmt.Errorf("a message of more than %d frames", maxFrames)
		}
	}
	from := 0
	for _, end := range c.ends {
		c.frames = append(c.frames, c.buf[from:end:end])
		from = end
	}
	return c.frames, nil
}

// frame reads a frame to the end of the buffer.
func (c *Conn) frame() (flags byte, body []byte, err error) {
	var head [9]byte
	if _, err := io.ReadFull(c.r, head[:2]); err != nil {
		return 0, nil, err
	}
	size := uint64(head[1])
	if head[0]&flagLong != 0 {
		if _, err := io.ReadFull(c.r, head[2:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if head[0]&^(flagMore|flagLong|flagCommand) != 0 {
		return 0, nil, fmt.Errorf("frame flags %#x", head[0])
	}
	from := len(c.buf)
	if size > uint64(c.limit-from) {
		return 0, nil, fmt.Errorf("a message of more than %d bytes", c.limit)
	}
	err = c.body(int(size))
	return head[0], c.buf[from:], err
}

// body appends n bytes to the buffer, which grows only as bytes arrive.
func (c *Conn) body(n int) error {
	for n > 0 {
		part := min(n, 1<<20)
		from := len(c.buf)
		if need := from + part; need > cap(c.buf) {
			c.buf = append(c.buf, make([]byte, max(part, min(cap(c.buf), 8<<20)))...)
		}
		c.buf = c.buf[:from+part]
		if _, err := io.ReadFull(c.r, c.buf[from:]); err != nil {
			return err
		}
		n -= part
	}
	return nil
}

// handleCommand handles a command: it answers PING, and returns an error for ERROR.
func (c *Conn) handleCommand(body []byte) error {
	name, data, err := command(body)
	switch {
	case err != nil:
		return err
	case name == "ERROR":
		return fmt.Errorf("the peer says %.100q", data)
	case name != "PING" || len(data) < 2 || len(data) > 2+16:
		// its data: a time to live, then the context that the PONG returns
		return nil
	}
	return c.write(newCommand("PONG", data[2:]))
}

// Send sends a message of short frames.
func (c *Conn) Send(frames ...[]byte) error {
	var out []byte
	for i, f := range frames {
		if len(f) > 255 {
			return fmt.Errorf("a frame of %d bytes", len(f))
		}
		flags := byte(flagMore)
		if i == len(frames)-1 {
			flags = 0
		}
		out = append(append(out, flags, byte(len(f))), f...)
	}
	return c.write(out)
}

// Subscribe subscribes to all topics with the prefix.
func (c *Conn) Subscribe(topic string) error { return c.Send(append([]byte{1}, topic...)) }

func (c *Conn) write(b []byte) error {
	_ = c.net.SetWriteDeadline(time.Now().Add(handshakeTime))
	_, err := c.net.Write(b)
	return err
}

// SetReadDeadline sets a deadline for Read; zero: none.
func (c *Conn) SetReadDeadline(t time.Time) { _ = c.net.SetReadDeadline(t) }

// Peer returns the address at the other end.
func (c *Conn) Peer() net.Addr { return c.net.RemoteAddr() }

// Close closes the connection. A blocked Read returns.
func (c *Conn) Close() { _ = c.net.Close() }

// Each calls f with each message until the connection ends. Frames are valid until f returns.
func (c *Conn) Each(f func(frames [][]byte)) error {
	for {
		frames, err := c.Read()
		if err != nil {
			return err
		}
		f(frames)
	}
}
