package rpc

import (
	"context"
	"encoding/binary"
	"time"

	"golang.org/x/net/http2"
)

const (
	minFrame   = 16 << 10 // what every peer takes in one frame, and all that is taken here
	frameHead  = 9
	readBuffer = 8 * minFrame

	// What a peer may make the server say and not read, before it is not listened to either.
	maxControl = 256 << 10

	frameData     = http2.FrameData
	frameHeaders  = http2.FrameHeaders
	frameSettings = http2.FrameSettings
)

// reading is the state of who reads the connection.
type reading struct {
	buf        []byte
	from, to   int       // of buf: read and not yet looked at
	ready      []*stream // to be run
	next       int       // of ready
	base       context.Context
	headers    headers
	continued  uint32 // the stream whose header block goes on; 0: none does
	credit     int32  // bytes the peer may still send in the connection
	firstFrame bool   // has been seen
	wakeAt     int    // bytes that wake the reader
}

// read reads once and takes in all frames that are complete.
func (c *conn) read() error {
	if c.to == c.from {
		c.from, c.to = 0, 0
	} else if len(c.buf)-c.from < frameHead+minFrame { // the frame under way might not fit
		c.to = copy(c.buf, c.buf[c.from:c.to])
		c.from = 0
	}
	c.settle()
	n, err := c.nc.Read(c.buf[c.to:])
	if n == 0 && err != nil {
		return err
	}
	c.to += n
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lastHeard = time.Now()
	for c.to-c.from >= frameHead {
		head := c.buf[c.from:c.to]
		length := int(head[0])<<16 | int(head[1])<<8 | int(head[2])
		if length > minFrame {
			return c.broken(http2.ErrCodeFrameSize)
		}
		if len(head) < frameHead+length {
			break
		}
		c.from += frameHead + length
		kind, flags, id := http2.FrameType(head[3]), http2.Flags(head[4]), binary.BigEndian.Uint32(head[5:9])&(1<<31-1)
		if code := c.frame(kind, flags, id, head[frameHead:frameHead+length]); code != http2.ErrCodeNo {
			return c.broken(code)
		}
	}
	return nil
}

// settle prepares for a read. It waits while the peer does not read the answers to what it has sent already, which somebody is about
// to write, and keeps the frame with which Envoy, as any gRPC client, gives up a stream that is over already from waking the server for
// itself: where no stream is open, less than it and a byte is nothing that anybody waits for, and is read with what comes next.
// (A call's headers have six fields at least, and so more.)
func (c *conn) settle() {
	least := 1
	c.mu.Lock()
	for c.out.control > maxControl && c.writing && !c.dead {
		c.written.Wait()
	}
	if len(c.streams) == 0 && c.leaving == staying && c.from == c.to && c.firstFrame && !c.out.copies { // TLS: a record has other sizes
		least = frameHead + 4 + 1
	}
	c.mu.Unlock()
	if least != c.wakeAt {
		wakeAt(c.nc, least)
		c.wakeAt = least
	}
}

// broken tells the peer what it did wrong, if it still reads, and is the error that ends the connection. c.mu is held.
func (c *conn) broken(code http2.ErrCode) error {
	c.out.goAway(c.lastID, code)
	c.mu.Unlock()
	c.flush()
	c.mu.Lock()
	return http2.ConnectionError(code)
}

// frame takes in one frame. Any code but ErrCodeNo ends the connection.
func (c *conn) frame(kind http2.FrameType, flags http2.Flags, id uint32, p []byte) http2.ErrCode {
	if !c.firstFrame && kind != frameSettings || c.continued != 0 && (kind != http2.FrameContinuation || id != c.continued) {
		return http2.ErrCodeProtocol
	}
	c.firstFrame = true
	switch kind {
	case frameData:
		return c.data(flags, id, p)
	case frameHeaders:
		return c.headersFrame(flags, id, p)
	case http2.FrameContinuation:
		return c.continuation(flags, id, p)
	case frameSettings:
		return c.settings(flags, id, p)
	case http2.FramePing:
		return c.pingFrame(flags, id, p)
	case http2.FrameWindowUpdate:
		return c.windowUpdate(id, p)
	case http2.FrameRSTStream:
		return c.resetFrame(id, p)
	case http2.FrameGoAway:
		if id != 0 {
			return http2.ErrCodeProtocol
		}
	case http2.FramePriority:
		switch {
		case id == 0:
			return http2.ErrCodeProtocol
		case len(p) != 5:
			c.refuse(id, http2.ErrCodeFrameSize)
		case binary.BigEndian.Uint32(p)&(1<<31-1) == id:
			c.refuse(id, http2.ErrCodeProtocol)
		}
	case http2.FramePushPromise:
		return http2.ErrCodeProtocol // clients make no promises
	}
	return http2.ErrCodeNo
}

// refuse resets a stream for what the peer did.
func (c *conn) refuse(id uint32, code http2.ErrCode) {
	c.out.reset(id, code)
	if st := c.streams[id]; st != nil {
		st.end(lost)
		c.drop(st)
	}
}

// drop ends a stream that the peer has given up.
func (c *conn) drop(st *stream) {
	st.end(canceled)
	delete(c.streams, st.id)
}

// unpad takes the padding off a frame's payload.
func unpad(flags, padded http2.Flags, p []byte) ([]byte, bool) {
	if !flags.Has(padded) {
		return p, true
	}
	if len(p) == 0 || int(p[0]) >= len(p) {
		return nil, false
	}
	return p[1 : len(p)-int(p[0])], true
}

