package kvevents

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// Deadlines and bounds of a connection.
const (
	dialTimeout      = 2 * time.Second
	handshakeTimeout = 5 * time.Second
	replayTimeout    = 20 * time.Second // from asking to the end marker; an engine looks for questions every 100 ms
	maxHandshake     = 64 << 10         // bytes of a frame
	maxMessage       = 64 << 20         // bytes of all its frames
	maxFrames        = 8
	maxReplayed      = 1 << 20 // batches
)

// conn is one ZeroMQ connection. go-zeromq opens it and sends; messages are read here, into memory that is used again, with
// a bound on what the other side may make us allocate. Its sockets would also connect again by themselves, unseen, when it
// is just the moment between that matters.
type conn struct {
	net    net.Conn
	z      *zmq4.Conn
	r      *bufio.Reader
	buf    []byte
	ends   []int
	frames [][]byte
}

// open makes a ZeroMQ connection of a network one, which it closes when that fails.
func open(ctx context.Context, nc net.Conn, typ zmq4.SocketType, server bool) (*conn, error) {
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	defer stop()
	_ = nc.SetDeadline(time.Now().Add(handshakeTimeout))
	z, err := zmq4.Open(&handshake{Conn: nc, greeting: 64}, null.Security(), typ, nil, server, nil)
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	_ = nc.SetDeadline(time.Time{})
	return &conn{net: nc, z: z, r: bufio.NewReaderSize(nc, 64<<10)}, nil
}

func dial(ctx context.Context, addr string, typ zmq4.SocketType) (*conn, error) {
	d := net.Dialer{Timeout: dialTimeout, KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 3}}
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return open(ctx, nc, typ, false)
}

// subscribe asks for everything whose topic begins so.
func (c *conn) subscribe(topic string) error {
	_ = c.net.SetWriteDeadline(time.Now().Add(handshakeTimeout))
	return c.z.SendMsg(zmq4.NewMsg(append([]byte{1}, topic...)))
}

// Flags of a ZMTP frame (rfc.zeromq.org/spec/23).
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

var errTooLarge = errors.New("kvevents: a message larger than it may be")

// read reads the next message. Its frames are good until the next call.
func (c *conn) read() ([][]byte, error) {
	c.buf, c.ends = c.buf[:0], c.ends[:0]
	for {
		flags, size, err := c.header()
		if err != nil {
			return nil, err
		}
		if size > uint64(maxMessage-len(c.buf)) || len(c.ends) == maxFrames {
			return nil, errTooLarge
		}
		from := len(c.buf)
		if err := c.body(int(size)); err != nil {
			return nil, err
		}
		if flags&flagCommand != 0 {
			if err := c.command(c.buf[from:]); err != nil {
				return nil, err
			}
			c.buf = c.buf[:from]
			continue
		}
		c.ends = append(c.ends, len(c.buf))
		if flags&flagMore == 0 {
			break
		}
	}
	c.frames = c.frames[:0]
	from := 0
	for _, end := range c.ends {
		c.frames = append(c.frames, c.buf[from:end])
		from = end
	}
	return c.frames, nil
}

func (c *conn) header() (flags byte, size uint64, err error) {
	var b [9]byte
	if _, err := io.ReadFull(c.r, b[:2]); err != nil {
		return 0, 0, err
	}
	if b[0]&flagLong == 0 {
		return b[0], uint64(b[1]), nil
	}
	if _, err := io.ReadFull(c.r, b[2:]); err != nil {
		return 0, 0, err
	}
	return b[0], binary.BigEndian.Uint64(b[1:]), nil
}

// body appends n bytes to the buffer, which grows with what really comes.
func (c *conn) body(n int) error {
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

// command answers a PING (ZMTP 3.1: its time to live, then a context that the PONG returns) and passes over all others.
func (c *conn) command(body []byte) error {
	if len(body) >= 7 && body[0] == 4 && string(body[1:5]) == "PING" {
		_ = c.net.SetWriteDeadline(time.Now().Add(handshakeTimeout))
		return c.z.SendCmd("PONG", append([]byte(nil), body[7:]...))
	}
	return nil
}

func (c *conn) close() { _ = c.net.Close() }

// handshake is a connection while it is opened. It ends when a frame says that it is larger than any of a handshake, which
// go-zeromq would make room for.
type handshake struct {
	net.Conn
	greeting int // bytes of it to come
	head     []byte
	skip     uint64 // bytes of the frame to come
}

func (h *handshake) Read(p []byte) (int, error) {
	n, err := h.Conn.Read(p)
	for _, b := range p[:n] {
		switch {
		case h.greeting > 0:
			h.greeting--
		case h.skip > 0:
			h.skip--
		default:
			h.head = append(h.head, b)
			switch {
			case len(h.head) == 2 && h.head[0]&flagLong == 0:
				h.skip, h.head = uint64(h.head[1]), h.head[:0]
			case len(h.head) == 9:
				if h.skip = binary.BigEndian.Uint64(h.head[1:]); h.skip > maxHandshake {
					return 0, errTooLarge
				}
				h.head = h.head[:0]
			}
		}
	}
	return n, err
}

// batchOf takes a live message apart: topic, number (8 bytes, big endian), payload.
func batchOf(frames [][]byte) (topic []byte, seq uint64, payload []byte, ok bool) {
	if len(frames) != 3 || len(frames[1]) != 8 {
		return nil, 0, nil, false
	}
	return frames[0], binary.BigEndian.Uint64(frames[1]), frames[2], true
}

// replayEnd is the number that ends a replay: -1.
const replayEnd = ^uint64(0)

// ask asks the replay socket at addr for all batches from a number on.
//
// The question is an empty frame and the number. An answer is an empty frame, from vLLM 0.26 and SGLang 0.5.23 on also the
// topic, then number and payload; the end has number -1 and an empty payload. So the last two frames count. (A REQ socket,
// as in vLLM's own example, sees the first answer only.)
func ask(ctx context.Context, addr string, from uint64, each func(seq uint64, payload []byte)) error {
	ctx, cancel := context.WithTimeout(ctx, replayTimeout)
	defer cancel()
	c, err := dial(ctx, addr, zmq4.Dealer)
	if err != nil {
		return fmt.Errorf("asking for a replay: %w", err)
	}
	defer c.close()
	defer context.AfterFunc(ctx, c.close)()
	_ = c.net.SetDeadline(time.Now().Add(replayTimeout))
	if err := c.z.SendMsg(zmq4.NewMsgFrom([]byte{}, binary.BigEndian.AppendUint64(nil, from))); err != nil {
		return fmt.Errorf("asking for a replay: %w", err)
	}
	for range maxReplayed {
		frames, err := c.read()
		if err != nil {
			return fmt.Errorf("reading a replay: %w", err)
		}
		n := len(frames)
		if n < 2 || len(frames[n-2]) != 8 {
			return fmt.Errorf("reading a replay: a message of %d frames that is no batch", n)
		}
		seq := binary.BigEndian.Uint64(frames[n-2])
		if seq == replayEnd && len(frames[n-1]) == 0 {
			return nil
		}
		each(seq, frames[n-1])
	}
	return errors.New("reading a replay: it does not end")
}
