package grpcserver

import (
	"bufio"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

// Reasons for which a connection is closed.
var (
	errTooMuch = errors.New("grpcserver: the connection holds too much memory")
	errFlood   = errors.New("grpcserver: too many frames that carry no request")
)

// conn is one connection. It buffers what it reads, so grpc-go asks for one frame's header, then for its payload, and
// conn sees each frame just before grpc-go does.
type conn struct {
	net.Conn // of the listener
	s        *Server
	top      net.Conn // with TLS, if there is any; this one is read and written
	in       *bufio.Reader

	// Owned by the goroutine that reads.
	preface    int     // bytes of the preface received so far
	head       [9]byte // of the current frame
	headBytes  int
	payload    int    // bytes of the frame's payload still to come
	stream     uint32 // of the last HEADERS frame
	credit     int64  // number of further frames without a request that are accepted
	refilled   time.Time
	creditedTo int64 // the value of written at the last credit
	lateBytes  int64 // bytes received on streams that had ended ...
	lateSince  int64 // ... since written had this value
	failed     error

	written   atomic.Int64 // bytes
	idleSince atomic.Int64 // Unix nanoseconds; 0: there are streams
	deadline  time.Time    // for writing; owned by the goroutine that writes

	mu      sync.Mutex // guards the fields below, and receipts
	streams map[uint32]*receipt
	taken   map[*method]int64 // streams that have not ended
	held    int64
	closed  bool
}

const (
	readBuffer = 32 << 10
	// frameCost is charged for each DATA frame in addition to its bytes: grpc-go stores them separately.
	frameCost = 64
	// Credit for frames without a request: at first, for each request, for each 256 bytes written, and per second.
	maxCredit     = 4096
	requestCredit = 8
	writtenCredit = 256
	secondCredit  = 64
)

func newConn(s *Server, raw net.Conn) *conn {
	c := &conn{Conn: raw, s: s, top: raw, credit: maxCredit, refilled: time.Now(), streams: map[uint32]*receipt{},
		taken: map[*method]int64{}}
	c.idleSince.Store(time.Now().UnixNano())
	return c
}

// open starts HTTP/2 on the connection.
func (c *conn) open(top net.Conn) {
	c.top = top
	c.in = bufio.NewReaderSize(top, readBuffer)
}

func (c *conn) Read(p []byte) (int, error) {
	if c.failed != nil {
		return 0, c.failed
	}
	n, err := c.in.Read(p)
	if c.failed = c.follow(p[:n]); c.failed != nil {
		return 0, c.failed
	}
	return n, err
}

// follow finds the frames in the bytes that were read.
func (c *conn) follow(p []byte) error {
	if c.preface < len(http2.ClientPreface) {
		n := min(len(http2.ClientPreface)-c.preface, len(p))
		c.preface += n
		p = p[n:]
	}
	for len(p) > 0 {
		if c.payload > 0 {
			n := min(c.payload, len(p))
			c.payload -= n
			p = p[n:]
			continue
		}
		n := copy(c.head[c.headBytes:], p)
		p = p[n:]
		if c.headBytes += n; c.headBytes < len(c.head) {
			return nil
		}
		c.headBytes = 0
		if err := c.frame(); err != nil {
			return err
		}
	}
	return nil
}

// frame counts a frame whose header is complete (RFC 9113, 4.1).
func (c *conn) frame() error {
	h := &c.head
	c.payload = int(h[0])<<16 | int(h[1])<<8 | int(h[2])
	id := binary.BigEndian.Uint32(h[5:]) &^ (1 << 31)
	switch http2.FrameType(h[3]) {
	case http2.FrameData:
		if c.payload > 0 || http2.Flags(h[4]).Has(http2.FlagDataEndStream) {
			return c.received(id, int64(c.payload))
		}
	case http2.FrameHeaders:
		c.stream = id
		c.credit = min(c.credit+requestCredit, maxCredit)
		return nil
	case http2.FrameRSTStream:
		c.reset(id)
	}
	return c.useCredit()
}

// useCredit takes one frame without a request from the peer's credit.
func (c *conn) useCredit() error {
	if c.credit--; c.credit > 0 {
		return nil
	}
	now, written := time.Now(), c.written.Load()
	c.credit += int64(now.Sub(c.refilled).Seconds()*secondCredit) + (written-c.creditedTo)/writtenCredit
	c.credit = min(c.credit, maxCredit)
	c.refilled, c.creditedTo = now, written
	if c.credit <= 0 {
		return errFlood
	}
	return nil
}

func (c *conn) Write(p []byte) (int, error) {
	if now := time.Now(); c.deadline.Sub(now) < c.s.o.StuckTime-time.Second {
		c.deadline = now.Add(c.s.o.StuckTime)
		_ = c.SetWriteDeadline(c.deadline)
	}
	n, err := c.top.Write(p)
	c.written.Add(int64(n))
	if err != nil {
		_ = c.Close() // the reader ends grpc-go's side
	}
	return n, err
}

// Close releases the memory of replies that will not be written. Handlers release received messages.
func (c *conn) Close() error {
	err := c.Conn.Close()
	c.s.leave(c)
	var dropped []*receipt
	c.mu.Lock()
	c.closed = true
	for _, r := range c.streams {
		c.forgetReply(r)
		if !r.begun {
			dropped = append(dropped, r)
		}
	}
	c.mu.Unlock()
	for _, r := range dropped {
		r.end()
	}
	return err
}

// received counts bytes received on a stream, refuses the stream if it has too many, and closes the connection if that
// does not help.
func (c *conn) received(id uint32, n int64) error {
	c.mu.Lock()
	r := c.streams[id]
	if r == nil {
		c.mu.Unlock()
		return c.late(n)
	}
	if r.bytes == 0 {
		r.began = time.Now()
	}
	r.bytes += n
	r.charge(n + frameCost)
	total, limit := c.s.o.Memory.Load(), c.s.o.Memory.Limit()
	share := c.s.o.ConnectionMemory
	much := c.held > c.s.fairShare(total)
	if !r.over && (c.held > share || total > limit/4*3 && much) {
		r.refuse(time.Now())
	}
	hopeless := c.held > 2*share || total > limit+limit/4 && much
	c.mu.Unlock()
	if hopeless {
		return errTooMuch
	}
	return nil
}

// maxLate bounds the bytes on ended streams while nothing can be written, their ends included.
const maxLate = 64 << 20

// late counts bytes on a stream that has ended. grpc-go drops it once the stream's end is written.
func (c *conn) late(n int64) error {
	if written := c.written.Load(); written != c.lateSince {
		c.lateBytes, c.lateSince = 0, written
	}
	if c.lateBytes += n; c.lateBytes > maxLate {
		return errTooMuch
	}
	return nil
}

// reset drops the reply to a stream that the peer has reset: it will not be written.
func (c *conn) reset(id uint32) {
	c.mu.Lock()
	if r := c.streams[id]; r != nil {
		r.reset = true
		c.forgetReply(r)
	}
	c.mu.Unlock()
}

// forgetReply releases the bytes charged for a stream's reply. mu is held.
func (c *conn) forgetReply(r *receipt) {
	n := r.unsent
	r.unsent = 0
	r.charge(-n)
	r.settle()
}

// slowMessage is the time in which a message must be complete while memory is short.
const slowMessage = 10 * time.Second

// sweep closes the connection if the peer does not read a reply or continues a refused stream. While memory is short,
// it refuses messages that take too long.
func (c *conn) sweep(now time.Time, short bool) {
	var dropped []*receipt
	stalled := false
	c.mu.Lock()
	for _, r := range c.streams {
		stalled = stalled || r.unsent > 0 && now.Sub(r.sent) > c.s.o.StuckTime
		if short && !r.over && r.bytes > 0 && now.Sub(r.began) > slowMessage {
			r.refuse(now)
		}
		stalled = stalled || r.over && now.Sub(r.overSince) > c.s.o.StuckTime // the peer continues
		if !r.begun && r.Err() != nil {                                       // grpc-go answered by itself
			dropped = append(dropped, r)
		}
	}
	c.mu.Unlock()
	for _, r := range dropped {
		r.end()
	}
	if stalled {
		_ = c.Close()
	}
}
