package rpc

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// stream is one call. It implements [google.golang.org/grpc.ServerStream].
type stream struct {
	conn     *conn
	id       uint32
	set      *fieldSet
	method   *method
	inline   atomic.Bool // the leader runs it: what it sends, the leader writes
	timer    *time.Timer // of the peer's deadline
	deadline time.Time   // zero: none

	// Of conn.mu:
	running    bool          // its handler has been started
	halfClosed bool          // the peer will send no more
	begun      bool          // headers were sent
	ended      bool          // nothing is sent any more
	code       codes.Code    // with which
	credit     int32         // bytes the peer may still send
	taken      int32         // bytes that were read, and are not credited yet
	window     int64         // bytes the peer takes
	messages   []received    // and not read yet
	under      received      // the message that is under way
	prefix     [5]byte       // of it
	partial    int           // bytes of it that have come, with its prefix
	length     int           // that it is to have, without
	reader     chan struct{} // a handler waits for a message
	writer     chan struct{} // a handler waits for a window
	done       chan struct{} // of the context
	header     metadata.MD
	trailer    metadata.MD
}

// How streams end: by the peer's will, or otherwise.
const (
	canceled = codes.Canceled
	lost     = codes.Unavailable
)

// received is a message as it came.
type received struct {
	pieces []*[]byte
	size   int
	owed   int32 // bytes of the window that the peer gets back when it is read
}

// serve runs the handler.
func (st *stream) serve() {
	c, m := st.conn, st.method
	c.mu.Lock()
	if st.ended { // before its turn came
		c.handlers--
		st.forget()
		c.mu.Unlock()
		return
	}
	c.mu.Unlock()
	var err error
	if m.stream != nil {
		err = m.stream(m.impl, st)
	} else {
		err = st.unary()
	}
	c.mu.Lock()
	c.handlers--
	st.finish(err)
	st.forget()
	c.mu.Unlock()
	if !st.inline.Load() {
		c.flush()
	}
}

func (st *stream) unary() error {
	reply, err := st.method.unary(st.method.impl, st.Context(), st.RecvMsg, nil)
	if err != nil {
		return err
	}
	return st.SendMsg(reply)
}

// finish ends the stream with what its handler returned. conn.mu is held.
func (st *stream) finish(err error) {
	c := st.conn
	if st.ended {
		return
	}
	s, ok := status.FromError(err)
	if !ok {
		s = status.FromContextError(err)
	}
	c.out.trailers(st.id, st.begun, s, st.trailer)
	if !st.halfClosed {
		c.out.reset(st.id, http2.ErrCodeNo) // gRPC: the answer is complete, whatever more was to be asked
	}
	st.end(canceled)
	delete(c.streams, st.id)
}

