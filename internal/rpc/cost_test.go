package rpc

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"tandem/internal/budget"
)

// caller is a client that costs nothing: it sends the same call again and again, and counts ends.
type caller struct {
	t      testing.TB
	nc     net.Conn
	in     *bufio.Reader
	frames []byte // of one call
	batch  []byte
	id     uint32
}

func newCaller(t testing.TB, addr string) *caller {
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = nc.Close() })
	c := &caller{t: t, nc: nc, in: bufio.NewReaderSize(nc, 1<<16), id: 1}
	var out, block bytes.Buffer
	out.WriteString(http2.ClientPreface)
	fr, enc := http2.NewFramer(&out, nil), hpack.NewEncoder(&block)
	require.NoError(t, fr.WriteSettings())
	require.NoError(t, fr.WriteWindowUpdate(0, 1<<30))
	for range 2 { // the second refers to the first
		if c.id == 3 {
			out.Reset()
		}
		block.Reset()
		for _, f := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", "/t/once"}, {":authority", "tandem"}, {"te", "trailers"},
			{"content-type", "application/grpc"}, {"x-request-id", "the same one"}} {
			require.NoError(t, enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}))
		}
		require.NoError(t, fr.WriteHeaders(http2.HeadersFrameParam{StreamID: c.id, BlockFragment: block.Bytes(), EndHeaders: true}))
		require.NoError(t, fr.WriteData(c.id, true, message(string(make([]byte, 300)))))
		if c.id == 1 {
			_, err = nc.Write(out.Bytes())
			require.NoError(t, err)
			c.ends(1)
		}
		c.id += 2
	}
	c.frames = bytes.Clone(out.Bytes())
	return c
}

// call makes n calls at once and waits for their ends.
func (c *caller) call(n int) {
	c.batch = c.batch[:0]
	for range n {
		c.batch = append(c.batch, c.frames...)
		one := c.batch[len(c.batch)-len(c.frames):]
		for len(one) > 0 {
			binary.BigEndian.PutUint32(one[5:], c.id)
			one = one[9+int(one[1])<<8+int(one[2]):]
		}
		c.id += 2
	}
	if _, err := c.nc.Write(c.batch); err != nil {
		c.t.Fatal(err)
	}
	c.ends(n)
}

func (c *caller) ends(n int) {
	for n > 0 {
		head, err := c.in.Peek(9)
		if err != nil {
			c.t.Fatal(err)
		}
		if http2.FrameType(head[3]) == http2.FrameHeaders && http2.Flags(head[4]).Has(http2.FlagHeadersEndStream) {
			n--
		}
		if _, err := c.in.Discard(9 + int(head[1])<<8 + int(head[2])); err != nil {
			c.t.Fatal(err)
		}
	}
}

// serveOwn serves the test service with this package, serveGRPC with grpc-go's server, both as Tandem did and does.
func serveOwn(t testing.TB) string {
	s := New(Options{Codec: text{}, Pool: mem.DefaultBufferPool(), Inline: func(string) bool { return true }})
	new(service).register(s)
	t.Cleanup(s.Stop)
	return listen(t, s.Serve)
}

func serveGRPC(t testing.TB) string {
	s := grpc.NewServer(grpc.ForceServerCodecV2(text{}), grpc.MaxConcurrentStreams(1<<20), grpc.NumStreamWorkers(16),
		grpc.InitialWindowSize(16<<20), grpc.InitialConnWindowSize(64<<20))
	new(service).register(s)
	t.Cleanup(s.Stop)
	return listen(t, s.Serve)
}

func listen(t testing.TB, serve func(net.Listener) error) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = serve(l) }()
	return l.Addr().String()
}

// A stream costs its object and what its messages and the status cost; no timer, channel, goroutine or context.
func TestStreamAllocs(t *testing.T) {
	c := newCaller(t, serveOwn(t))
	budget.Allocs(t, 200, 16, func() { c.call(1) })
}

// Sixteen streams at a time, as a loaded Envoy has them, and one, which waits for every wake-up.
func BenchmarkStream(b *testing.B) {
	for name, serve := range map[string]func(testing.TB) string{"own": serveOwn, "grpc-go": serveGRPC} {
		for at, n := range map[string]int{"1": 1, "16": 16} {
			b.Run(name+"/"+at, func(b *testing.B) {
				c := newCaller(b, serve(b))
				b.ReportAllocs()
				before := time.Now()
				for i := 0; i < b.N; i += n {
					c.call(n)
				}
				b.ReportMetric(float64(b.N)/time.Since(before).Seconds(), "streams/s")
			})
		}
	}
}
