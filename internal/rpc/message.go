package rpc

import (
	"encoding/binary"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// received is a message as it came.
type received struct {
	pieces []*[]byte
	size   int
	owed   int32 // bytes of the window that the peer gets back when it is read
}

// heavyBytes is from where on a stream's work is done beside that of others.
const heavyBytes = 128 << 10

func (st *stream) heavy() bool {
	c := st.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	sum := 0
	for _, m := range st.messages {
		sum += m.size
	}
	return sum > heavyBytes
}

// take takes in a part of the stream's messages: each is a byte that says whether it is compressed, its length in four
// bytes, and itself. A length is only promised: memory is had as the bytes come. conn.mu is held.
func (st *stream) take(p []byte) error {
	for len(p) > 0 {
		if st.partial < len(st.prefix) {
			n := copy(st.prefix[st.partial:], p)
			st.took(n)
			if p = p[n:]; st.partial < len(st.prefix) {
				return nil
			}
			st.length = int(binary.BigEndian.Uint32(st.prefix[1:]))
			switch {
			case st.prefix[0] != 0:
				return status.Error(codes.Unimplemented, "compressed messages are not taken here")
			case st.length > st.conn.s.o.MaxMessage:
				return status.Errorf(codes.ResourceExhausted, "a message of %d bytes is larger than the %d that are taken", st.length, st.conn.s.o.MaxMessage)
			}
		}
		for len(p) > 0 && st.partial < len(st.prefix)+st.length {
			n := st.fill(p)
			st.took(n)
			p = p[n:]
		}
		if st.partial == len(st.prefix)+st.length {
			st.under.size = st.length
			st.messages = append(st.messages, st.under)
			st.under, st.partial = received{}, 0
		}
	}
	if len(st.messages) == 0 { // what is larger than the window must get through
		st.creditFor(st.under.owed)
		st.under.owed = 0
	}
	return nil
}

// took notes that n more bytes of the message under way have come.
func (st *stream) took(n int) {
	st.partial += n
	st.under.owed += int32(n)
}

// The first piece of a message's memory, and each further one at most.
const (
	firstPiece = 64 << 10
	maxPiece   = 1 << 20
)

// fill puts bytes into the message under way: the last piece, or a new one as large as all before it.
func (st *stream) fill(p []byte) int {
	have := st.partial - len(st.prefix)
	if len(st.under.pieces) > 0 {
		last := st.under.pieces[len(st.under.pieces)-1]
		if n := len(*last); n < cap(*last) {
			k := min(cap(*last)-n, len(p), st.length-have)
			*last = append(*last, p[:k]...)
			return k
		}
	}
	piece := st.conn.s.o.Pool.Get(min(st.length-have, max(firstPiece, min(have, maxPiece))))
	k := min(cap(*piece), len(p), st.length-have)
	*piece = append((*piece)[:0], p[:k]...)
	st.under.pieces = append(st.under.pieces, piece)
	return k
}

// creditFor notes that bytes were read, and lets the peer send as many more, if they are enough to be worth a frame. conn.mu is held.
func (st *stream) creditFor(n int32) {
	st.taken += n
	if st.taken > st.conn.s.o.StreamWindow/4 && !st.halfClosed && !st.ended {
		st.conn.out.windowUpdate(st.id, uint32(st.taken))
		st.credit += st.taken
		st.taken = 0
	}
}

// RecvMsg implements [google.golang.org/grpc.ServerStream].
func (st *stream) RecvMsg(m any) error {
	c := st.conn
	c.mu.Lock()
	for len(st.messages) == 0 {
		switch {
		case st.ended:
			c.mu.Unlock()
			return st.err()
		case st.halfClosed && st.partial > 0:
			c.mu.Unlock()
			return status.Error(codes.Internal, "the stream ended in the middle of a message")
		case st.halfClosed:
			c.mu.Unlock()
			return io.EOF
		}
		st.wait(&st.reader)
	}
	pieces, owed := st.messages[0].pieces, st.messages[0].owed
	if st.messages = st.messages[1:]; len(st.messages) == 0 { // what has come of the next one is all that the peer can get credit for
		owed += st.under.owed
		st.under.owed = 0
	}
	st.creditFor(owed)
	credited := owed > 0 && st.taken == 0
	c.mu.Unlock()
	if credited && !st.inline.Load() {
		c.flush()
	}
	var few [4]mem.Buffer
	data := mem.BufferSlice(few[:0])
	for _, p := range pieces {
		data = append(data, mem.SliceBuffer(*p))
	}
	err := c.s.o.Codec.Unmarshal(data, m)
	st.release(pieces)
	if err != nil {
		return status.Errorf(codes.Internal, "reading a message: %v", err)
	}
	return nil
}

// SendMsg implements [google.golang.org/grpc.ServerStream]. What it sends while the leader runs the handler is written when the handler
// returns or waits.
func (st *stream) SendMsg(m any) error {
	c := st.conn
	data, err := c.s.o.Codec.Marshal(m)
	if err != nil {
		return status.Errorf(codes.Internal, "writing a message: %v", err)
	}
	defer data.Free()
	n := data.Len()
	if n > c.s.o.MaxMessage {
		return status.Errorf(codes.ResourceExhausted, "a message of %d bytes is larger than the %d that are sent", n, c.s.o.MaxMessage)
	}
	c.mu.Lock()
	err = st.send(data, n)
	c.mu.Unlock()
	if !st.inline.Load() {
		c.flush()
	}
	return err
}

// send adds a message to what is written, as the windows allow. conn.mu is held.
func (st *stream) send(data mem.BufferSlice, n int) error {
	c := st.conn
	if st.ended {
		return st.err()
	}
	st.sendHeader()
	var prefix [5]byte
	binary.BigEndian.PutUint32(prefix[1:], uint32(n))
	rest := prefix[:]       // what of the message is to be sent next ...
	from := mem.Buffer(nil) // ... and where it lies
	for left := len(prefix) + n; left > 0; {
		room := int(min(int64(left), int64(c.peer.frame), st.window, c.window))
		if room <= 0 {
			c.waiting[st] = struct{}{}
			st.wait(&st.writer)
			delete(c.waiting, st)
			if st.ended {
				return st.err()
			}
			continue
		}
		st.window -= int64(room)
		c.window -= int64(room)
		left -= room
		c.out.frame(frameData, 0, st.id, room)
		for room > 0 {
			if len(rest) == 0 {
				from, data = data[0], data[1:]
				rest = from.ReadOnlyData()
				continue
			}
			k := min(room, len(rest))
			if from == nil {
				c.out.tail = append(c.out.tail, rest[:k]...)
			} else {
				c.out.part(rest[:k], from)
			}
			rest, room = rest[k:], room-k
		}
	}
	return nil
}

// SetHeader implements [google.golang.org/grpc.ServerStream].
func (st *stream) SetHeader(md metadata.MD) error {
	st.conn.mu.Lock()
	defer st.conn.mu.Unlock()
	if st.begun {
		return status.Error(codes.Internal, "headers were sent already")
	}
	st.header = metadata.Join(st.header, md)
	return nil
}

// SendHeader implements [google.golang.org/grpc.ServerStream].
func (st *stream) SendHeader(md metadata.MD) error {
	if err := st.SetHeader(md); err != nil {
		return err
	}
	st.conn.mu.Lock()
	if !st.ended {
		st.sendHeader()
	}
	st.conn.mu.Unlock()
	if !st.inline.Load() {
		st.conn.flush()
	}
	return nil
}

// SetTrailer implements [google.golang.org/grpc.ServerStream].
func (st *stream) SetTrailer(md metadata.MD) {
	st.conn.mu.Lock()
	defer st.conn.mu.Unlock()
	st.trailer = metadata.Join(st.trailer, md)
}

// sendHeader sends the headers, once. conn.mu is held.
func (st *stream) sendHeader() {
	if st.begun {
		return
	}
	st.begun = true
	block := appendMD(append(make([]byte, 0, 64), answered...), st.header)
	st.conn.out.headers(st.id, 0, block)
}

// forget gives back what was received and not read. conn.mu is held.
func (st *stream) forget() {
	for _, m := range st.messages {
		st.release(m.pieces)
	}
	st.release(st.under.pieces)
	st.messages, st.under = nil, received{}
}

func (st *stream) release(pieces []*[]byte) {
	for _, p := range pieces {
		st.conn.s.o.Pool.Put(p)
	}
}
