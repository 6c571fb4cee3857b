package rpc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// text is a codec whose messages are *string.
type text struct{}

func (text) Name() string { return "text" }

func (text) Marshal(v any) (mem.BufferSlice, error) {
	s, ok := v.(*string)
	if !ok {
		return nil, errors.New("no text")
	}
	return mem.BufferSlice{mem.SliceBuffer(*s)}, nil
}

func (text) Unmarshal(data mem.BufferSlice, v any) error {
	s := string(data.Materialize())
	if s == "unreadable" {
		return errors.New("as it says")
	}
	*v.(*string) = s
	return nil
}

// counted is a pool that knows what it has given away.
type counted struct {
	mu  sync.Mutex
	out map[*[]byte]bool
	bad string
}

func (p *counted) Get(n int) *[]byte {
	b := make([]byte, n)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.out == nil {
		p.out = map[*[]byte]bool{}
	}
	p.out[&b] = true
	return &b
}

func (p *counted) Put(b *[]byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.out[b] {
		p.bad = "given back twice"
	}
	delete(p.out, b)
	for i := range (*b)[:cap(*b)] { // who still reads it finds out
		(*b)[:cap(*b)][i] = 'X'
	}
}

func (p *counted) requireComplete(t testing.TB) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	require.Empty(t, p.bad)
	require.Empty(t, p.out, "buffers that were not given back")
}

// service is what the tests call: /t/NAME.
type service struct {
	release  chan struct{} // ends the waits of `wait`
	stubborn chan struct{} // and of `stubborn`
}

func receive(st grpc.ServerStream) (string, error) {
	var s string
	err := st.RecvMsg(&s)
	return s, err
}

func send(st grpc.ServerStream, s string) error { return st.SendMsg(&s) }

// mayWait is what a handler says before it waits for something other than its stream.
func mayWait(st grpc.ServerStream) { st.(interface{ MayWait() }).MayWait() }

// echo answers each message with itself.
func (*service) echo(st grpc.ServerStream) error {
	for {
		s, err := receive(st)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(st, s); err != nil {
			return err
		}
	}
}

// once answers the first message and ends.
func (*service) once(st grpc.ServerStream) error {
	s, err := receive(st)
	if err != nil {
		return err
	}
	return send(st, "re "+s)
}

// wait answers the first message after what it waits for.
func (v *service) wait(st grpc.ServerStream) error {
	s, err := receive(st)
	if err != nil {
		return err
	}
	mayWait(st)
	select {
	case <-v.release:
		return send(st, "re "+s)
	case <-st.Context().Done():
		return st.Context().Err()
	}
}

// stuck waits, whatever becomes of its stream.
func (v *service) stuck(st grpc.ServerStream) error {
	mayWait(st)
	<-v.stubborn
	return nil
}

// collect answers all messages with their number and length.
func (*service) collect(st grpc.ServerStream) error {
	n, sum := 0, 0
	for {
		s, err := receive(st)
		if errors.Is(err, io.EOF) {
			return send(st, fmt.Sprintf("%d of %d", n, sum))
		}
		if err != nil {
			return err
		}
		n, sum = n+1, sum+len(s)
	}
}

// late waits before it collects.
func (v *service) late(st grpc.ServerStream) error {
	mayWait(st)
	<-v.release
	return v.collect(st)
}

// push answers 3x100 with three messages of 100 bytes.
func (*service) push(st grpc.ServerStream) error {
	s, err := receive(st)
	if err != nil {
		return err
	}
	var n, size int
	if _, err := fmt.Sscanf(s, "%dx%d", &n, &size); err != nil || n < 0 || size < 0 || size > 16<<20 {
		return status.Error(codes.InvalidArgument, "no numbers")
	}
	for range n {
		if err := send(st, strings.Repeat("p", size)); err != nil {
			return err
		}
	}
	return nil
}

// fails ends with the code that it is told.
func (*service) fails(st grpc.ServerStream) error {
	s, err := receive(st)
	if err != nil {
		return err
	}
	code, err := strconv.Atoi(s)
	if err != nil {
		return err
	}
	return status.Error(codes.Code(code), "100% so: é")
}

// meta answers with a header and a trailer what it is sent.
func (*service) meta(st grpc.ServerStream) error {
	md, _ := metadata.FromIncomingContext(st.Context())
	if err := st.SetHeader(metadata.MD{"h": md["in"]}); err != nil {
		return err
	}
	if err := st.SendHeader(metadata.MD{"i": {"x"}}); err != nil {
		return err
	}
	if err := st.SetHeader(metadata.MD{"late": {"x"}}); status.Code(err) != codes.Internal {
		return errors.New("a header after the headers")
	}
	st.SetTrailer(metadata.MD{"t": {strings.Join(md["in"], "+")}})
	return nil
}

func (v *service) register(s grpc.ServiceRegistrar) {
	d := &grpc.ServiceDesc{ServiceName: "t", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{MethodName: "say",
		Handler: func(_ any, _ context.Context, dec func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
			var s string
			if err := dec(&s); err != nil {
				return nil, err
			}
			s = "said " + s
			return &s, nil
		}}}}
	for name, f := range map[string]func(grpc.ServerStream) error{"echo": v.echo, "once": v.once, "wait": v.wait, "collect": v.collect,
		"push": v.push, "who": v.who, "stubborn": v.stuck, "mix": v.mix, "late": v.late, "fails": v.fails, "meta": v.meta, "beside": v.echo} {
		d.Streams = append(d.Streams, grpc.StreamDesc{StreamName: name, ServerStreams: true, ClientStreams: true,
			Handler: func(_ any, st grpc.ServerStream) error { return f(st) }})
	}
	s.RegisterService(d, v)
}

// stand is a server under test.
type stand struct {
	*Server
	service service
	pool    counted
	served  chan error
}

// newStand makes a server of the test service: all inline but /t/beside.
func newStand(t testing.TB, o Options) *stand {
	s := &stand{service: service{release: make(chan struct{})}, served: make(chan error, 1)}
	o.Codec, o.Pool, o.Inline = text{}, &s.pool, func(m string) bool { return m != "/t/beside" }
	s.Server = New(o)
	s.service.register(s.Server)
	t.Cleanup(s.Stop)
	return s
}

func (s *stand) serve(l net.Listener) { go func() { s.served <- s.Serve(l) }() }

// pipe serves on memory with room for so many bytes each way, and connects to it.
func (s *stand) pipe(t testing.TB, room int) net.Conn {
	l := bufconn.Listen(room)
	s.serve(l)
	nc, err := l.Dial()
	require.NoError(t, err)
	return nc
}

// end stops the server and holds it to having left nothing.
func (s *stand) end(t testing.TB) {
	t.Helper()
	s.mu.Lock()
	var conns []*conn
	for c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	s.Stop()
	require.NoError(t, <-s.served)
	s.settled(t, conns...)
}
