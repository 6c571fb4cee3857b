package rpc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// client is grpc-go's, over TCP.
type client struct {
	*stand
	t    testing.TB
	conn *grpc.ClientConn
	addr string
}

// newClient starts a server and connects to it. At the test's end the server must have nothing left of it.
func newClient(t testing.TB, o Options, more ...grpc.DialOption) *client {
	t.Helper()
	s := newStand(t, o)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s.serve(l)
	conn, err := grpc.NewClient("passthrough:///"+l.Addr().String(), append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(text{}), grpc.MaxCallRecvMsgSize(64<<20), grpc.MaxCallSendMsgSize(64<<20))}, more...)...)
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = conn.Close()
		s.GracefulStop()
		require.NoError(t, <-s.served)
		require.Eventually(t, func() bool { return s.idle.Load() == 0 }, 10*time.Second, time.Millisecond)
		s.pool.requireComplete(t)
	})
	return &client{s, t, conn, l.Addr().String()}
}

func (c *client) stream(ctx context.Context, method string, more ...grpc.CallOption) grpc.ClientStream {
	c.t.Helper()
	st, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method, more...)
	require.NoError(c.t, err)
	return st
}

func tell(t testing.TB, st grpc.ClientStream, s string) {
	t.Helper()
	require.NoError(t, st.SendMsg(&s))
}

func hear(t testing.TB, st grpc.ClientStream) string {
	t.Helper()
	var s string
	require.NoError(t, st.RecvMsg(&s))
	return s
}

// codeAfter is how a stream ends, of which nothing more is expected.
func codeAfter(t testing.TB, st grpc.ClientStream) codes.Code {
	t.Helper()
	var s string
	err := st.RecvMsg(&s)
	require.Error(t, err)
	if errors.Is(err, io.EOF) {
		return codes.OK
	}
	return status.Code(err)
}

func TestClientCalls(t *testing.T) {
	c := newClient(t, Options{})
	ctx := t.Context()

	in, out := "x", ""
	require.NoError(t, c.conn.Invoke(ctx, "/t/say", &in, &out))
	require.Equal(t, "said x", out)
	require.Equal(t, codes.Unimplemented, status.Code(c.conn.Invoke(ctx, "/t/none", &in, &out)))
	require.Equal(t, codes.Unimplemented, status.Code(c.conn.Invoke(ctx, "/t/say", &in, &out, grpc.UseCompressor(gzip.Name))))

	st := c.stream(ctx, "/t/collect")
	for range 1000 {
		tell(t, st, "0123456789")
	}
	require.NoError(t, st.CloseSend())
	require.Equal(t, "1000 of 10000", hear(t, st))
	require.Equal(t, codes.OK, codeAfter(t, st))

	st = c.stream(ctx, "/t/push")
	tell(t, st, "1000x1000")
	for range 1000 {
		require.Len(t, hear(t, st), 1000)
	}
	require.Equal(t, codes.OK, codeAfter(t, st))

	for _, method := range []string{"/t/echo", "/t/beside"} {
		st = c.stream(ctx, method)
		for i := range 100 {
			tell(t, st, fmt.Sprint(i))
			require.Equal(t, fmt.Sprint(i), hear(t, st))
		}
		require.NoError(t, st.CloseSend())
		require.Equal(t, codes.OK, codeAfter(t, st))
	}

	st = c.stream(ctx, "/t/fails")
	tell(t, st, "7")
	var s string
	err := st.RecvMsg(&s)
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	require.Equal(t, "100% so: é", status.Convert(err).Message())

	st = c.stream(metadata.AppendToOutgoingContext(ctx, "in", "a", "in", "b"), "/t/meta")
	require.NoError(t, st.CloseSend())
	header, err := st.Header()
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b"}, header["h"])
	require.Equal(t, codes.OK, codeAfter(t, st))
	require.Equal(t, []string{"a+b"}, st.Trailer()["t"])
}

// However large a message is, and however small the windows, it arrives, both ways and beside others.
func TestClientLargeMessages(t *testing.T) {
	for _, window := range []int32{0, 1 << 16} { // 16 MiB, and the least
		c := newClient(t, Options{MaxMessage: 8 << 20, StreamWindow: window, ConnWindow: window})
		large := strings.Repeat("0123456789abcdef", 8<<20/16)
		var all sync.WaitGroup
		for _, method := range []string{"/t/echo", "/t/beside", "/t/echo"} {
			all.Go(func() {
				st := c.stream(t.Context(), method)
				tell(t, st, "small")
				tell(t, st, large)
				tell(t, st, "small")
				require.Equal(t, "small", hear(t, st))
				require.True(t, large == hear(t, st)) //nolint:testifylint // 8 MB are not to be printed
				require.Equal(t, "small", hear(t, st))
				require.NoError(t, st.CloseSend())
				require.Equal(t, codes.OK, codeAfter(t, st))
			})
		}
		all.Wait()

		st := c.stream(t.Context(), "/t/echo")
		_ = st.SendMsg(new(large + "x"))
		require.Equal(t, codes.ResourceExhausted, codeAfter(t, st))
		st = c.stream(t.Context(), "/t/push")
		tell(t, st, fmt.Sprintf("1x%d", 8<<20+1))
		require.Equal(t, codes.ResourceExhausted, codeAfter(t, st))
	}
}