// end makes everybody who waits for the stream give up. conn.mu is held.
func (st *stream) end(code codes.Code) {
	if st.ended {
		return
	}
	st.ended, st.code = true, code
	if st.timer != nil {
		st.timer.Stop()
	}
	if st.done != nil {
		close(st.done)
	}
	st.wake(&st.reader)
	st.wake(&st.writer)
	if !st.running {
		st.forget()
	}
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

// expire is the peer's deadline.
func (st *stream) expire() {
	c := st.conn
	c.mu.Lock()
	if !st.ended {
		c.out.trailers(st.id, st.begun, status.New(codes.DeadlineExceeded, "the caller's deadline has passed"), nil)
		c.out.reset(st.id, http2.ErrCodeNo)
		st.end(codes.DeadlineExceeded)
		delete(c.streams, st.id)
	}
	c.mu.Unlock()
	c.flush()
}

// wake ends a wait. conn.mu is held.
func (st *stream) wake(who *chan struct{}) {
	if *who != nil {
		close(*who)
		*who = nil
	}
}

// wait waits until it is woken. conn.mu is held before and after, and not meanwhile.
func (st *stream) wait(who *chan struct{}) {
	ch := make(chan struct{})
	*who = ch
	c := st.conn
	c.mu.Unlock()
	st.MayWait()
	c.flush() // what was sent before
	<-ch
	c.mu.Lock()
}

// MayWait tells the server that the handler is about to wait for something other than the stream: if it runs on the goroutine that
// reads the connection, another one reads from here on.
func (st *stream) MayWait() {
	if st.inline.CompareAndSwap(true, false) {
		c := st.conn
		c.flush()
		c.s.work(task{conn: c})
	}
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

func (st *stream) halfClose() {
	st.halfClosed = true
	if st.running {
		st.wake(&st.reader)
	}
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
	st.messages = st.messages[1:]
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

// err is why the stream has ended.
func (st *stream) err() error {
	switch st.code {
	case codes.DeadlineExceeded:
		return status.FromContextError(context.DeadlineExceeded).Err()
	case lost:
		return status.Error(lost, "the connection ended")
	}
	return status.FromContextError(context.Canceled).Err()
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

// Header blocks without references to the peer's table, so that their order does not matter: `:status: 200` and
// `content-type: application/grpc`.
const answered = "\x88\x0f\x10\x10application/grpc"

// headers adds a header block, in as many frames as it needs.
func (o *outgoing) headers(id uint32, flags http2.Flags, block []byte) {
	kind := frameHeaders
	for {
		n := min(len(block), minFrame)
		if n == len(block) {
			flags |= http2.FlagHeadersEndHeaders
		}
		o.frame(kind, flags, id, n)
		o.tail = append(o.tail, block[:n]...)
		if block = block[n:]; len(block) == 0 {
			return
		}
		kind, flags = http2.FrameContinuation, 0
	}
}

// trailers adds the end of a stream.
func (o *outgoing) trailers(id uint32, begun bool, s *status.Status, md metadata.MD) {
	o.control += 64
	block := make([]byte, 0, 128)
	if !begun {
		block = append(block, answered...)
	}
	block = appendField(block, "grpc-status", strconv.Itoa(int(s.Code())))
	if s.Message() != "" {
		block = appendField(block, "grpc-message", escape(s.Message()))
	}
	o.headers(id, http2.FlagHeadersEndStream, appendMD(block, md))
}

// plain adds the whole answer to what is no gRPC call.
func (o *outgoing) plain(id uint32, code int) {
	o.control += 32
	o.headers(id, http2.FlagHeadersEndStream, append([]byte{0x08, 3}, strconv.Itoa(code)...))
}

func appendMD(block []byte, md metadata.MD) []byte {
	for name, values := range md {
		for _, v := range values {
			block = appendField(block, name, v)
		}
	}
	return block
}

// appendField adds a literal field that goes into no table (RFC 7541, 6.2.2).
func appendField(b []byte, name, value string) []byte {
	b = append(b, 0)
	b = append(appendLength(b, len(name)), name...)
	return append(appendLength(b, len(value)), value...)
}

// appendLength adds a string's length, an integer with a prefix of seven bits (RFC 7541, 5.1).
func appendLength(b []byte, n int) []byte {
	if n < 127 {
		return append(b, byte(n))
	}
	b, n = append(b, 127), n-127
	for ; n >= 128; n >>= 7 {
		b = append(b, byte(n)|128)
	}
	return append(b, byte(n))
}

// escape writes a status message as gRPC wants it: what is not printable ASCII, and %, as %XX.
func escape(s string) string {
	var b []byte
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '%' {
			b = fmt.Appendf(b, "%%%02X", c)
		} else {
			b = append(b, c)
		}
	}
	return string(b)
}

// Context implements [google.golang.org/grpc.ServerStream].
func (st *stream) Context() context.Context { return (*streamContext)(st) }

// streamContext is a stream as its context.
type streamContext stream

func (x *streamContext) Deadline() (time.Time, bool) { return x.deadline, !x.deadline.IsZero() }

func (x *streamContext) Value(key any) any { return x.set.ctx.Value(key) }

func (x *streamContext) Done() <-chan struct{} {
	x.conn.mu.Lock()
	defer x.conn.mu.Unlock()
	if x.done == nil {
		x.done = make(chan struct{})
		if x.ended {
			close(x.done)
		}
	}
	return x.done
}

func (x *streamContext) Err() error {
	x.conn.mu.Lock()
	defer x.conn.mu.Unlock()
	switch {
	case !x.ended:
		return nil
	case x.code == codes.DeadlineExceeded:
		return context.DeadlineExceeded
	}
	return context.Canceled
}
