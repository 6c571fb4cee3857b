package replica

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"tandem/extproc"
	"tandem/extproc/pass"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/internal/grpcserver"
	"tandem/internal/guard"
	"tandem/kvstate/redisstore"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/assign"
	"tandem/replica/config"
	"tandem/replica/fleetmetrics"
	"tandem/replica/gatewayextension"
	"tandem/replica/hostcheck"
	"tandem/replica/livecheck"
	"tandem/replica/orders"
	"tandem/replica/xds"
	"tandem/status"
)

// replica is what one process runs.
type replica struct {
	cfg   *configv1.Config
	set   Settings
	guard *guard.Guard
	log   *slog.Logger

	fleet  *fleet
	server *extproc.Server
	passes *pass.Shared // nil: Envoy asks the server
	health *extproc.Health
	envoys *xds.Server
	feed   *status.Feed
	reload *reloader
	words  *assign.Assigner
	usage  *usage.Recorder // may be nil

	grpc, extension *grpcserver.Server // for Envoy, for Envoy Gateway
	replan, admin   *http.Server
}

// Settings are those that the configuration file does not have.
type Settings struct {
	Release     string        // of this program, for operators and other replicas
	Linger      time.Duration // how long to take requests after ctx has ended, while not ready
	Drain       time.Duration // 0: drainTime
	Conformance bool          // honour the test headers of the Inference Extension's conformance suite
	Advertise   string        // where Envoys reach this replica; "": where it listens
	HotRestart  bool          // Envoy restarts hot: its process before this one has its ports until it ends
}

// drainTime returns how long running ext_proc streams may take to finish after SIGTERM. They last milliseconds, except
// those of a gateway that shows an endpoint picker the answers: they last as long as these, and an answer is cut with
// its stream.
func (s Settings) drainTime(watchesAnswers bool) time.Duration {
	switch {
	case s.Drain > 0:
		return s.Drain
	case watchesAnswers:
		return 10 * time.Minute
	default:
		return 20 * time.Second
	}
}

// TuneGC has the garbage collector run less often: what lives is small, and what passes through is large. GOGC and
// GOMEMLIMIT still rule.
func TuneGC() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400)
	}
}

// Serve runs a replica of the configuration that was loaded from file, until ctx ends or one of its parts fails.
func Serve(ctx context.Context, file string, cfg *configv1.Config, set Settings, log *slog.Logger) error {
	spans, err := newSpans(cfg.GetTracing(), set.Release, log)
	if err != nil {
		return err
	}
	defer spans.close()
	r, err := newReplica(ctx, file, cfg, set, spans.tracer(), log)
	if err != nil {
		return err
	}
	l, err := r.listen(ctx)
	if err != nil {
		return err
	}
	return r.run(ctx, l)
}

// run serves the ports and does the work of a replica until ctx ends or one of its parts fails.
func (r *replica) run(ctx context.Context, l listeners) error {
	cfg, log := r.cfg, r.log
	group, running := errgroup.WithContext(ctx)
	background, stop := context.WithCancel(guard.With(context.WithoutCancel(ctx), r.guard))
	defer stop()
	r.serve(background, group, l)
	r.work(background, group)
	where := cfg.GetExtProc().GetListen()
	if config.Inside(cfg) {
		where = "inside Envoy"
	}
	log.Info("serving", "ext_proc", where, "pools", len(cfg.GetPools()), "version", r.set.Release)
	for _, p := range cfg.GetPools() {
		promise := p.GetTargets()
		log.Info("pool", "name", p.GetName(), "roles", p.GetRoles(), "ttft", promise.GetTtft(),
			"tpot", promise.GetTpot())
	}
	readinessKept := make(chan struct{})
	group.Go(func() error {
		defer close(readinessKept)
		r.fleet.keepReady(running, r.health.SetReady, log)
		return nil
	})

	<-running.Done()
	<-readinessKept // or it could set the replica ready again
	r.drain()
	stop()
	return unlessCanceled(group.Wait())
}

