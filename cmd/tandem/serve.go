package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"tandem/extproc"
	"tandem/extproc/telemetry"
	"tandem/internal/config"
	"tandem/internal/gatewayextension"
	"tandem/internal/grpcserver"
	"tandem/internal/guard"
	"tandem/internal/livecheck"
	"tandem/internal/orders"
	"tandem/internal/xds"
	"tandem/kvstate/redisstore"
	configv1 "tandem/protos/config/v1"
	"tandem/status"
)

// newServe is `tandem serve`.
func newServe() *cobra.Command {
	var file, level, format string
	var check, live bool
	var set settings
	c := &cobra.Command{
		Use: "serve -f FILE", Short: "Run the server, or check its configuration", Args: cobra.NoArgs,
		Long: "Run the server until SIGTERM, then let streams finish. Changes of the file take effect while it runs.\n" +
			"With --check, validate the configuration, report all errors, and exit.",
		RunE: func(c *cobra.Command, _ []string) error {
			if live && !check {
				return errors.New("--live belongs to --check: add --check to ask the engines and exit, or leave out " +
					"--live; a server that starts asks them by itself")
			}
			to := c.ErrOrStderr()
			if !check {
				lines := newLogWriter(to)
				defer lines.close()
				to = lines
			}
			log, err := logger(to, level, format)
			if err != nil {
				return err
			}
			return serve(c.Context(), file, check, live, set, c.OutOrStdout(), log)
		},
	}
	f := c.Flags()
	f.StringVarP(&file, "file", "f", "", "configuration `FILE` (YAML)")
	f.BoolVar(&check, "check", false, "validate the configuration and exit")
	f.BoolVar(&live, "live", false, "with --check: also ask the engines whether they are what the configuration says")
	f.DurationVar(&set.drain, "drain", 0, "after SIGTERM, wait at most this `TIME` for streams to end "+
		"(default 20s; 10m for an endpoint picker that watches answers)")
	f.DurationVar(&set.linger, "linger", 0, "after SIGTERM, take requests for this `TIME` while not ready, so that health checks notice")
	f.StringVar(&set.advertise, "advertise", "",
		"the `ADDRESS` at which Envoys reach this replica, for envoy.replicas: redis; a host name is looked up once")
	f.BoolVar(&set.conformance, "conformance", false, "honour the test headers of the Inference Extension's conformance suite: never in production")
	f.StringVar(&level, "log", "info", "lowest `LEVEL` logged: debug, info, warn, error")
	f.StringVar(&format, "log-format", "text", "`FORMAT` of the log: text or json, one object a line")
	required(c, "file")
	return c
}

// required makes flags of a command mandatory.
func required(c *cobra.Command, names ...string) {
	for _, name := range names {
		if err := c.MarkFlagRequired(name); err != nil {
			panic(err) // the name of a flag above
		}
	}
}

// serve checks the configuration, or runs the server until ctx ends and lets streams finish.
func serve(ctx context.Context, file string, check, live bool, set settings, stdout io.Writer, log *slog.Logger) error {
	var also []func(*configv1.Config) config.ValidationErrors
	if check {
		also = append(also, checkFiles)
	}
	cfg, warnings, err := config.Load(file, also...)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		log.Warn(w)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // what lives is small and what passes through is large; GOGC and GOMEMLIMIT still rule
	}
	if check {
		if live {
			report := livecheck.Check(ctx, cfg)
			report.Print(stdout)
			if err := report.Err(); err != nil {
				return fmt.Errorf("%s:\n%w", file, err)
			}
		}
		fmt.Fprintf(stdout, "%s: valid\n", file)
		return nil
	}
	return runServer(ctx, file, cfg, set, log)
}

func logger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("--log: %w", err)
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not one of text, json", format)
}

// settings are those of the command line.
type settings struct {
	linger      time.Duration
	drain       time.Duration // 0: drainTime
	conformance bool
	advertise   string // "": where it listens
}

// drainTime returns how long running ext_proc streams may take to finish after SIGTERM. They last milliseconds, but for
// those of a gateway that shows an endpoint picker the answers: they last as long as these, and an answer is cut with
// its stream.
func (s settings) drainTime(watchesAnswers bool) time.Duration {
	switch {
	case s.drain > 0:
		return s.drain
	case watchesAnswers:
		return 10 * time.Minute
	default:
		return 20 * time.Second
	}
}

