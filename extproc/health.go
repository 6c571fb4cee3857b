package extproc

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// Health answers gRPC health checks for the names that data planes ask for: `liveness` (the process runs), `readiness`
// and the external processor's own name (it takes requests), and the empty name, which means readiness too.
// Source: Endpoint Picker protocol, proposal 004, Health Checking.
type Health struct {
	server *health.Server
}

// NewHealth returns a service that is alive and not ready.
func NewHealth() *Health {
	h := &Health{server: health.NewServer()}
	h.server.SetServingStatus("liveness", grpc_health_v1.HealthCheckResponse_SERVING)
	h.SetReady(false)
	return h
}

// Register adds the health service to a gRPC server.
func (h *Health) Register(r grpc.ServiceRegistrar) { grpc_health_v1.RegisterHealthServer(r, h.server) }

// SetReady sets whether the server accepts requests.
func (h *Health) SetReady(ready bool) {
	status := grpc_health_v1.HealthCheckResponse_NOT_SERVING
	if ready {
		status = grpc_health_v1.HealthCheckResponse_SERVING
	}
	for _, name := range []string{"", "readiness", ServiceName} {
		h.server.SetServingStatus(name, status)
	}
}

// Ready returns the last value of SetReady.
func (h *Health) Ready() bool {
	r, err := h.server.Check(nil, &grpc_health_v1.HealthCheckRequest{Service: "readiness"}) //nolint:staticcheck // the context is not used
	return err == nil && r.GetStatus() == grpc_health_v1.HealthCheckResponse_SERVING
}
