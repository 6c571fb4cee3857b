package grpcserver

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/encoding/gzip" // as the traces' exporter does
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"tandem/internal/memory"
)

// raw is a codec of byte slices.
type raw struct{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(bytes.Clone(*v.(*[]byte)))}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// Methods of the service under test.
const (
	echo = "/test.Service/Echo" // answers each message with itself
	idle = "/test.Service/Idle" // reads and answers nothing until its stream ends
)

// stand is a server and the results of its handlers.
type stand struct {
	*Server
	t     testing.TB
	addr  string
	ended chan error // of Echo
	full  chan bool  // of Echo, for each stream that was refused
}

func newStand(t testing.TB, o Options) *stand {
	t.Helper()
	o.Codec, o.Pool = raw{}, mem.DefaultBufferPool()
	if o.MethodStreams == nil {
		o.MethodStreams = map[string]int{echo: 1 << 16, idle: 1 << 16}
	}
	s := &stand{Server: New(o), t: t, ended: make(chan error, 1<<16), full: make(chan bool, 1<<16)}
	s.RegisterService(&grpc.ServiceDesc{ServiceName: "test.Service", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{
		{StreamName: "Echo", ServerStreams: true, ClientStreams: true, Handler: func(_ any, st grpc.ServerStream) error {
			st = &careful{ServerStream: st}
			memory.OnFull(st.Context(), func() {
				busy := []byte("busy")
				_ = st.SendMsg(&busy)
				s.full <- true
			})
			err := answer(st)
			select {
			case s.ended <- err:
			default: // the test does not read it
			}
			return err
		}},
		{StreamName: "Idle", ServerStreams: true, ClientStreams: true, Handler: func(_ any, st grpc.ServerStream) error {
			<-st.Context().Done()
			return nil
		}},
	}}, nil)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.addr = l.Addr().String()
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return s
}

// careful sends one message at a time, as gRPC expects.
type careful struct {
	grpc.ServerStream
	mu sync.Mutex
}

func (c *careful) SendMsg(m any) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ServerStream.SendMsg(m)
}

func answer(st grpc.ServerStream) error {
	for {
		var m []byte
		if err := st.RecvMsg(&m); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		if err := st.SendMsg(&m); err != nil {
			return err
		}
	}
}

// served requires that a well-behaved client is served at the same time.
func (s *stand) served() {
	s.t.Helper()
	conn, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(raw{})))
	require.NoError(s.t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	st, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, echo, grpc.WaitForReady(true))
	require.NoError(s.t, err)
	sent, got := []byte("well?"), []byte(nil)
	require.NoError(s.t, st.SendMsg(&sent))
	require.NoError(s.t, st.RecvMsg(&got))
	require.Equal(s.t, sent, got)
	require.NoError(s.t, st.CloseSend())
	require.ErrorIs(s.t, st.RecvMsg(&got), io.EOF)
}

// soon waits until is returns true, however slow the machine.
func (s *stand) soon(is func() bool) {
	s.t.Helper()
	require.Eventually(s.t, is, time.Minute, 5*time.Millisecond)
}

// attacker is a peer that sends arbitrary frames.
type attacker struct {
	t      testing.TB
	conn   net.Conn
	framer *http2.Framer
	next   uint32
	read   chan struct{} // closed when the server has closed the connection
}

// attack connects. With reads the attacker reads its input, and ignores all but window updates.
func (s *stand) attack(reads bool, settings ...http2.Setting) *attacker {
	s.t.Helper()
	conn, err := net.Dial("tcp", s.addr)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	a := &attacker{t: s.t, conn: conn, framer: http2.NewFramer(conn, conn), next: 1, read: make(chan struct{})}
	_, err = io.WriteString(conn, http2.ClientPreface)
	require.NoError(s.t, err)
	require.NoError(s.t, a.framer.WriteSettings(settings...))
	if reads {
		go func() {
			_, _ = io.Copy(io.Discard, conn)
			close(a.read)
		}()
	}
	return a
}

// open begins a stream, with more headers, and returns its id.
func (a *attacker) open(method string, more ...hpack.HeaderField) (uint32, error) {
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	for _, f := range append([]hpack.HeaderField{{Name: ":method", Value: "POST"}, {Name: ":scheme", Value: "http"}, {Name: ":path", Value: method},
		{Name: ":authority", Value: "x"}, {Name: "content-type", Value: "application/grpc"}, {Name: "te", Value: "trailers"}}, more...) {
		_ = e.WriteField(f)
	}
	id := a.next
	a.next += 2
	return id, a.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true})
}