func TestClientManyStreams(t *testing.T) {
	c := newClient(t, Options{})
	var all sync.WaitGroup
	for i := range 200 {
		all.Go(func() {
			method := "/t/echo"
			if i%3 == 0 {
				method = "/t/beside"
			}
			st := c.stream(t.Context(), method)
			for j := range 50 {
				s := strings.Repeat(fmt.Sprint(i), j*i%1000)
				tell(t, st, s)
				require.Equal(t, s, hear(t, st))
			}
			require.NoError(t, st.CloseSend())
			require.Equal(t, codes.OK, codeAfter(t, st))
		})
	}
	all.Wait()
}

func TestClientGivesUp(t *testing.T) {
	c := newClient(t, Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	st := c.stream(ctx, "/t/wait")
	tell(t, st, "x")
	require.Equal(t, codes.DeadlineExceeded, codeAfter(t, st))

	ctx, cancel = context.WithCancel(t.Context())
	st = c.stream(ctx, "/t/wait")
	tell(t, st, "x")
	cancel()
	require.Equal(t, codes.Canceled, codeAfter(t, st))

	st = c.stream(t.Context(), "/t/once")
	tell(t, st, "still there?")
	require.Equal(t, "re still there?", hear(t, st))
}

// A handler sees who calls it: the address and, with TLS, the certificate.
func TestClientTLS(t *testing.T) {
	ca, key := certificate(t, "authority", nil, nil)
	server, serverKey := certificate(t, "server", ca, key)
	caller, callerKey := certificate(t, "caller", ca, key)
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	serverTLS := &tls.Config{NextProtos: []string{"h2"}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
		Certificates: []tls.Certificate{{Certificate: [][]byte{server.Raw}, PrivateKey: serverKey}}}
	clientTLS := &tls.Config{RootCAs: pool, ServerName: "server",
		Certificates: []tls.Certificate{{Certificate: [][]byte{caller.Raw}, PrivateKey: callerKey}}}

	c := newClient(t, Options{TLS: serverTLS, MaxMessage: 8 << 20}, grpc.WithTransportCredentials(credentials.NewTLS(clientTLS)))
	st := c.stream(t.Context(), "/t/who")
	tell(t, st, "")
	require.Equal(t, "127.0.0.1 caller", hear(t, st))

	large := strings.Repeat("x", 4<<20)
	st = c.stream(t.Context(), "/t/echo")
	tell(t, st, large)
	require.Len(t, hear(t, st), len(large))
	require.NoError(t, st.CloseSend())
	require.Equal(t, codes.OK, codeAfter(t, st))

	// Neither who does not speak h2 gets in nor who is not known.
	for _, wrong := range []*tls.Config{
		{RootCAs: pool, ServerName: "server", Certificates: clientTLS.Certificates},
		{RootCAs: pool, ServerName: "server", NextProtos: []string{"h2"}},
	} {
		nc, err := tls.Dial("tcp", c.addr, wrong)
		if err == nil {
			_, err = nc.Read(make([]byte, 1))
		}
		require.Error(t, err)
	}
}

// who answers who the peer is.
func (*service) who(st grpc.ServerStream) error {
	if _, err := receive(st); err != nil {
		return err
	}
	p, _ := peer.FromContext(st.Context())
	host, _, _ := net.SplitHostPort(p.Addr.String())
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return send(st, host)
	}
	return send(st, host+" "+info.State.VerifiedChains[0][0].Subject.CommonName)
}

func certificate(t *testing.T, name string, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotAfter: time.Now().Add(time.Hour), IsCA: parent == nil, BasicConstraintsValid: true}
	if parent == nil {
		parent, parentKey = c, key
	}
	raw, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, parentKey)
	require.NoError(t, err)
	c, err = x509.ParseCertificate(raw)
	require.NoError(t, err)
	return c, key
}

// However a peer cuts what it says, and however little of it comes alone, it is answered: nobody waits for bytes that the system keeps back (SO_RCVLOWAT).
func TestDribble(t *testing.T) {
	c := newClient(t, Options{})
	nc, err := net.Dial("tcp", c.addr)
	require.NoError(t, err)
	defer nc.Close()
	require.NoError(t, nc.(*net.TCPConn).SetNoDelay(true))
	p := newRawPeer(t, nc)
	answered := func(last string) {
		t.Helper()
		require.Eventually(t, func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return len(p.said) > 0 && p.said[len(p.said)-1] == last
		}, 10*time.Second, time.Millisecond, last)
		p.heard()
	}
	p.say("SETTINGS") // the shortest frame there is
	answered("SETTINGS ACK")
	for i := range 3 {
		id := 2*i + 1
		for _, b := range p.bytesOf(fmt.Sprintf("HEADERS %d /t/once\nDATA %d x END", id, id)) {
			_, err := nc.Write([]byte{b})
			require.NoError(t, err)
		}
		answered(fmt.Sprintf("HEADERS %d grpc-status=0 END", id))
		p.say(fmt.Sprintf("RST %d", id)) // nobody waits for what follows from it
	}
	p.say("PING")
	answered("PING pingping ACK")
}
