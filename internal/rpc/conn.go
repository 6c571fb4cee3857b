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
	handlers  int                  // that have not returned or not begun, of streams that may have ended before
	window    int64                // bytes the peer takes
	peer      settings             // the peer's
	waiting   map[*stream]struct{} // for the window
	up        bool                 // the handshake is done
	dead      bool
	leaving   leaving
	pinged    bool // the peer owes an answer
	lastHeard time.Time
	watch     *time.Timer
	written   sync.Cond // a write has ended
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
	hungUp          // and all streams have ended: nothing more is written
)

const preface = http2.ClientPreface

// firstWindow is what either side may send before it hears of another window (RFC 9113, 6.9.2).
const firstWindow = 1<<16 - 1

func newConn(s *Server, nc net.Conn) *conn {
	c := &conn{s: s, nc: nc, streams: map[uint32]*stream{}, waiting: map[*stream]struct{}{}, window: firstWindow,
		peer: settings{streamWindow: firstWindow, frame: minFrame}, lastHeard: time.Now()}
	c.written.L = &c.mu
	return c
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
		if err := t.HandshakeContext(context.Background()); err != nil {
			return err
		}
		state := t.ConnectionState()
		if state.NegotiatedProtocol != "h2" {
			return errors.New("rpc: the peer did not choose h2 by ALPN")
		}
		from.AuthInfo = credentials.TLSInfo{State: state, CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}}
	}
	var hello [len(preface)]byte
	if _, err := io.ReadFull(c.nc, hello[:]); err != nil {
		return err
	}
	if string(hello[:]) != preface {
		return errors.New("rpc: the peer does not speak HTTP/2")
	}
	c.reading = reading{buf: make([]byte, readBuffer), base: peer.NewContext(context.Background(), &from), credit: c.s.o.ConnWindow, wakeAt: 1}
	c.headers.decoder = hpack.NewDecoder(4096, c.headers.field)
	c.headers.decoder.SetMaxStringLength(maxHeaderList)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.up = true
	_ = c.nc.SetDeadline(time.Time{})
	c.out.copies, c.spare.copies = c.s.o.TLS != nil, c.s.o.TLS != nil
	c.out.frame(frameSettings, 0, 0, 4*6)
	c.out.setting(http2.SettingMaxConcurrentStreams, c.s.o.MaxStreams)
	c.out.setting(http2.SettingInitialWindowSize, uint32(c.s.o.StreamWindow))
	c.out.setting(http2.SettingMaxHeaderListSize, maxHeaderList)
	c.out.setting(http2.SettingMaxFrameSize, minFrame)
	if more := c.s.o.ConnWindow - firstWindow; more > 0 {
		c.out.windowUpdate(0, uint32(more))
	}
	if !c.dead {
		c.watch = time.AfterFunc(quietTime, c.look)
	}
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
			if !st.inline.CompareAndSwap(true, false) { // from here on nobody can hand on what is not the stream's any more
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
			for _, st := range c.ready { // of frames before the one that was wrong
				st.serve()
			}
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
	if !c.up { // and has nothing to lose; whoever serves it says goodbye
		_ = c.nc.SetDeadline(time.Now().Add(goAwayTime))
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
func (c *conn) over() bool { return c.leaving == closed && c.handlers == 0 }

// hangUp ends a connection after the last word. What the peer still sends is read for a moment, until it hangs up too: the
// system resets a connection that is closed with something unread, and what was written last might never arrive.
func (c *conn) hangUp() {
	c.mu.Lock()
	again := c.dead || c.leaving == hungUp
	c.leaving = hungUp
	c.mu.Unlock()
	if again {
		return
	}
	if w, ok := c.nc.(interface{ CloseWrite() error }); !ok || w.CloseWrite() != nil {
		c.fail()
		return
	}
	_ = c.nc.SetReadDeadline(time.Now().Add(goAwayTime))
}