// unfinished sends n bytes of a message of size bytes.
func (a *attacker) unfinished(id uint32, size, n int) error {
	b := append([]byte{0, byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size)}, make([]byte, n)...)
	for len(b) > 0 {
		k := min(len(b), 16<<10)
		if err := a.framer.WriteData(id, false, b[:k]); err != nil {
			return err
		}
		b = b[k:]
	}
	return nil
}

// closed waits until the server has closed the connection.
func (a *attacker) closed() {
	a.t.Helper()
	select {
	case <-a.read:
	case <-time.After(time.Minute):
		require.Fail(a.t, "the connection is still open")
	}
}

// Unfinished messages are counted as they arrive. The stream that exceeds the connection's share is refused, and the
// connection ended if its peer continues.
func TestUnfinishedMessagesAreCountedAndBounded(t *testing.T) {
	budget := memory.New(4 << 20)
	s := newStand(t, Options{Memory: budget, MaxMessage: 1 << 20, StuckTime: 2 * time.Second})
	a := s.attack(true)
	for range 7 { // 1.4 MiB, of a share of 1
		id, err := a.open(echo)
		require.NoError(t, err)
		require.NoError(t, a.unfinished(id, 1<<20, 200<<10))
	}
	s.soon(func() bool { return budget.Load() > 1400<<10 })
	require.Less(t, budget.Load(), int64(1500<<10))
	s.soon(func() bool { return len(s.full) == 2 })
	s.served()
	require.NoError(t, <-s.ended, "of the client with good manners")
	a.closed() // the refused streams continue
	s.soon(func() bool { return budget.Load() == 0 })

	a = s.attack(true)
	for range 64 { // far beyond
		id, err := a.open(echo)
		if err != nil || a.unfinished(id, 1<<20, 900<<10) != nil {
			break
		}
		require.LessOrEqual(t, budget.Load(), int64(3<<20))
	}
	a.closed()
	s.served()
	s.soon(func() bool { return budget.Load() == 0 && s.Held() == 0 })
}

// If many connections together fill the budget, those with little memory are served.
func TestSmallConnectionsAreServed(t *testing.T) {
	budget := memory.New(8 << 20)
	s := newStand(t, Options{Memory: budget, MaxMessage: 1 << 20})
	for range 16 { // with 15 MiB, of 6 that unfinished messages may take
		a := s.attack(true)
		id, err := a.open(echo)
		require.NoError(t, err)
		_ = a.unfinished(id, 1<<20, 960<<10)
	}
	s.soon(func() bool { return budget.Load() > 6<<20 && len(s.full) > 5 })
	for range 10 {
		s.served()
	}
}

// A message below the limits is counted while it arrives, and released when its handler has it.
func TestReceivedBytesAreCounted(t *testing.T) {
	budget := memory.New(4 << 20)
	s := newStand(t, Options{Memory: budget, MaxMessage: 1 << 20})
	a := s.attack(true)
	id, err := a.open(echo)
	require.NoError(t, err)
	require.NoError(t, a.unfinished(id, 100<<10, 60<<10))
	s.soon(func() bool { return budget.Load() > 60<<10 })
	require.Less(t, budget.Load(), int64(62<<10))
	require.NoError(t, a.framer.WriteData(id, false, make([]byte, 16<<10)))
	require.NoError(t, a.framer.WriteData(id, false, make([]byte, 16<<10)))
	require.NoError(t, a.framer.WriteData(id, true, make([]byte, 8<<10)))
	select {
	case err := <-s.ended:
		require.NoError(t, err)
	case <-time.After(time.Minute):
		require.Fail(t, "the message is complete, and was not handled")
	}
	// The peer's window is 64 KiB: the unwritten part of the reply stays counted until the peer takes it.
	s.soon(func() bool { return budget.Load() == 100<<10 })
	require.NoError(t, a.framer.WriteWindowUpdate(id, 1<<20))
	require.NoError(t, a.framer.WriteWindowUpdate(0, 1<<20))
	s.soon(func() bool { return budget.Load() == 0 })
}

