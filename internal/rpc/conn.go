package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// conn is one connection.
type conn struct {
	s  *Server
	nc net.Conn

	reading // the leader's

	mu        sync.Mutex // of what follows
	out       outgoing
	spare     outgoing // empty; its memory is used again
	writing   bool     // somebody is at it, and will write what is added meanwhile
	streams   map[uint32]*stream
	lastID    uint32               // of the peer's streams
	handlers  int                  // that have not returned, of streams that may have ended before
	window    int64                // bytes the peer takes
	peer      settings             // the peer's
	waiting   map[*stream]struct{} // for the window
	dead      bool
	leaving   leaving
	pinged    bool // the peer owes an answer
	lastHeard time.Time
	watch     *time.Timer
}

// settings are those of the peer's that matter here.
type settings struct {
	streamWindow int64
	frame        int
}

// leaving is how far a graceful end has come.
type leaving uint8

const (
	staying leaving = iota
	warned          // said that the end is near; what the peer has sent before it heard that is still served
	closed          // said which stream was the last
)

const preface = http2.ClientPreface

func newConn(s *Server, nc net.Conn) *conn {
	return &conn{s: s, nc: nc, streams: map[uint32]*stream{}, waiting: map[*stream]struct{}{}, window: 1<<16 - 1,
		peer: settings{streamWindow: 1<<16 - 1, frame: minFrame}, lastHeard: time.Now()}
}

// handshake does what comes before the first frame.
func (c *conn) handshake() error {
	_ = c.nc.SetDeadline(time.Now().Add(handshakeTime))
	from := peer.Peer{Addr: c.nc.RemoteAddr()}
	if c.s.o.TLS != nil {
		t := tls.Server(c.nc, c.s.o.TLS)
		c.mu.Lock()
		c.nc = t
		c.mu.Unlock()
		if err := t.Handshake(); err != nil {
			return err
		}
		state := t.ConnectionState()
		if state.NegotiatedProtocol != "h2" {
			return errors.New("rpc: the peer did not choose h2 by ALPN")
		}
		from.AuthInfo = credentials.TLSInfo{State: state, CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}
		c.out.copies, c.spare.copies = true, true
	}
	var hello [len(preface)]byte
	if _, err := io.ReadFull(c.nc, hello[:]); err != nil {
		return err
	}
	if string(hello[:]) != preface {
		return errors.New("rpc: the peer does not speak HTTP/2")
	}
	_ = c.nc.SetDeadline(time.Time{})
	c.reading = reading{buf: make([]byte, readBuffer), base: peer.NewContext(context.Background(), &from), credit: c.s.o.ConnWindow}
	c.headers.decoder = hpack.NewDecoder(4096, c.headers.field)
	c.headers.decoder.SetMaxStringLength(maxHeaderList)
	c.mu.Lock()
	c.out.frame(frameSettings, 0, 0, 4*6)
	c.out.setting(http2.SettingMaxConcurrentStreams, c.s.o.MaxStreams)
	c.out.setting(http2.SettingInitialWindowSize, uint32(c.s.o.StreamWindow))
	c.out.setting(http2.SettingMaxHeaderListSize, maxHeaderList)
	c.out.setting(http2.SettingMaxFrameSize, minFrame)
	c.out.windowUpdate(0, uint32(c.s.o.ConnWindow)-(1<<16-1))
	if !c.dead {
		c.watch = time.AfterFunc(quietTime, c.look)
	}
	c.mu.Unlock()
	return nil
}

// lead reads the connection and runs what becomes ready, until the connection ends or a handler that waits has handed the
// lead on.
func (c *conn) lead() {
	for {
		for c.next < len(c.ready) {
			st := c.ready[c.next]
			c.ready[c.next] = nil
			c.next++
			if st.heavy() {
				c.s.work(task{c, st})
				continue
			}
			st.inline.Store(true)
			st.serve()
			if !st.inline.Load() {
				return // who leads now goes on with c.ready
			}
			if c.next%flushEvery == 0 {
				c.flush()
			}
		}
		c.ready, c.next = c.ready[:0], 0
		c.flush()
		if err := c.read(); err != nil {
			c.fail()
			return
		}
	}
}

// flushEvery is how many handlers' answers are written at once, at most: the first should not wait for too many.
const flushEvery = 8

// fail ends the connection at once.
func (c *conn) fail() {
	c.mu.Lock()
	if c.dead {
		c.mu.Unlock()
		return
	}
	c.dead = true
	for _, st := range c.streams {
		st.end(lost) // not by the peer's will: it may ask somebody else
	}
	clear(c.streams)
	if c.watch != nil {
		c.watch.Stop()
	}
	nc := c.nc
	if !c.writing {
		c.out.drop()
	}
	c.mu.Unlock()
	_ = nc.Close()
	c.s.left(c)
}

// look ends a connection whose peer is no more. It runs every quietTime, or sooner where an answer is due.
func (c *conn) look() {
	c.mu.Lock()
	quiet := time.Since(c.lastHeard)
	switch {
	case c.dead:
		c.mu.Unlock()
		return
	case quiet < quietTime:
		c.pinged = false
		c.watch.Reset(quietTime - quiet)
	case !c.pinged:
		c.pinged = true
		c.out.ping(false, alive)
		c.watch.Reset(answerTime)
	default:
		c.mu.Unlock()
		c.fail()
		return
	}
	c.mu.Unlock()
	c.flush()
}

// What the server's own pings carry.
var (
	alive    = [8]byte{'a', 'l', 'i', 'v', 'e', '?'}
	farewell = [8]byte{'f', 'a', 'r', 'e', 'w', 'e', 'l', 'l'}
)

// goodbye begins a graceful end: the peer is warned, and when it has answered a ping, so has sent all that it sent before it knew,
// told which stream was the last. After that stream has ended, so does the connection.
func (c *conn) goodbye() {
	c.mu.Lock()
	if c.dead || c.leaving != staying {
		c.mu.Unlock()
		return
	}
	c.leaving = warned
	c.out.goAway(1<<31-1, http2.ErrCodeNo)
	c.out.ping(false, farewell)
	time.AfterFunc(goAwayTime, func() {
		c.mu.Lock()
		c.lastWord()
		c.mu.Unlock()
		c.flush()
	})
	c.mu.Unlock()
	c.flush()
}

// lastWord tells the peer that no new stream will be served. c.mu is held.
func (c *conn) lastWord() {
	if c.dead || c.leaving != warned {
		return
	}
	c.leaving = closed
	c.out.goAway(c.lastID, http2.ErrCodeNo)
}

// over reports whether a graceful end is complete. c.mu is held.
func (c *conn) over() bool { return c.leaving == closed && len(c.streams) == 0 && c.handlers == 0 }
