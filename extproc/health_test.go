package extproc

import (
	"net"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// The names that data planes ask for (Endpoint Picker protocol, Health Checking): the process lives whether or not it takes requests.
func TestHealth(t *testing.T) {
	h, s := NewHealth(), grpc.NewServer()
	h.Register(s)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	client := grpc_health_v1.NewHealthClient(conn)
	says := func(service string) grpc_health_v1.HealthCheckResponse_ServingStatus {
		r, err := client.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: service})
		require.NoError(t, err, service)
		return r.GetStatus()
	}
	for _, ready := range []bool{false, true, false} {
		h.SetReady(ready)
		require.Equal(t, ready, h.Ready())
		want := grpc_health_v1.HealthCheckResponse_NOT_SERVING
		if ready {
			want = grpc_health_v1.HealthCheckResponse_SERVING
		}
		for _, name := range []string{"", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"} {
			require.Equal(t, want, says(name), "%q", name)
		}
		require.Equal(t, grpc_health_v1.HealthCheckResponse_SERVING, says("liveness"))
	}
	_, err = client.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "another"})
	require.Equal(t, codes.NotFound, status.Code(err))
}
