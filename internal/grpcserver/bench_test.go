package grpcserver

import (
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// BenchmarkStream measures a stream with one message each way, its client included, and the same over grpc-go without
// limits.
func BenchmarkStream(b *testing.B) {
	for _, size := range []int{1 << 10, 220 << 10} {
		b.Run(fmt.Sprintf("limited/%d", size), func(b *testing.B) { benchmark(b, newStand(b, Options{}).addr, size) })
		b.Run(fmt.Sprintf("grpc-go/%d", size), func(b *testing.B) {
			s := grpc.NewServer(grpc.ForceServerCodecV2(raw{}), grpc.NumStreamWorkers(uint32(8*runtime.GOMAXPROCS(0))),
				grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow))
			s.RegisterService(&grpc.ServiceDesc{ServiceName: "test.Service", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{
				StreamName: "Echo", ServerStreams: true, ClientStreams: true, Handler: func(_ any, st grpc.ServerStream) error { return answer(st) },
			}}}, nil)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(b, err)
			go func() { _ = s.Serve(l) }()
			defer s.Stop()
			benchmark(b, l.Addr().String(), size)
		})
	}
}

func benchmark(b *testing.B, addr string, size int) {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodecV2(raw{})))
	require.NoError(b, err)
	defer conn.Close()
	message := make([]byte, size)
	b.ReportAllocs()
	for b.Loop() {
		st, err := conn.NewStream(b.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, echo)
		require.NoError(b, err)
		require.NoError(b, st.SendMsg(&message))
		var got []byte
		require.NoError(b, st.RecvMsg(&got))
		require.NoError(b, st.CloseSend())
		require.ErrorIs(b, st.RecvMsg(&got), io.EOF)
	}
}
