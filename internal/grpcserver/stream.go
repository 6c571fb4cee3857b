package grpcserver

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"tandem/internal/memory"
)

// receipt is what a stream has been sent and what it has still to write. It is the stream's context too, which
// saves an allocation.
type receipt struct {
	context.Context // of the stream
	conn            *conn
	method          *method
	id              uint32

	// Of conn.mu:
	charged   int64     // bytes counted for all of it
	bytes     int64     // received and not handled
	began     time.Time // when the first of them came
	unsent    int64     // of replies that are not written
	sent      time.Time // when the first of these was sent
	over      bool      // refused ...
	overSince time.Time // ... then
	full      func()    // what its handler does then
	begun     bool      // serveStream has it
	first     pending   // of the first reply, which saves an allocation
	reset     bool      // by the peer
	ended     bool      // the handler has returned
}

type receiptKey struct{}

// Value implements [context.Context].
func (r *receipt) Value(key any) any {
	if key == (receiptKey{}) || memory.IsKey(key) {
		return r
	}
	return r.Context.Value(key)
}

// OnFull implements [memory.Notifier].
func (r *receipt) OnFull(f func()) {
	r.conn.mu.Lock()
	defer r.conn.mu.Unlock()
	if r.over {
		go f()
		return
	}
	r.full = f
}

// refuse has the handler answer. If the message does not end and the stream neither, [conn.sweep] closes the
// connection. conn.mu is held.
func (r *receipt) refuse(now time.Time) {
	r.over, r.overSince = true, now
	if r.full != nil {
		go r.full()
	}
}

// admit is asked for each stream before it has a goroutine.
func (s *Server) admit(ctx context.Context, info *tap.Info) (context.Context, error) {
	m := s.methods[info.FullMethodName]
	unknown := m == nil
	if unknown {
		m = &s.other
	}
	if m.open.Add(1) > m.limit {
		m.open.Add(-1)
		return nil, status.Errorf(codes.ResourceExhausted, "%d streams of %s are open, and no more are accepted", m.limit, info.FullMethodName)
	}
	p, _ := peer.FromContext(ctx)
	c := p.AuthInfo.(identity).conn
	r := &receipt{Context: ctx, conn: c, method: m, id: c.stream}
	c.mu.Lock()
	c.streams[r.id] = r
	c.idleSince.Store(0)
	c.mu.Unlock()
	if unknown { // its handler does not come from serveStream
		context.AfterFunc(ctx, r.end)
	}
	return r, nil
}

// charge counts n more bytes. conn.mu is held.
func (r *receipt) charge(n int64) {
	r.charged += n
	r.conn.held += n
	r.conn.s.o.Memory.Add(n)
}

// handled gives back a message that the handler has.
func (r *receipt) handled(n int64) {
	c := r.conn
	c.mu.Lock()
	n = min(n, r.bytes)
	r.over = false // it was received after all
	if r.bytes -= n; r.bytes > 0 {
		r.began = time.Now()
	} else {
		n = r.charged - r.unsent // with what the frames cost
	}
	r.charge(-n)
	c.mu.Unlock()
}

// end gives back what the handler has not read.
func (r *receipt) end() {
	c := r.conn
	c.mu.Lock()
	again := r.ended
	r.ended, r.bytes, r.full = true, 0, nil
	r.charge(r.unsent - r.charged)
	r.settle()
	c.mu.Unlock()
	if !again {
		r.method.open.Add(-1)
	}
}

// settle forgets a stream that is over. conn.mu is held.
func (r *receipt) settle() {
	c := r.conn
	if !r.ended || r.unsent > 0 || c.streams[r.id] != r {
		return
	}
	r.charge(-r.charged)
	delete(c.streams, r.id)
	if len(c.streams) == 0 {
		c.idleSince.Store(time.Now().UnixNano())
	}
}

// reply counts n bytes that are to be written, and returns a buffer that gives them back when it is freed; nil:
// nothing will be written.
func (r *receipt) reply(n int64) mem.Buffer {
	c := r.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.reset || c.closed {
		return nil
	}
	if r.unsent == 0 {
		r.sent = time.Now()
	}
	r.unsent += n
	r.charge(n)
	p := &r.first
	if p.r != nil {
		p = new(pending)
	}
	p.r, p.n = r, n
	return mem.NewBuffer(&mark, p)
}

// mark is an empty buffer, large enough that grpc-go gives it back to its pool.
var mark = make([]byte, 0, 2<<10)

// pending is the pool of the mark at the end of a reply, which is freed when all of the reply is written, or dropped.
type pending struct {
	r *receipt
	n int64
}

// Get is never called.
func (p *pending) Get(n int) *[]byte {
	b := make([]byte, n)
	return &b
}

// Put is called when the reply is gone.
func (p *pending) Put(*[]byte) {
	c := p.r.conn
	c.mu.Lock()
	n := min(p.n, p.r.unsent)
	p.r.unsent -= n
	p.r.charge(-n)
	p.r.settle()
	c.mu.Unlock()
}

// serveStream runs a handler with the stream's bytes counted.
func (s *Server) serveStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	r, _ := ss.Context().Value(receiptKey{}).(*receipt)
	if r.method == &s.other { // has an end of its own
		return handler(srv, ss)
	}
	r.conn.mu.Lock()
	r.begun = true
	r.conn.mu.Unlock()
	defer r.end()
	return handler(srv, &stream{ServerStream: ss, r: r})
}

// stream is a handler's.
type stream struct {
	grpc.ServerStream
	r   *receipt
	in  incoming
	out outgoing
}

func (st *stream) RecvMsg(m any) error {
	st.in = incoming{to: m}
	err := st.ServerStream.RecvMsg(&st.in)
	if err == nil {
		st.r.handled(int64(st.in.bytes) + 5) // with the message's prefix
	}
	return err
}

func (st *stream) SendMsg(m any) error {
	st.out = outgoing{m, st.r}
	return st.ServerStream.SendMsg(&st.out)
}

// incoming and outgoing are messages with what the codec is to note of them.
type incoming struct {
	to    any
	bytes int
}

type outgoing struct {
	message any
	r       *receipt
}

// noGzip refuses compressed messages: what one grows to cannot be counted before it has grown.
type noGzip struct{}

func (noGzip) Type() string { return "gzip" }

func (noGzip) Do(io.Reader) ([]byte, error) {
	return nil, errors.New("compressed messages are not accepted")
}

// codec counts messages.
type codec struct{ encoding.CodecV2 }

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	in, ok := v.(*incoming)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	in.bytes = data.Len()
	return c.CodecV2.Unmarshal(data, in.to)
}

func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	out, ok := v.(*outgoing)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	data, err := c.CodecV2.Marshal(out.message)
	if err != nil {
		return nil, err
	}
	if end := out.r.reply(int64(data.Len())); end != nil {
		data = append(data, end)
	}
	return data, nil
}
