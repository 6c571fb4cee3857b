package rpc

import (
	"encoding/binary"
	"net"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/mem"

	"tandem/internal/rawconn"
)

// outgoing is what is to be written: bytes, and parts of messages that are not copied.
type outgoing struct {
	tail    []byte       // what was added last
	parts   net.Buffers  // what is before it
	held    []mem.Buffer // memory of parts
	sealed  int          // of tail, these bytes are in parts
	control int          // bytes of frames that nothing but the peer's diligence bounds
	copies  bool         // copy everything: with TLS a write makes a record
}

// From this length on a part of a message is not copied.
const byReference = 8 << 10

func (o *outgoing) empty() bool { return len(o.tail) == o.sealed && len(o.parts) == 0 }

func (o *outgoing) frame(kind http2.FrameType, flags http2.Flags, id uint32, length int) {
	o.tail = append(o.tail, byte(length>>16), byte(length>>8), byte(length), byte(kind), byte(flags), byte(id>>24), byte(id>>16), byte(id>>8), byte(id))
}

func (o *outgoing) setting(id http2.SettingID, v uint32) {
	o.tail = binary.BigEndian.AppendUint16(o.tail, uint16(id))
	o.tail = binary.BigEndian.AppendUint32(o.tail, v)
}

func (o *outgoing) windowUpdate(id, n uint32) {
	o.frame(http2.FrameWindowUpdate, 0, id, 4)
	o.tail = binary.BigEndian.AppendUint32(o.tail, n)
}

func (o *outgoing) reset(id uint32, code http2.ErrCode) {
	o.control += 13
	o.frame(http2.FrameRSTStream, 0, id, 4)
	o.tail = binary.BigEndian.AppendUint32(o.tail, uint32(code))
}

func (o *outgoing) ping(ack bool, data [8]byte) {
	o.control += 17
	flags := http2.Flags(0)
	if ack {
		flags = http2.FlagPingAck
	}
	o.frame(http2.FramePing, flags, 0, 8)
	o.tail = append(o.tail, data[:]...)
}

func (o *outgoing) settingsAck() {
	o.control += 9
	o.frame(http2.FrameSettings, http2.FlagSettingsAck, 0, 0)
}

func (o *outgoing) goAway(last uint32, code http2.ErrCode) {
	o.frame(http2.FrameGoAway, 0, 0, 8)
	o.tail = binary.BigEndian.AppendUint32(o.tail, last)
	o.tail = binary.BigEndian.AppendUint32(o.tail, uint32(code))
}

// part adds a part of a message, which lies in from.
func (o *outgoing) part(data []byte, from mem.Buffer) {
	if len(data) < byReference || o.copies {
		o.tail = append(o.tail, data...)
		return
	}
	o.seal()
	from.Ref()
	o.held = append(o.held, from)
	o.parts = append(o.parts, data)
}

// seal makes what was added last one of the parts.
func (o *outgoing) seal() {
	if len(o.tail) > o.sealed {
		o.parts = append(o.parts, o.tail[o.sealed:len(o.tail):len(o.tail)])
		o.sealed = len(o.tail)
	}
}

// write writes everything, and is empty then.
func (o *outgoing) write(nc net.Conn) error {
	defer o.drop()
	if len(o.parts) == 0 {
		_, err := nc.Write(o.tail)
		return err
	}
	o.seal()
	if w, ok := nc.(rawconn.Buffers); ok {
		return w.WriteBuffers(o.parts)
	}
	rest := o.parts // where there are no raw connections; WriteTo moves it
	_, err := rest.WriteTo(nc)
	return err
}

// keepOut is how much memory is kept for what is written next.
const keepOut = 256 << 10

// drop empties it.
func (o *outgoing) drop() {
	for i, b := range o.held {
		b.Free()
		o.held[i] = nil
	}
	clear(o.parts)
	o.held, o.parts, o.sealed, o.control = o.held[:0], o.parts[:0], 0, 0
	if cap(o.tail) > keepOut {
		o.tail = nil
	}
	o.tail = o.tail[:0]
}

// flush writes what there is to write, unless somebody is doing so already. What they find added they write too.
func (c *conn) flush() {
	c.mu.Lock()
	if c.leaving == hungUp && !c.writing {
		c.out.drop()
	}
	if c.writing || c.dead || c.out.empty() {
		over := c.over() && !c.writing
		c.mu.Unlock()
		if over {
			c.hangUp()
		}
		return
	}
	c.writing = true
	var err error
	for err == nil && !c.dead && !c.out.empty() {
		now, nc := c.out, c.nc
		c.out = c.spare
		c.mu.Unlock()
		err = now.write(nc)
		c.mu.Lock()
		c.spare = now
		c.written.Broadcast()
	}
	c.writing = false
	if c.dead {
		c.out.drop()
	}
	over := c.over()
	c.mu.Unlock()
	switch {
	case err != nil:
		c.fail()
	case over:
		c.hangUp()
	}
}
