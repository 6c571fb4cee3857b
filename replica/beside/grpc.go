package beside

import (
	"tandem/extproc"
	"tandem/internal/grpcserver"
	"tandem/replica/certificates"
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

// makeGRPC makes two servers: one for Envoy, and one for Envoy Gateway and for Envoys whose routes were not extended.
// What the second is sent counts against the same memory, but not against the same connections and streams.
func (f *front) makeGRPC() error {
	listen := f.Config.GetExtProc()
	o := grpcserver.Options{
		Codec: extproc.Codec(), Pool: extproc.BufferPool(), MaxMessage: int(listen.GetMaxMessageBytes()),
		Memory: f.Core.Memory,
		MethodStreams: map[string]int{
			extproc.ProcessMethod: maxProcessStreams, extproc.AccessLogMethod: maxAccessLogStreams,
			xds.Method: maxXDSStreams,
		},
	}
	var err error
	if o.TLS, err = certificates.TLS(listen.GetTls()); err != nil {
		return err
	}
	f.grpc = grpcserver.New(o)
	f.server.Register(f.grpc)
	f.envoys.xds.Register(f.grpc)
	f.health.Register(f.grpc)
	o.MaxMessage, o.MethodStreams, o.Connections = maxTranslation, nil, maxGatewayConnections
	f.extension = grpcserver.New(o)
	f.gateway.Register(f.extension)
	return nil
}