// newReplica wires the parts together. Only the fleet's have begun to work when it returns.
func newReplica(
	ctx context.Context, file string, cfg *configv1.Config, set Settings, tracer trace.Tracer, log *slog.Logger,
) (*replica, error) {
	registry := newRegistry(set.Release)
	fleet, err := newFleet(ctx, cfg, set, log)
	if err != nil {
		return nil, err
	}
	fleet.register(registry)
	options, err := serverOptions(cfg, fleet, log)
	if err != nil {
		return nil, err
	}
	if options.Picker != nil {
		options.Picker.Conformance = set.Conformance
	}
	options.Tracer, options.Memory = tracer, newBudget(registry)
	metrics := telemetry.NewMetrics(registry, fleet.state)
	if metrics.Usage, err = newUsage(cfg.GetUsage(), registry, log); err != nil {
		return nil, err
	}
	metrics.PruneToo(fleet.health)
	var server *extproc.Server
	var passes *pass.Shared
	if config.Inside(cfg) {
		server, passes = extproc.NewInside(options, metrics)
	} else {
		server = extproc.New(options, metrics)
	}
	health := extproc.NewHealth()
	r := &replica{
		cfg: cfg, set: set, guard: guard.New(log, metrics.Panicked), log: log,
		fleet: fleet, server: server, passes: passes, health: health, usage: metrics.Usage,
	}
	if r.envoys, err = newXDS(cfg, registry, log); err != nil {
		return nil, err
	}
	r.words = assign.New(assign.Options{
		State: fleet.state, Pools: assign.PoolsOf(server), Store: fleet.store, Log: log,
	})
	r.feed = status.NewFeed(status.Source{
		Version: set.Release, Name: replicaName(cfg), Replicas: fleet.operator, State: fleet.state,
		Totals: metrics.Totals, Recent: server.Recent, Ready: health.Ready, Sharing: fleet.sharing,
		Envoys: envoysOf(r.envoys), Config: func() status.File { return *fleet.config.Load() },
		Roles: r.words.Advice, Explain: server.Explain,
		Logs: func() (int, time.Time) { return r.grpc.Streams(extproc.AccessLogMethod) },
	})
	registry.MustRegister(fleetmetrics.Words(r.words.Advice))
	gateway, err := gatewayextension.New(cfg, r.guard, registry, log)
	if err != nil {
		return nil, err
	}
	if r.grpc, r.extension, err = newGRPC(cfg, server, r.envoys, gateway, health); err != nil {
		return nil, err
	}
	r.reload = newReloader(file, cfg, fleet, server, r.envoys, gateway, registry, log)
	operator := &orders.Orders{
		TokenFile: cfg.GetAdmin().GetTokenFile(), State: fleet.state, Reload: r.reload.reload,
		Replicas: fleet.operator, Log: log, StateOf: status.StateOf,
	}
	r.replan = &http.Server{
		Handler: r.guard.HTTP("replan", replanPort(server, health)), ReadHeaderTimeout: 10 * time.Second,
		MaxHeaderBytes: 256 << 10, Protocols: cleartext(),
	}
	admin := newAdmin(registry, health, fleet, operator, status.Handler(r.feed), r.words)
	admin = hostcheck.New(cfg, set.Advertise).Around(admin)
	r.admin = &http.Server{Handler: r.guard.HTTP("admin", admin), ReadHeaderTimeout: 10 * time.Second}
	return r, nil
}

// listeners are a replica's ports; nil: the configuration has no use for it.
type listeners struct{ extProc, replan, admin, notices, extension net.Listener }