// data takes in a part of a stream's messages.
func (c *conn) data(flags http2.Flags, id uint32, p []byte) http2.ErrCode {
	length := int32(len(p))
	if id == 0 {
		return http2.ErrCodeProtocol
	}
	if c.credit -= length; c.credit < 0 {
		return http2.ErrCodeFlowControl
	}
	if whole := c.s.o.ConnWindow; c.credit < whole-whole/4 { // streams' own windows bound what is kept
		c.out.windowUpdate(0, uint32(whole-c.credit))
		c.credit = whole
	}
	p, ok := unpad(flags, http2.FlagDataPadded, p)
	if !ok {
		return http2.ErrCodeProtocol
	}
	st := c.streams[id]
	switch {
	case st == nil && id > c.lastID || id%2 == 0:
		return http2.ErrCodeProtocol // of a stream that never began
	case st == nil:
		return http2.ErrCodeNo // sent before the peer knew that it had ended
	case st.halfClosed:
		c.refuse(id, http2.ErrCodeStreamClosed)
		return http2.ErrCodeNo
	case st.credit < length:
		c.refuse(id, http2.ErrCodeFlowControl)
		return http2.ErrCodeNo
	}
	st.credit -= length
	st.under.owed += length - int32(len(p)) // the padding
	if err := st.take(p); err != nil {
		st.finish(err)
		return http2.ErrCodeNo
	}
	if flags.Has(http2.FlagDataEndStream) {
		st.halfClose()
	}
	c.offer(st)
	return http2.ErrCodeNo
}

// offer has a stream run that has something to read, and was not run before: at once if all that has come of it is complete, so that
// its handler does not begin to wait at once. A large message is not waited for: the peer might need the handler's credit to go on.
func (c *conn) offer(st *stream) {
	if st.running {
		if len(st.messages) > 0 {
			st.wake(&st.reader)
		}
		return
	}
	if !st.ended && (st.halfClosed || len(st.messages) > 0 && (st.partial == 0 || st.partial > firstPiece || st.credit <= c.s.o.StreamWindow/2)) {
		c.start(st)
	}
}

// start has a stream's handler run.
func (c *conn) start(st *stream) {
	st.running = true
	if st.method.inline {
		c.ready = append(c.ready, st)
	} else {
		c.s.work(task{c, st})
	}
}

func (c *conn) settings(flags http2.Flags, id uint32, p []byte) http2.ErrCode {
	switch {
	case id != 0:
		return http2.ErrCodeProtocol
	case flags.Has(http2.FlagSettingsAck) && len(p) != 0 || len(p)%6 != 0:
		return http2.ErrCodeFrameSize
	case flags.Has(http2.FlagSettingsAck):
		return http2.ErrCodeNo
	}
	for ; len(p) > 0; p = p[6:] {
		v := binary.BigEndian.Uint32(p[2:])
		switch http2.SettingID(binary.BigEndian.Uint16(p)) {
		case http2.SettingInitialWindowSize:
			if v > 1<<31-1 {
				return http2.ErrCodeFlowControl
			}
			more := int64(v) - c.peer.streamWindow
			c.peer.streamWindow = int64(v)
			for _, st := range c.streams {
				if st.window += more; st.window > 1<<31-1 {
					return http2.ErrCodeFlowControl
				}
				st.wake(&st.writer)
			}
		case http2.SettingMaxFrameSize:
			if v < minFrame || v > 1<<24-1 {
				return http2.ErrCodeProtocol
			}
			c.peer.frame = int(min(v, maxSent))
		case http2.SettingEnablePush:
			if v > 1 {
				return http2.ErrCodeProtocol
			}
		} // the rest is about headers, of which none here is put into the peer's table
	}
	c.out.settingsAck()
	return http2.ErrCodeNo
}

// maxSent bounds the frames that are sent, whatever the peer would take: between them others have their turn.
const maxSent = 64 << 10

func (c *conn) pingFrame(flags http2.Flags, id uint32, p []byte) http2.ErrCode {
	switch {
	case id != 0:
		return http2.ErrCodeProtocol
	case len(p) != 8:
		return http2.ErrCodeFrameSize
	case !flags.Has(http2.FlagPingAck):
		c.out.ping(true, [8]byte(p))
	case [8]byte(p) == farewell:
		c.lastWord()
	}
	return http2.ErrCodeNo
}

func (c *conn) windowUpdate(id uint32, p []byte) http2.ErrCode {
	if len(p) != 4 {
		return http2.ErrCodeFrameSize
	}
	n := int64(binary.BigEndian.Uint32(p) & (1<<31 - 1))
	st := c.streams[id]
	switch {
	case id == 0 && n == 0:
		return http2.ErrCodeProtocol
	case id == 0:
		if c.window += n; c.window > 1<<31-1 {
			return http2.ErrCodeFlowControl
		}
		for waits := range c.waiting {
			waits.wake(&waits.writer)
		}
	case st == nil && (id > c.lastID || id%2 == 0):
		return http2.ErrCodeProtocol
	case st == nil:
	case n == 0:
		c.refuse(id, http2.ErrCodeProtocol)
	default:
		if st.window += n; st.window > 1<<31-1 {
			c.refuse(id, http2.ErrCodeFlowControl)
			return http2.ErrCodeNo
		}
		st.wake(&st.writer)
	}
	return http2.ErrCodeNo
}

func (c *conn) resetFrame(id uint32, p []byte) http2.ErrCode {
	switch st := c.streams[id]; {
	case len(p) != 4:
		return http2.ErrCodeFrameSize
	case id == 0 || id%2 == 0 || id > c.lastID:
		return http2.ErrCodeProtocol
	case st != nil:
		c.drop(st)
	}
	return http2.ErrCodeNo
}
