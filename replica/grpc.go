package replica

import (
	"math"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc"
	"tandem/internal/grpcserver"
	"tandem/internal/memory"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/certificates"
	"tandem/replica/gatewayextension"
	"tandem/replica/xds"
)

// Streams at one time, over all connections. An Envoy has an access log stream for each worker and log.
const (
	maxProcessStreams   = 1 << 16
	maxAccessLogStreams = 4096
	maxXDSStreams       = 1024 // one for each Envoy
)

// Of Envoy Gateway.
const (
	maxTranslation        = 64 << 20 // bytes
	maxGatewayConnections = 256
)

// newBudget returns the budget of everything that is received and not handled: 1 GiB, or half of GOMEMLIMIT where that
// is less, and registers it with its metrics.
func newBudget(r prometheus.Registerer) *memory.Budget {
	limit := int64(1 << 30)
	if total := debug.SetMemoryLimit(-1); total != math.MaxInt64 {
		limit = min(limit, total/2)
	}
	budget := memory.New(limit)
	registerMemory(r, budget)
	return budget
}

// newGRPC makes two servers: one for Envoy, and one for Envoy Gateway and for Envoys whose routes were not extended.
// What the second is sent counts against the same memory, but not against the same connections and streams.
func newGRPC(
	cfg *configv1.Config, server *extproc.Server, envoys *xds.Server, gateway *gatewayextension.Server,
	health *extproc.Health,
) (main, extension *grpcserver.Server, err error) {
	o := grpcserver.Options{
		Codec: extproc.Codec(), Pool: extproc.BufferPool(), MaxMessage: int(cfg.GetExtProc().GetMaxMessageBytes()),
		Memory: server.Memory,
		MethodStreams: map[string]int{
			extproc.ProcessMethod: maxProcessStreams, extproc.AccessLogMethod: maxAccessLogStreams, xds.Method: maxXDSStreams,
		},
	}
	if o.TLS, err = certificates.TLS(cfg.GetExtProc().GetTls()); err != nil {
		return nil, nil, err
	}
	main = grpcserver.New(o)
	server.Register(main)
	envoys.Register(main)
	health.Register(main)
	o.MaxMessage, o.MethodStreams, o.Connections = maxTranslation, nil, maxGatewayConnections
	extension = grpcserver.New(o)
	gateway.Register(extension)
	return main, extension, nil
}
