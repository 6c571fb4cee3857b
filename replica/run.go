package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"tandem/extproc/core"
	"tandem/extproc/telemetry"
	"tandem/extproc/usage"
	"tandem/internal/guard"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/assign"
	"tandem/replica/config"
	"tandem/replica/fleetmetrics"
	"tandem/replica/hostcheck"
	"tandem/replica/livecheck"
	"tandem/replica/orders"
	"tandem/status"
)

// replica is what one process runs.
type replica struct {
	cfg   *configv1.Config
	set   Settings
	guard *guard.Guard
	log   *slog.Logger

	fleet  *fleet
	core   *core.Core
	front  Front
	ready  atomic.Bool // it takes requests
	feed   *status.Feed
	reload *reloader
	words  *assign.Assigner
	usage  *usage.Recorder // may be nil
	admin  *http.Server
	all    *prometheus.Registry // of its metrics
}

// Settings are those that the configuration file does not have.
type Settings struct {
	Release     string                          // of this program, for operators and other replicas
	Linger      time.Duration                   // how long to take requests after ctx has ended, while not ready
	Drain       time.Duration                   // 0: drainTime
	Conformance bool                            // honour the test headers of the Inference Extension's conformance suite
	Advertise   string                          // where Envoys reach this replica; "": where it listens
	NoAdmin     bool                            // the process has one operator's port for all its replicas ([Inside.Admin])
	Engines     func(pool, address string) bool // reports whether an endpoint may be used; nil: any may
	HotRestart  bool                            // Envoy restarts hot: its process before this one has its ports until it ends
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

// Serve runs a replica of the configuration that was loaded from file, behind a front, until ctx ends or one of its
// parts fails.
func Serve(
	ctx context.Context, file string, cfg *configv1.Config, set Settings, front func(Behind) (Front, error), log *slog.Logger,
) error {
	spans, err := newSpans(cfg.GetTracing(), set.Release, log)
	if err != nil {
		return err
	}
	defer spans.close()
	r, err := newReplica(ctx, FileSource(file), cfg, set, front, spans.tracer(), log)
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
	log.Info("serving", "ext_proc", where, "page", "http://"+config.Reached(cfg.GetAdmin().GetListen())+"/", "pools", len(cfg.GetPools()), "version", r.set.Release)
	for _, p := range cfg.GetPools() {
		promise := p.GetTargets()
		log.Info("pool", "name", p.GetName(), "roles", p.GetRoles(), "ttft", promise.GetTtft(),
			"tpot", promise.GetTpot())
	}
	readinessKept := make(chan struct{})
	group.Go(func() error {
		defer close(readinessKept)
		r.fleet.keepReady(running, r.setReady, log)
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
	ctx context.Context, from Source, cfg *configv1.Config, set Settings, front func(Behind) (Front, error),
	tracer trace.Tracer, log *slog.Logger,
) (*replica, error) {
	registry := newRegistry(set.Release)
	fleet, err := newFleet(ctx, cfg, set, log)
	if err != nil {
		return nil, err
	}
	fleet.register(registry)
	options, err := coreOptions(cfg, fleet, log)
	if err != nil {
		return nil, err
	}
	if options.Picker != nil {
		options.Picker.Conformance = set.Conformance
	}
	options.Tracer, options.Memory = tracer, newBudget(registry)
	var made *core.Core
	options.Recorder = newRecorder(cfg, set, fleet.state, func() *core.Core { return made }, registry, log)
	metrics := telemetry.NewMetrics(registry, fleet.state)
	if metrics.Usage, err = newUsage(cfg.GetUsage(), registry, log); err != nil {
		return nil, err
	}
	metrics.PruneToo(fleet.health)
	r := &replica{
		cfg: cfg, set: set, guard: guard.New(log, metrics.Panicked), log: log,
		fleet: fleet, core: core.New(options, metrics), usage: metrics.Usage, all: registry,
	}
	made = r.core
	if err := r.beginRecording(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if r.front, err = front(Behind{
		Config: cfg, Settings: set, Core: r.core, Store: fleet.store, Joined: fleet.joined, Ready: r.ready.Load,
		NoSlot: fleet.noSlot.Swap, Guard: r.guard, Registry: registry, Log: log,
	}); err != nil {
		return nil, err
	}
	r.words = assign.New(assign.Options{
		State: fleet.state, Pools: assign.PoolsOf(r.core.Settings), Store: fleet.store, Log: log,
	})
	r.feed = status.NewFeed(status.Source{
		Version: set.Release, Name: replicaName(cfg), Replicas: fleet.operator, State: fleet.state,
		Totals: metrics.Totals, Recent: r.core.Recent, Ready: r.ready.Load, Sharing: fleet.sharing,
		Envoys: r.front.Envoys, Config: func() status.File { return *fleet.config.Load() },
		Roles: r.words.Advice, Explain: r.core.Explain, Queued: r.core.Queued,
		Logs: r.front.AccessLogs,
	})
	registry.MustRegister(fleetmetrics.Words(r.words.Advice), fleetmetrics.Waiting(fleet.state, r.core.Queued))
	r.reload = newReloader(from, cfg, fleet, r.core, r.front, registry, log)
	operator := &orders.Orders{
		TokenFile: cfg.GetAdmin().GetTokenFile(), State: fleet.state, Reload: r.reload.reload,
		Replicas: fleet.operator, Log: log, StateOf: status.StateOf,
	}
	admin := newAdmin(registry, r.ready.Load, fleet, operator, status.Handler(r.feed), r.words, r.recordOrders)
	admin = hostcheck.New(cfg, set.Advertise).Around(admin)
	r.admin = &http.Server{Handler: r.guard.HTTP("admin", admin), ReadHeaderTimeout: 10 * time.Second}
	return r, nil
}

// listeners are a replica's own ports; nil: the configuration has no use for it.
type listeners struct{ admin, notices net.Listener }

// listen opens all ports, or none.
func (r *replica) listen(ctx context.Context) (l listeners, err error) {
	ports := r.front.Ports()
	if !r.set.NoAdmin {
		ports = append(ports, Port{&l.admin, r.cfg.GetAdmin().GetListen(), "admin.listen"})
	}
	if r.fleet.board != nil {
		ports = append(ports, Port{&l.notices, r.cfg.GetNotices().GetListen(), "notices.listen"})
	}
	for i, p := range ports {
		if *p.Listener, err = r.set.Listen(ctx, p.Address); err != nil {
			for _, open := range ports[:i] {
				_ = (*open.Listener).Close()
			}
			return listeners{}, fmt.Errorf("%s: %w", p.Setting, err)
		}
	}
	return l, nil
}

// serve serves all ports. Those for Envoy and operators end with drain, the others with ctx.
func (r *replica) serve(ctx context.Context, group *errgroup.Group, l listeners) {
	r.front.Serve(ctx, group)
	if l.admin != nil {
		group.Go(func() error { return ServeHTTP(r.admin, l.admin) })
	}
	if l.notices != nil {
		group.Go(func() error { return r.fleet.takeNotices(ctx, l.notices, r.log) })
	}
}

func (r *replica) setReady(ready bool) {
	r.ready.Store(ready)
	r.front.SetReady(ready)
}

// work does a replica's background work until ctx ends.
func (r *replica) work(ctx context.Context, group *errgroup.Group) {
	group.Go(func() error { return r.fleet.watch(ctx, r.log) })
	for _, run := range []func(){
		func() { livecheck.Warn(ctx, r.cfg, r.log) },
		func() { r.core.Run(ctx) },
		func() { r.feed.Run(ctx) },
		func() { r.words.Run(ctx) },
		func() { r.usage.Run(ctx) },
		func() { r.reload.follow(ctx) },
	} {
		group.Go(func() error { run(); return nil })
	}
}

// drain reports that the replica is not ready, and lets running streams end, with a deadline each.
func (r *replica) drain() {
	r.setReady(false)
	picker := r.core.Picker
	deadline := r.set.drainTime(picker != nil && picker.WatchBody)
	r.log.Info("draining", "linger", r.set.Linger, "deadline", deadline)
	time.Sleep(r.set.Linger) //nolint:forbidigo // until every Envoy has seen that this replica is not ready
	r.core.Drain()
	r.front.Drain(deadline)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = r.admin.Shutdown(ctx)
}

// unlessCanceled returns err, but nil for the end of a context: a replica is meant to end so.
func unlessCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// ServeHTTP serves a port until the server is shut down.
func ServeHTTP(s *http.Server, l net.Listener) error {
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
