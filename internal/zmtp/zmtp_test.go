package zmtp

import (
	"bytes"
	"context"
	"encoding/hex"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"
)

// serve runs a server on a free port until the test ends.
func serve(t *testing.T, kind Kind) (addr string, received chan [][]byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	received = make(chan [][]byte, 100)
	s := &Server{Kind: kind, Log: slog.New(slog.DiscardHandler), Handle: Receive(func(f [][]byte) { received <- copied(f) })}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx, l) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-ended) })
	return l.Addr().String(), received
}

func copied(frames [][]byte) (out [][]byte) {
	for _, f := range frames {
		out = append(out, bytes.Clone(f))
	}
	return out
}

func next(t *testing.T, received chan [][]byte) [][]byte {
	t.Helper()
	select {
	case m := <-received:
		return m
	case <-time.After(time.Minute):
		require.Fail(t, "no message")
		return nil
	}
}

// An independent implementation talks to it: go-zeromq's PUSH.
func TestGoZeroMQTalksToIt(t *testing.T) {
	addr, received := serve(t, Pull)
	push := zmq4.NewPush(context.Background())
	defer push.Close()
	require.NoError(t, push.Dial("tcp://"+addr))
	require.NoError(t, push.Send(zmq4.NewMsg([]byte("one"))))
	require.NoError(t, push.SendMulti(zmq4.NewMsgFrom([]byte("two"), bytes.Repeat([]byte("x"), 300))))
	require.Equal(t, [][]byte{[]byte("one")}, next(t, received))
	m := next(t, received)
	require.Len(t, m, 2)
	require.Len(t, m[1], 300, "a long frame")
}

// A silent connection, one that speaks HTTP and one of a wrong kind do not disturb the others.
func TestStrangersDoNotHarm(t *testing.T) {
	addr, received := serve(t, Pull)
	silent, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer silent.Close()
	for name, bad := range map[string]string{
		"http":             "GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat(" ", 64),
		"a frame too long": string(greeting()) + string(ready("PUSH")) + "\x02\x40\x00\x00\x00\x00\x00\x00\x00",
		"a SUB socket":     string(greeting()) + string(ready("SUB")),
		"flags":            string(greeting()) + string(ready("PUSH")) + "\x80\x01a",
		"another version":  "\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x01" + strings.Repeat("\x00", 53),
		"CURVE":            strings.Replace(string(greeting()), "NULL\x00", "CURVE", 1),
		"no READY":         string(greeting()) + "\x00\x01a",
		"endless message":  string(greeting()) + string(ready("PUSH")) + strings.Repeat("\x01\x01a", 9),
	} {
		conn, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		_, _ = conn.Write([]byte(bad))
		_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
		_, err = io.Copy(io.Discard, conn) // until the server closes
		var timeout net.Error
		if netErr, ok := err.(net.Error); ok { //nolint:errorlint // a test
			timeout = netErr
		}
		require.False(t, timeout != nil && timeout.Timeout(), "%s is not closed", name)
		_ = conn.Close()
	}
	push := zmq4.NewPush(context.Background())
	defer push.Close()
	require.NoError(t, push.Dial("tcp://"+addr))
	require.NoError(t, push.Send(zmq4.NewMsg([]byte("one"))))
	require.Equal(t, "one", string(next(t, received)[0]))
}

func ready(kind string) []byte {
	return newCommand("READY", appendProperty(appendProperty(nil, "Socket-Type", kind), "Identity", ""))
}

// libzmq's handshake, byte for byte: it holds the greeting back after the signature until it has ownGreeting, and sends
// heartbeats.
func TestHandshakeAndHeartbeats(t *testing.T) {
	ownGreeting, peerGreeting := net.Pipe()
	got := make(chan []byte, 1)
	s := &Server{Kind: Pull, Log: slog.New(slog.DiscardHandler), Handle: Receive(func(f [][]byte) { got <- bytes.Clone(f[0]) })}
	ended := make(chan struct{})
	go func() { s.serveConn(context.Background(), ownGreeting); close(ended) }()
	hello := make([]byte, 64+len(newCommand("READY", appendProperty(nil, "Socket-Type", "PULL"))))
	_, err := io.ReadFull(peerGreeting, hello)
	require.NoError(t, err)
	require.Equal(t, "ff00000000000000007f03004e554c4c", hex.EncodeToString(hello[:16]))
	require.Equal(t, "041a055245414459"+"0b536f636b65742d547970650000000450554c4c", hex.EncodeToString(hello[64:]))
	for _, part := range [][]byte{greeting()[:10], greeting()[10:], ready("PUSH"), {4, 9, 4, 'P', 'I', 'N', 'G', 0, 50, 'h', 'i'}} {
		_, err := peerGreeting.Write(part)
		require.NoError(t, err)
	}
	pong := make([]byte, 9)
	_, err = io.ReadFull(peerGreeting, pong)
	require.NoError(t, err)
	require.Equal(t, "\x04\x07\x04PONGhi", string(pong))
	_, err = peerGreeting.Write([]byte("\x00\x02ok"))
	require.NoError(t, err)
	require.Equal(t, "ok", string(<-got))
	_ = peerGreeting.Close()
	<-ended
}