// listen opens all ports, or none.
func (r *replica) listen(ctx context.Context) (l listeners, err error) {
	type port struct {
		listener *net.Listener
		address  string
	}
	ports := []port{
		{&l.extProc, r.cfg.GetExtProc().GetListen()}, {&l.replan, r.cfg.GetReplan().GetListen()},
		{&l.admin, r.cfg.GetAdmin().GetListen()},
	}
	if config.Inside(r.cfg) {
		ports = ports[2:] // Envoy needs no port to ask at
	}
	if r.fleet.board != nil {
		ports = append(ports, port{&l.notices, r.cfg.GetNotices().GetListen()})
	}
	if g := r.cfg.GetEnvoyGateway(); g != nil {
		ports = append(ports, port{&l.extension, g.GetListen()})
	}
	for i, p := range ports {
		if *p.listener, err = r.set.listen(ctx, p.address); err != nil {
			for _, open := range ports[:i] {
				_ = (*open.listener).Close()
			}
			return listeners{}, err
		}
	}
	return l, nil
}

// serve serves all ports. The servers for Envoy, operators and replans end with drain, the others with ctx.
func (r *replica) serve(ctx context.Context, group *errgroup.Group, l listeners) {
	if l.extProc != nil {
		group.Go(func() error { return r.grpc.Serve(extproc.Sources(l.extProc)) })
		group.Go(func() error { return serveHTTP(r.replan, l.replan) })
	}
	group.Go(func() error { return serveHTTP(r.admin, l.admin) })
	if l.notices != nil {
		group.Go(func() error { return r.fleet.takeNotices(ctx, l.notices, r.log) })
	}
	if l.extension != nil {
		context.AfterFunc(ctx, r.extension.Stop)
		group.Go(func() error { return r.extension.Serve(l.extension) })
	}
}

// work does a replica's background work until ctx ends.
func (r *replica) work(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error { return r.fleet.watch(ctx, r.log) })
	for _, run := range []func(){
		func() { livecheck.Warn(ctx, r.cfg, r.log) },
		func() { r.server.Run(ctx) },
		func() { r.feed.Run(ctx) },
		func() { r.words.Run(ctx) },
		func() { r.usage.Run(ctx) },
		func() { r.reload.follow(ctx) },
		func() { r.fleet.followReplicas(ctx, r.cfg, r.set.Advertise, r.reload) },
	} {
		group.Go(func() error { run(); return nil })
	}
}

// drain reports that the replica is not ready, and lets running streams end, with a deadline each.
func (r *replica) drain() {
	r.health.SetReady(false)
	picker := r.server.Picker
	deadline := r.set.drainTime(picker != nil && picker.WatchBody)
	r.log.Info("draining", "linger", r.set.Linger, "deadline", deadline)
	time.Sleep(r.set.Linger) //nolint:forbidigo // until every Envoy has seen that this replica is not ready
	r.server.Drain()
	r.envoys.Close()
	if !config.Inside(r.cfg) { // else nobody has a stream, and it would wait for one
		stopGRPC(r.grpc, deadline)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, s := range []*http.Server{r.replan, r.admin} {
		_ = s.Shutdown(ctx)
	}
}

// unlessCanceled returns err, but nil for the end of a context: a replica is meant to end so.
func unlessCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// replanPort serves replans and, for Envoy's health checks, readiness: a failed second try is not repeated, so none
// should come to a replica that is about to leave.
func replanPort(server *extproc.Server, health *extproc.Health) http.Handler {
	replan, ready := server.Replan(), ready(health, nil, func() redisstore.KeyCheck { return redisstore.KeyCheck{} })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // no ServeMux: it redirects paths that it finds unclean
		if r.Method == http.MethodGet && r.URL.Path == "/readyz" {
			ready(w, r)
			return
		}
		replan.ServeHTTP(w, r)
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

func serveHTTP(s *http.Server, l net.Listener) error {
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// stopGRPC lets running streams end, but not for longer than deadline. Access log streams have no end of their own.
func stopGRPC(s *grpcserver.Server, deadline time.Duration) {
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(deadline):
		s.Stop()
		<-stopped
	}
}
