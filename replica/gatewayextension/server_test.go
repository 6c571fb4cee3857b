package gatewayextension

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"testing"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"tandem/internal/guard"
	egv1 "tandem/protos/envoygateway/v1"
)

// served is a server and a connection to it.
func served(t *testing.T) (*grpc.ClientConn, *bytes.Buffer) {
	t.Helper()
	log := &bytes.Buffer{}
	c, _ := tandem(t)
	logger := slog.New(slog.NewTextHandler(log, nil))
	s, err := New(c, guard.New(logger, func(string) {}), prometheus.NewRegistry(), logger)
	require.NoError(t, err)
	l, g := bufconn.Listen(1<<20), grpc.NewServer()
	s.Register(g)
	go func() { _ = g.Serve(l) }()
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient("passthrough:", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn, log
}

func call(t *testing.T, conn *grpc.ClientConn, in *egv1.PostTranslateModifyRequest) *egv1.PostTranslateModifyResponse {
	t.Helper()
	out := &egv1.PostTranslateModifyResponse{}
	require.NoError(t, conn.Invoke(t.Context(), "/envoygateway.extension.EnvoyGatewayExtension/PostTranslateModify", in, out))
	return out
}

func TestTranslationOverGRPC(t *testing.T) {
	conn, log := served(t)
	in := read(t, "testdata/existing.in.yaml")
	require.Greater(t, len(call(t, conn, in).GetListeners()), len(in.GetListeners()))
	require.Contains(t, log.String(), "httproute/default/llm/")
}

// A resource that cannot be read passes unchanged, and so do the others.
func TestBrokenTranslationContinues(t *testing.T) {
	conn, log := served(t)
	in := read(t, "testdata/existing.in.yaml")
	in.Listeners = append(in.Listeners, []byte(extProcPrefix))
	require.True(t, proto.Equal(unchanged(in), call(t, conn, in)))
	require.Contains(t, log.String(), "reading a listener")
}

// A panic is counted and logged, and the translation goes on as it came.
func TestPanic(t *testing.T) {
	c, _ := tandem(t)
	log := slog.New(slog.DiscardHandler)
	var panics []string
	s, err := New(c, guard.New(log, func(where string) { panics = append(panics, where) }), prometheus.NewRegistry(), log)
	require.NoError(t, err)
	s.own = nil
	in := read(t, "testdata/existing.in.yaml")
	out, err := s.postTranslate(t.Context(), in)
	require.NoError(t, err)
	require.True(t, proto.Equal(unchanged(in), out))
	require.Equal(t, []string{"gateway extension"}, panics)
}

// An Envoy whose route was not extended gets an error to pass on, and no prefill request.
func TestNotExtended(t *testing.T) {
	conn, _ := served(t)
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(t.Context())
	require.NoError(t, err)
	require.NoError(t, stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{}}))
	got, err := stream.Recv()
	require.NoError(t, err)
	require.EqualValues(t, 503, got.GetImmediateResponse().GetStatus().GetCode())
	require.Contains(t, string(got.GetImmediateResponse().GetBody()), "route_not_extended")
}