// A reply that its peer does not take is counted, and the peer is disconnected.
func TestAZeroWindowEndsTheConnection(t *testing.T) {
	budget := memory.New(64 << 20)
	s := newStand(t, Options{Memory: budget, MaxMessage: 1 << 20, StuckTime: 2 * time.Second})
	a := s.attack(true, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	id, err := a.open(echo)
	require.NoError(t, err)
	require.NoError(t, a.unfinished(id, 512<<10, 512<<10))
	s.soon(func() bool { return budget.Load() == 512<<10 })
	s.served()
	a.closed()
	s.soon(func() bool { return budget.Load() == 0 })
}

// A stream that its peer resets releases its reply.
func TestAResetGivesTheReplyBack(t *testing.T) {
	budget := memory.New(64 << 20)
	s := newStand(t, Options{Memory: budget, MaxMessage: 1 << 20})
	a := s.attack(true, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
	id, err := a.open(echo)
	require.NoError(t, err)
	require.NoError(t, a.unfinished(id, 512<<10, 512<<10))
	s.soon(func() bool { return budget.Load() == 512<<10 })
	require.NoError(t, a.framer.WriteRSTStream(id, http2.ErrCodeCancel))
	s.soon(func() bool { return budget.Load() == 0 })
}

// Too many frames without a request end the connection, and no reply is queued without bound.
func TestFloods(t *testing.T) {
	for name, frame := range map[string]func(a *attacker) error{
		"SETTINGS": func(a *attacker) error {
			return a.framer.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 16})
		},
		"PING":            func(a *attacker) error { return a.framer.WritePing(false, [8]byte{}) },
		"WINDOW_UPDATE":   func(a *attacker) error { return a.framer.WriteWindowUpdate(0, 1) },
		"RST_STREAM":      func(a *attacker) error { return a.framer.WriteRSTStream(1, http2.ErrCodeCancel) },
		"empty DATA":      func(a *attacker) error { return a.framer.WriteData(1, false, nil) },
		"PRIORITY":        func(a *attacker) error { return a.framer.WritePriority(1, http2.PriorityParam{StreamDep: 3}) },
		"of unknown kind": func(a *attacker) error { return a.framer.WriteRawFrame(0xbe, 0, 1, nil) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStand(t, Options{})
			a := s.attack(true)
			_, err := a.open(idle)
			require.NoError(t, err)
			for range 20_000 {
				if frame(a) != nil {
					break
				}
			}
			a.closed()
			s.served()
		})
	}
}

// An endless header block, and one whose few bytes expand to many, are not kept.
func TestHeadersAreBounded(t *testing.T) {
	t.Run("CONTINUATION", func(t *testing.T) {
		s := newStand(t, Options{})
		a := s.attack(true)
		require.NoError(t, a.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: []byte{0x82}}))
		var block bytes.Buffer
		e := hpack.NewEncoder(&block)
		e.SetMaxDynamicTableSize(0)
		for range 100 {
			_ = e.WriteField(hpack.HeaderField{Name: "x-many", Value: string(make([]byte, 100))})
		}
		for range 20_000 {
			if a.framer.WriteContinuation(1, false, block.Bytes()) != nil {
				break
			}
		}
		a.closed()
		s.served()
	})
	t.Run("HPACK bomb", func(t *testing.T) {
		s := newStand(t, Options{})
		a := s.attack(true)
		var more []hpack.HeaderField
		for range 1000 { // of a byte each, after the first
			more = append(more, hpack.HeaderField{Name: "x-bomb", Value: string(make([]byte, 3000))})
		}
		_, err := a.open(echo, more...)
		require.NoError(t, err)
		s.served()
		require.Len(t, s.ended, 1, "only the handler of the client with good manners has run")
	})
}

