package rpc

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
)

// mix answers each message with itself, some of them after a while.
func (*service) mix(st grpc.ServerStream) error {
	for {
		s, err := receive(st)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if strings.HasPrefix(s, "w") {
			mayWait(st)
			time.Sleep(time.Duration(len(s)) * time.Microsecond)
		}
		if err := send(st, s); err != nil {
			return err
		}
	}
}

// Many streams of several peers: short and long, with messages of all sizes, through small windows and small buffers, given up at any moment, with
// handlers that wait. At the end there is no handler, no buffer and, as a bubble sees to, no goroutine left.
func TestStress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, Options{StreamWindow: firstWindow, ConnWindow: 1 << 18, MaxStreams: 1000})
		l := bufconn.Listen(16 << 10)
		s.serve(l)
		var all sync.WaitGroup
		var clients []*grpc.ClientConn
		for range 3 {
			cc, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
				grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return l.Dial() }),
				grpc.WithDefaultCallOptions(grpc.ForceCodecV2(text{})), grpc.WithStaticStreamWindowSize(firstWindow))
			require.NoError(t, err)
			clients = append(clients, cc)
			t.Cleanup(func() { _ = cc.Close() })
			for range 30 {
				all.Go(func() {
					for range 30 {
						oneStream(t, cc)
					}
				})
			}
		}
		all.Wait()
		s.mu.Lock()
		var conns []*conn
		for c := range s.conns {
			conns = append(conns, c)
		}
		s.mu.Unlock()
		require.Len(t, conns, len(clients))
		time.Sleep(time.Second) // streams that were given up have handlers yet
		s.settled(t, conns...)
		stopped := s.stopping()
		for _, cc := range clients[:2] {
			_ = cc.Close()
		}
		<-stopped
		_ = clients[2].Close()
		s.end(t)
	})
}

// oneStream says and hears a few messages, and ends in one way or another.
func oneStream(t *testing.T, cc *grpc.ClientConn) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if rand.IntN(4) == 0 {
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rand.IntN(3000))*time.Microsecond)
		defer cancel()
	}
	method := []string{"/t/mix", "/t/mix", "/t/beside"}[rand.IntN(3)]
	st, err := cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	for i := rand.IntN(6); err == nil && i > 0; i-- {
		size := rand.IntN(2000)
		if rand.IntN(10) == 0 {
			size = rand.IntN(300_000)
		}
		in, out := strings.Repeat([]string{"w", "x"}[rand.IntN(2)], size), ""
		if err = st.SendMsg(&in); err == nil {
			if err = st.RecvMsg(&out); err == nil && in != out {
				t.Error("another answer")
			}
		}
		if rand.IntN(10) == 0 {
			return // given up
		}
	}
	if err == nil {
		_ = st.CloseSend()
		var none string
		err = st.RecvMsg(&none)
	}
	if c := status.Code(err); err != io.EOF && c != codes.DeadlineExceeded { //nolint:errorlint // as RecvMsg has it
		t.Errorf("%v", err)
	}
}