// runServer wires the parts together and runs them until ctx ends or one of them fails.
func runServer(ctx context.Context, file string, cfg *configv1.Config, set settings, log *slog.Logger) error {
	registry := newRegistry()
	fleet, err := newFleet(ctx, cfg, log)
	if err != nil {
		return err
	}
	fleet.register(registry)
	options, err := serverOptions(cfg, fleet, log)
	if err != nil {
		return err
	}
	if options.Picker != nil {
		options.Picker.Conformance = set.conformance
	}
	spans, err := newSpans(cfg.GetTracing(), log)
	if err != nil {
		return err
	}
	defer spans.close()
	options.Tracer, options.Memory = spans.tracer(), newBudget(registry)
	metrics := telemetry.NewMetrics(registry, fleet.state)
	server := extproc.New(options, metrics)
	keep := guard.New(log, metrics.Panicked)
	health := extproc.NewHealth()
	envoys, err := newXDS(cfg, registry, log)
	if err != nil {
		return err
	}
	feed := status.NewFeed(status.Source{
		Version: version(), Name: replicaName(cfg), Replicas: fleet.operator, State: fleet.state, Totals: metrics.Totals, Recent: server.Recent, Ready: health.Ready,
		Sharing: fleet.sharing, Envoys: envoysOf(envoys), Config: func() status.File { return *fleet.config.Load() },
	})
	gateway, err := gatewayextension.New(cfg, keep, registry, log)
	if err != nil {
		return err
	}
	grpcServer, extension, err := newGRPC(cfg, server, envoys, gateway, health)
	if err != nil {
		return err
	}
	listeners, err := listen(ctx, ports(cfg, fleet)...)
	if err != nil {
		return err
	}
	reload := newReloader(file, cfg, fleet, server, envoys, gateway, registry, log)
	operator := &orders.Orders{
		TokenFile: cfg.GetAdmin().GetTokenFile(), State: fleet.state, Reload: reload.reload, Replicas: fleet.operator, Log: log,
	}
	replan := &http.Server{Handler: keep.HTTP("replan", replanPort(server, health)), ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 256 << 10, Protocols: cleartext()}
	admin := &http.Server{Handler: keep.HTTP("admin", newAdmin(registry, health, server, fleet, operator, status.Handler(feed))), ReadHeaderTimeout: 10 * time.Second}

	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return grpcServer.Serve(extproc.Sources(listeners[0])) })
	group.Go(func() error { return serveHTTP(replan, listeners[1]) })
	group.Go(func() error { return serveHTTP(admin, listeners[2]) })
	background, stop := context.WithCancel(guard.With(context.WithoutCancel(ctx), keep))
	defer stop()
	group.Go(func() error { livecheck.Warn(background, cfg, log); return nil })
	group.Go(func() error { server.Run(background); return nil })
	group.Go(func() error { return fleet.watch(background, log) })
	group.Go(func() error { feed.Run(background); return nil })
	if fleet.board != nil {
		group.Go(func() error { return fleet.takeNotices(background, listeners[3], log) })
	}
	group.Go(func() error { return serveExtension(background, cfg, extension, listeners[len(listeners)-1]) })
	group.Go(func() error { reload.follow(background); return nil })
	group.Go(func() error { fleet.followReplicas(background, cfg, set.advertise, reload); return nil })
	log.Info("serving", "ext_proc", cfg.GetExtProc().GetListen(), "pools", len(cfg.GetPools()), "version", version())
	kept := make(chan struct{})
	group.Go(func() error {
		defer close(kept)
		fleet.keepReady(running, health.SetReady, log)
		return nil
	})

	<-running.Done()
	<-kept // or it could say once more that requests are welcome
	health.SetReady(false)
	deadline := set.drainTime(options.Picker != nil && options.Picker.WatchBody)
	log.Info("draining", "linger", set.linger, "deadline", deadline)
	time.Sleep(set.linger) //nolint:forbidigo // until every Envoy has seen that this replica is not ready
	drain(server, envoys, grpcServer, deadline, replan, admin)
	stop()
	return unlessCanceled(group.Wait())
}

// unlessCanceled is err, but not what ends when it is told to.
func unlessCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// ports are the addresses of ext_proc, replan, admin and, where there is a board, notices, and the extension of Envoy Gateway.
func ports(cfg *configv1.Config, fleet *fleet) []string {
	out := []string{cfg.GetExtProc().GetListen(), cfg.GetReplan().GetListen(), cfg.GetAdmin().GetListen()}
	if fleet.board != nil {
		out = append(out, cfg.GetNotices().GetListen())
	}
	if g := cfg.GetEnvoyGateway(); g != nil {
		out = append(out, g.GetListen())
	}
	return out
}

// drain lets what runs end, with a deadline each.
func drain(server *extproc.Server, envoys *xds.Server, grpcServer *grpcserver.Server, deadline time.Duration, ports ...*http.Server) {
	server.Drain()
	envoys.Close()
	stopGRPC(grpcServer, deadline)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, s := range ports {
		_ = s.Shutdown(ctx)
	}
}

// replanPort is the replan handler, and readiness for Envoy's health checks: a second try has no third, so none should come
// to a replica that is about to leave.
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

// cleartext are HTTP/1.1 and HTTP/2 without TLS. Several replicas are spoken to in HTTP/2, whose pings tell Envoy of one that hangs.
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

// listen opens all addresses, or none.
func listen(ctx context.Context, addresses ...string) ([]net.Listener, error) {
	var out []net.Listener
	for _, a := range addresses {
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", a)
		if err != nil {
			for _, l := range out {
				_ = l.Close()
			}
			return nil, fmt.Errorf("listening on %s: %w", a, err)
		}
		out = append(out, l)
	}
	return out, nil
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