// Streams of one method are bounded over all connections, and excess ones are refused without a goroutine.
func TestStreamsOfAMethodAreBounded(t *testing.T) {
	s := newStand(t, Options{MethodStreams: map[string]int{idle: 100, echo: 10}})
	for range 3 {
		a := s.attack(true)
		for range 100 {
			_, err := a.open(idle)
			require.NoError(t, err)
		}
	}
	m := s.methods[idle]
	s.soon(func() bool { return m.open.Load() == m.limit })
	open, last := s.Server.Streams(idle)
	require.Equal(t, 100, open)
	require.WithinDuration(t, time.Now(), last, time.Minute)
	open, last = s.Server.Streams(echo)
	require.Zero(t, open)
	require.Zero(t, last, "there was never one")
	s.served()
	conn, err := grpc.NewClient(s.addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(raw{})))
	require.NoError(t, err)
	defer conn.Close()
	st, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, idle)
	require.NoError(t, err)
	var got []byte
	require.Equal(t, codes.ResourceExhausted, status.Code(st.RecvMsg(&got)))
}

// Compressed messages are refused before they grow.
func TestCompressedMessagesAreRefused(t *testing.T) {
	s := newStand(t, Options{})
	a := s.attack(true)
	for _, kind := range []string{"gzip", "unknown"} {
		id, err := a.open(echo, hpack.HeaderField{Name: "grpc-encoding", Value: kind})
		require.NoError(t, err)
		var zipped bytes.Buffer
		w := gzip.NewWriter(&zipped)
		_, _ = w.Write(make([]byte, 1<<20))
		require.NoError(t, w.Close())
		require.NoError(t, a.framer.WriteData(id, true, append([]byte{1, 0, 0, byte(zipped.Len() >> 8), byte(zipped.Len())}, zipped.Bytes()...)))
	}
	require.ErrorContains(t, <-s.ended, "compressed messages are not accepted")
	s.served()
	s.soon(func() bool { return s.methods[echo].open.Load() == 0 })
}

// If there are too many connections, those that have been without streams for longest are closed.
func TestConnectionsAreBounded(t *testing.T) {
	s := newStand(t, Options{Connections: 50})
	busy := s.attack(true)
	_, err := busy.open(idle)
	require.NoError(t, err)
	s.soon(func() bool { return s.methods[idle].open.Load() == 1 })
	for range 200 {
		s.attack(true)
	}
	s.served()
	require.LessOrEqual(t, len(s.connections()), 50)
	require.EqualValues(t, 1, s.methods[idle].open.Load(), "a connection with a stream stays")
}

// A peer that does not begin is disconnected.
func TestHandshakesThatStall(t *testing.T) {
	s := newStand(t, Options{ConnectTime: time.Second})
	conn, err := net.Dial("tcp", s.addr)
	require.NoError(t, err)
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
	_, err = io.Copy(io.Discard, conn)
	require.NoError(t, err, "closed by the server")
	s.soon(func() bool { return len(s.connections()) == 0 })
}

// The bytes counted for a stream do not outlive it, however it ends.
func TestNothingIsLeft(t *testing.T) {
	budget := memory.New(64 << 20)
	s := newStand(t, Options{Memory: budget})
	a := s.attack(true)
	for i := range 300 {
		var more []hpack.HeaderField
		if i%5 == 4 {
			more = append(more, hpack.HeaderField{Name: "grpc-timeout", Value: "1n"})
		}
		id, err := a.open([]string{echo, idle, "/no/Method"}[i%3], more...)
		require.NoError(t, err)
		require.NoError(t, a.unfinished(id, 2000, 100+i))
		if i%2 == 0 {
			require.NoError(t, a.framer.WriteRSTStream(id, http2.ErrCodeCancel))
		}
	}
	_ = a.conn.Close()
	s.soon(func() bool {
		return budget.Load() == 0 && s.other.open.Load() == 0 && s.methods[echo].open.Load() == 0 && s.methods[idle].open.Load() == 0
	})
}

// One connection gets a sixteenth of a method's streams: others are served beside one that takes all it gets.
func TestOneConnectionLeavesStreamsToOthers(t *testing.T) {
	s := newStand(t, Options{MethodStreams: map[string]int{idle: 1600, echo: 1600}})
	a := s.attack(true)
	for range 1600 {
		_, err := a.open(idle)
		require.NoError(t, err)
	}
	m := s.methods[idle]
	s.soon(func() bool { return m.open.Load() == 100 })
	b := s.attack(true)
	_, err := b.open(idle)
	require.NoError(t, err)
	s.soon(func() bool { return m.open.Load() == 101 })
	require.NoError(t, a.conn.Close())
	s.soon(func() bool { return m.open.Load() == 1 })
	s.served()
}
