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

// receipt counts a stream's received and unwritten bytes. It is the stream's context too, which saves an allocation.
type receipt struct {
	context.Context // of the stream
	conn            *conn
	method          *method
	id              uint32

	// Guarded by conn.mu:
	charged   int64     // total bytes charged
	bytes     int64     // received and not handled
	began     time.Time // arrival of the first of them
	unsent    int64     // of replies that are not written
	sent      time.Time // time of the first of these
	over      bool      // refused ...
	overSince time.Time // ... then
	full      func()    // called when the stream is refused
	begun     bool      // serveStream has taken it over
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

// refuse makes the handler answer. If neither the message nor the stream ends, [conn.sweep] closes the
// connection. conn.mu is held.
func (r *receipt) refuse(now time.Time) {
	r.over, r.overSince = true, now
	if r.full != nil {
		go r.full()
	}
}

// admit is called for each stream before it has a goroutine.
func (s *Server) admit(ctx context.Context, info *tap.Info) (context.Context, error) {
	m := s.methods[info.FullMethodName]
	unknown := m == nil
	if unknown {
		m = &s.other
	}
	if m.open.Add(1) > m.limit {
		m.open.Add(-1)
		return nil, status.Errorf(codes.ResourceExhausted, "%d streams of %s are open, and no more are accepted",
			m.limit, info.FullMethodName)
	}
	p, _ := peer.FromContext(ctx)
	c := p.AuthInfo.(identity).conn
	r := &receipt{Context: ctx, conn: c, method: m, id: c.stream}
	c.mu.Lock()
	if c.taken[m] >= m.share() {
		c.mu.Unlock()
		m.open.Add(-1)
		return nil, status.Errorf(codes.ResourceExhausted, "this connection has %d streams of %s, and gets no more",
			m.share(), info.FullMethodName)
	}
	c.taken[m]++
	c.streams[r.id] = r
	c.idleSince.Store(0)
	c.mu.Unlock()
	if unknown { // serveStream does not run its handler
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

// handled releases the bytes of a message that the handler has.
func (r *receipt) handled(n int64) {
	c := r.conn
	c.mu.Lock()
	n = min(n, r.bytes)
	r.over = false // it was received after all
	if r.bytes -= n; r.bytes > 0 {
		r.began = time.Now()
	} else {
		n = r.charged - r.unsent // including the frames' overhead
	}
	r.charge(-n)
	c.mu.Unlock()
}

// end releases the bytes that the handler has not read.
func (r *receipt) end() {
	c := r.conn
	c.mu.Lock()
	again := r.ended
	r.ended, r.bytes, r.full = true, 0, nil
	r.charge(r.unsent - r.charged)
	r.settle()
	if !again {
		c.taken[r.method]--
	}
	c.mu.Unlock()
	if !again {
		if r.method.open.Add(-1) == 0 {
			r.method.left.Store(time.Now().UnixNano())
		}
	}
}

// settle removes a stream that is over. conn.mu is held.
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

// reply charges n bytes that are to be written, and returns a buffer that releases them when it is freed; nil: nothing
// will be written.
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

// mark is an empty buffer, large enough that grpc-go returns it to its pool.
var mark = make([]byte, 0, 2<<10)

// pending is the pool of the mark at the end of a reply. The mark is freed when all of the reply is written, or
// dropped.
type pending struct {
	r *receipt
	n int64
}

// Get is never called.
func (p *pending) Get(n int) *[]byte {
	b := make([]byte, n)
	return &b
}

// Put is called when the reply is written or dropped.
func (p *pending) Put(*[]byte) {
	c := p.r.conn
	c.mu.Lock()
	n := min(p.n, p.r.unsent)
	p.r.unsent -= n
	p.r.charge(-n)
	p.r.settle()
	c.mu.Unlock()
}

// serveStream runs a handler and counts the stream's bytes.
func (s *Server) serveStream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo,
	handler grpc.StreamHandler) error {
	r, _ := ss.Context().Value(receiptKey{}).(*receipt)
	if r.method == &s.other { // ends like the other methods' streams
		return handler(srv, ss)
	}
	r.conn.mu.Lock()
	r.begun = true
	r.conn.mu.Unlock()
	defer r.end()
	return handler(srv, &stream{ServerStream: ss, r: r})
}

// stream wraps a handler's stream.
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
		st.r.handled(int64(st.in.bytes) + 5) // including the message's prefix
	}
	return err
}

func (st *stream) SendMsg(m any) error {
	st.out = outgoing{m, st.r}
	return st.ServerStream.SendMsg(&st.out)
}

// incoming and outgoing are messages with the sizes that the codec records.
type incoming struct {
	to    any
	bytes int
}

type outgoing struct {
	message any
	r       *receipt
}

// noGzip refuses compressed messages: their uncompressed size cannot be counted in advance.
type noGzip struct{}

func (noGzip) Type() string { return "gzip" }

func (noGzip) Do(io.Reader) ([]byte, error) {
	return nil, errors.New("compressed messages are not accepted")
}

// codec records the sizes of messages.
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
