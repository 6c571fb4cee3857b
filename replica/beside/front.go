// Package beside is the front of a replica that Envoys ask over gRPC: the external processor and the access logs
// (package extproc), Envoys' configuration over xDS (envoys.go), what Envoy Gateway asks (package
// gatewayextension), and the port for second tries.
package beside

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc"
	"tandem/internal/grpcserver"
	configv1 "tandem/protos/config/v1"
	"tandem/replica"
	"tandem/replica/gatewayextension"
)

// Serve runs a replica beside Envoy; see [replica.Serve].
func Serve(ctx context.Context, file string, cfg *configv1.Config, set replica.Settings, log *slog.Logger) error {
	return replica.Serve(ctx, file, cfg, set, New, log)
}

// front implements [replica.Front].
type front struct {
	replica.Behind
	server  *extproc.Server
	health  *extproc.Health
	envoys  *envoys
	gateway *gatewayextension.Server

	grpc, extension *grpcserver.Server // for Envoy, for Envoy Gateway
	replan          *http.Server
	ports           struct{ extProc, replan, extension net.Listener } // nil: the configuration has no use for it
}

// New returns the front of a replica.
func New(b replica.Behind) (replica.Front, error) {
	f := &front{Behind: b, server: extproc.New(b.Core), health: extproc.NewHealth()}
	var err error
	if f.envoys, err = newEnvoys(b); err != nil {
		return nil, err
	}
	if f.gateway, err = gatewayextension.New(b.Config, b.Guard, b.Registry, b.Log); err != nil {
		return nil, err
	}
	if err := f.makeGRPC(); err != nil {
		return nil, err
	}
	f.replan = &http.Server{
		Handler: b.Guard.HTTP("replan", f.replanPort()), ReadHeaderTimeout: 10 * time.Second,
		MaxHeaderBytes: 256 << 10, Protocols: cleartext(),
	}
	return f, nil
}

// Parts implements [replica.Front].
func (f *front) Parts(pools []*configv1.Pool) []string { return envoyconfigs.Parts(pools) }

// Check implements [replica.Front].
func (f *front) Check(cfg *configv1.Config) error {
	if err := f.envoys.check(cfg); err != nil {
		return err
	}
	return f.gateway.Set(cfg)
}

// AccessLogs implements [replica.Front].
func (f *front) AccessLogs() (open int, last time.Time, risk string) {
	open, last = f.grpc.Streams(extproc.AccessLogMethod)
	return open, last, f.server.Risky.Risk()
}

// SetReady implements [replica.Front].
func (f *front) SetReady(ready bool) { f.health.SetReady(ready) }

// Ports implements [replica.Front].
func (f *front) Ports() []replica.Port {
	ports := []replica.Port{
		{Listener: &f.ports.extProc, Address: f.Config.GetExtProc().GetListen(), Setting: "extProc.listen"},
		{Listener: &f.ports.replan, Address: f.Config.GetReplan().GetListen(), Setting: "replan.listen"},
	}
	if g := f.Config.GetEnvoyGateway(); g != nil {
		ports = append(ports, replica.Port{
			Listener: &f.ports.extension, Address: g.GetListen(), Setting: "envoyGateway.listen"})
	}
	return ports
}

// Serve implements [replica.Front]. The ports for Envoy and second tries end with Drain, Envoy Gateway's with ctx.
func (f *front) Serve(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error { return f.grpc.Serve(extproc.Sources(f.ports.extProc)) })
	group.Go(func() error { return replica.ServeHTTP(f.replan, f.ports.replan) })
	if f.ports.extension != nil {
		context.AfterFunc(ctx, f.extension.Stop)
		group.Go(func() error { return f.extension.Serve(f.ports.extension) })
	}
	group.Go(func() error { f.server.Run(ctx); return nil })
	group.Go(func() error { f.envoys.followReplicas(ctx); return nil })
}

// Drain implements [replica.Front]. Access log streams have no end of their own.
func (f *front) Drain(deadline time.Duration) {
	f.envoys.xds.Close()
	stopped := make(chan struct{})
	go func() { f.grpc.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(deadline):
		f.grpc.Stop()
		<-stopped
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = f.replan.Shutdown(ctx)
}

// replanPort serves second tries and, for Envoy's health checks, readiness: a failed second try is not repeated, so
// none should come to a replica that is about to leave.
func (f *front) replanPort() http.Handler {
	replan := f.server.Replan()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// no ServeMux: it redirects paths that it finds unclean
		switch {
		case r.Method != http.MethodGet || r.URL.Path != "/readyz":
			replan.ServeHTTP(w, r)
		case f.Ready():
			_, _ = w.Write([]byte("ok\n"))
		default:
			http.Error(w, "not ready", http.StatusServiceUnavailable)
		}
	})
}

// cleartext are HTTP/1.1 and HTTP/2 without TLS. Envoy speaks HTTP/2 to several replicas, because its pings find one
// that hangs.
func cleartext() *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	return p
}