// It talks to an independent implementation: go-zeromq's PUB and ROUTER.
func TestItTalksToGoZeroMQ(t *testing.T) {
	ctx := t.Context()
	pub := zmq4.NewPub(ctx)
	defer pub.Close()
	require.NoError(t, pub.Listen("tcp://127.0.0.1:0"))
	sub, err := Dial(ctx, pub.Addr().String(), Sub, 1<<20)
	require.NoError(t, err)
	defer sub.Close()
	require.NoError(t, sub.Subscribe("kv@"))
	require.Eventually(t, func() bool { return len(pub.(zmq4.Topics).Topics()) == 1 }, time.Minute, time.Millisecond)
	long := bytes.Repeat([]byte("x"), 1<<18)
	require.NoError(t, pub.Send(zmq4.NewMsgFrom([]byte("other"), []byte("1"))))
	require.NoError(t, pub.Send(zmq4.NewMsgFrom([]byte("kv@a"), []byte("2"), long)))
	got, err := sub.Read()
	require.NoError(t, err)
	require.Equal(t, [][]byte{[]byte("kv@a"), []byte("2"), long}, got)
	require.NoError(t, pub.Send(zmq4.NewMsgFrom([]byte("kv@a"), make([]byte, 1<<20))))
	_, err = sub.Read()
	require.ErrorContains(t, err, "more than 1048576 bytes")

	router := zmq4.NewRouter(ctx)
	defer router.Close()
	require.NoError(t, router.Listen("tcp://127.0.0.1:0"))
	dealer, err := Dial(ctx, router.Addr().String(), Dealer, 1<<20)
	require.NoError(t, err)
	defer dealer.Close()
	require.NoError(t, dealer.Send([]byte{}, []byte("from 7")))
	m, err := router.Recv()
	require.NoError(t, err)
	require.Equal(t, [][]byte{{}, []byte("from 7")}, m.Frames[1:])
	require.NoError(t, router.Send(zmq4.NewMsgFrom(m.Frames[0], []byte{}, []byte("seven"))))
	got, err = dealer.Read()
	require.NoError(t, err)
	require.Equal(t, [][]byte{{}, []byte("seven")}, got)

	_, err = Dial(ctx, router.Addr().String(), Sub, 1<<20)
	require.ErrorContains(t, err, "ROUTER")
	require.Error(t, dealer.Send(long), "no frame that long is sent")
}

// wire is a network connection that replays input and accepts all output.
type wire struct {
	net.Conn
	io.Reader
}

func (w wire) Read(b []byte) (int, error)     { return w.Reader.Read(b) }
func (wire) Write(b []byte) (int, error)      { return len(b), nil }
func (wire) Close() error                     { return nil }
func (wire) SetDeadline(time.Time) error      { return nil }
func (wire) SetWriteDeadline(time.Time) error { return nil }

// FuzzConnection: whatever a peer sends, the connection ends and received data keeps to its bounds.
func FuzzConnection(f *testing.F) {
	const limit = 1 << 10
	f.Add(append(append(greeting(), ready("PUSH")...), "\x00\x02ok\x01\x01a\x00\x01b"...))
	f.Add(append(append(greeting(), ready("PUSH")...), "\x04\x09\x04PING\x00\x01hi"...))
	f.Add(append(greeting(), 4, 2, 9, 9))
	f.Fuzz(func(t *testing.T, sent []byte) {
		c, err := Open(t.Context(), wire{Reader: bytes.NewReader(sent)}, Pull, limit)
		if err != nil {
			return
		}
		require.Error(t, c.Each(func(frames [][]byte) {
			size := 0
			for _, f := range frames {
				size += len(f)
			}
			require.LessOrEqual(t, size, limit)
			require.LessOrEqual(t, len(frames), maxFrames)
		}))
	})
}
