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

// conn is one connection. It reads ahead into a buffer of its own, so grpc-go asks for one frame's header, then for
// its payload, and conn knows of each frame just before grpc-go does.
type conn struct {
	net.Conn // of the listener
	s        *Server
	top      net.Conn // with TLS, if there is any; what is read and written
	in       *bufio.Reader

	// Of the goroutine that reads.
	preface    int     // bytes of the preface that have come
	head       [9]byte // of the frame under way
	headBytes  int
	payload    int    // bytes of the frame's payload that have not come
	stream     uint32 // of the last HEADERS frame
	credit     int64  // how many more frames that carry no request are taken
	refilled   time.Time
	creditedTo int64 // of written
	lateBytes  int64 // that came on streams that had ended ...
	lateSince  int64 // ... while written was this
	failed     error

	written   atomic.Int64 // bytes
	idleSince atomic.Int64 // unix nanoseconds; 0: there are streams
	deadline  time.Time    // for writing; of the goroutine that writes

	mu      sync.Mutex // of what follows, and of receipts
	streams map[uint32]*receipt
	held    int64
	closed  bool
}

const (
	readBuffer = 32 << 10
	// frameCost is counted for each DATA frame beside its bytes: grpc-go keeps them apart.
	frameCost = 64
	// Frames that carry no request: so many at first, for each request, for each 256 bytes that were written, and
	// each second.
	maxCredit     = 4096
	requestCredit = 8
	writtenCredit = 256
	secondCredit  = 64
)

func newConn(s *Server, raw net.Conn) *conn {
	c := &conn{Conn: raw, s: s, top: raw, credit: maxCredit, refilled: time.Now(), streams: map[uint32]*receipt{}}
	c.idleSince.Store(time.Now().UnixNano())
	return c
}

// open begins with HTTP/2.
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

// follow finds the frames in what is read.
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

// frame counts a frame whose header has come (RFC 9113, 4.1).
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
	return c.spend()
}

// spend takes one frame that carries no request from the peer's credit.
func (c *conn) spend() error {
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
		_ = c.Close() // grpc-go waits for the reader to find out
	}
	return n, err
}

// Close gives back what was to be written and no longer will be. What was received its handlers give back.
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

// received counts what comes on a stream, refuses the stream if it is too much, and closes the connection if that
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

// maxLate is how much may come on streams that have ended while nothing can be written, their ends included.
const maxLate = 64 << 20

// late counts what comes on a stream that has ended. grpc-go drops it once the stream's end is written.
func (c *conn) late(n int64) error {
	if written := c.written.Load(); written != c.lateSince {
		c.lateBytes, c.lateSince = 0, written
	}
	if c.lateBytes += n; c.lateBytes > maxLate {
		return errTooMuch
	}
	return nil
}

// reset forgets the reply to a stream that the peer has reset: it will not be written.
func (c *conn) reset(id uint32) {
	c.mu.Lock()
	if r := c.streams[id]; r != nil {
		r.reset = true
		c.forgetReply(r)
	}
	c.mu.Unlock()
}

// forgetReply gives back what a stream's reply was counted for. mu is held.
func (c *conn) forgetReply(r *receipt) {
	n := r.unsent
	r.unsent = 0
	r.charge(-n)
	r.settle()
}

// slowMessage is how long a message may take to become complete while memory is short.
const slowMessage = 10 * time.Second

// sweep closes the connection if a reply is not taken or a refused stream goes on, and if memory is short refuses
// messages that take too long.
func (c *conn) sweep(now time.Time, short bool) {
	var dropped []*receipt
	stuck := false
	c.mu.Lock()
	for _, r := range c.streams {
		stuck = stuck || r.unsent > 0 && now.Sub(r.sent) > c.s.o.StuckTime
		if short && !r.over && r.bytes > 0 && now.Sub(r.began) > slowMessage {
			r.refuse(now)
		}
		stuck = stuck || r.over && now.Sub(r.overSince) > c.s.o.StuckTime // the peer goes on
		if !r.begun && r.Err() != nil {                                   // grpc-go answered by itself
			dropped = append(dropped, r)
		}
	}
	c.mu.Unlock()
	for _, r := range dropped {
		r.end()
	}
	if stuck {
		_ = c.Close()
	}
}
