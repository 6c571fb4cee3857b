package registrations

import (
	"context"
	"encoding/hex"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/stretchr/testify/require"
)

// golden is a beat as vLLM 0.22.1's P2pNcclEngine packs it (msgpack.dumps of the dictionary).
const golden = "83a474797065a150ac687474705f61646472657373ae31302e302e312e323a3230303031ab7a6d715f61646472657373ae31302e302e312e323a3231303031"

func TestRead(t *testing.T) {
	frame, err := hex.DecodeString(golden)
	require.NoError(t, err)
	b, err := read(frame)
	require.NoError(t, err)
	require.Equal(t, Registration{"P", "10.0.1.2:20001", netip.MustParseAddrPort("10.0.1.2:21001")}, b)
	for _, bad := range [][]byte{nil, {0x80}, {0xc0}, frame[:20], []byte("hello"), make([]byte, maxBytes+1), append([]byte{0x93}, frame...)} {
		_, err := read(bad)
		require.ErrorIs(t, err, errMessage)
	}
}

func FuzzRead(f *testing.F) {
	frame, _ := hex.DecodeString(golden)
	f.Add(frame)
	f.Add([]byte{0x81, 0xa4, 't', 'y', 'p', 'e', 0xc0})
	f.Fuzz(func(t *testing.T, frame []byte) {
		b, err := read(frame)
		if err == nil {
			require.True(t, b.ZMQ.IsValid())
			require.NotEmpty(t, b.HTTP)
		}
	})
}

// A DEALER of the real library registers at the real socket.
func TestEnginesRegister(t *testing.T) {
	socket, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := socket.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	beats := make(chan Registration, 10)
	l := New(func(b Registration) { beats <- b }, func(string) {}, slog.New(slog.DiscardHandler))
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx, socket) }()

	engine := zmq4.NewDealer(ctx, zmq4.WithID(zmq4.SocketIdentity("10.0.1.2:21001")), zmq4.WithAutomaticReconnect(true))
	defer engine.Close()
	require.Eventually(t, func() bool { return engine.Dial("tcp://"+addr) == nil }, 30*time.Second, 10*time.Millisecond)
	frame, err := hex.DecodeString(golden)
	require.NoError(t, err)
	require.NoError(t, engine.Send(zmq4.NewMsg([]byte("not msgpack"))))
	require.NoError(t, engine.Send(zmq4.NewMsg(frame)))
	select {
	case b := <-beats:
		require.Equal(t, "10.0.1.2:20001", b.HTTP)
	case <-time.After(30 * time.Second):
		require.Fail(t, "no beat arrived")
	}
	cancel()
	require.NoError(t, <-ended)
}

// An engine that stops is forgotten after three messages, and its place is free again.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var gone []string
		forgotten := func() []string { mu.Lock(); defer mu.Unlock(); return slices.Clone(gone) }
		l := New(func(Registration) {}, func(http string) { mu.Lock(); defer mu.Unlock(); gone = append(gone, http) }, slog.New(slog.DiscardHandler))
		frame, err := hex.DecodeString(golden)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { l.sweepUntil(ctx); close(done) }()
		for range 4 {
			l.take(frame)
			time.Sleep(3 * time.Second)
		}
		synctest.Wait()
		require.Empty(t, forgotten())
		time.Sleep(expireAfter)
		synctest.Wait()
		require.Equal(t, []string{"10.0.1.2:20001"}, forgotten())
		cancel()
		<-done
	})
}
