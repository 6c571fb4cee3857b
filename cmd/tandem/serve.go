package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"tandem/extproc"
	"tandem/internal/rpc"
	configv1 "tandem/protos/config/v1"
	"tandem/status"
)

// serve runs the server until ctx ends, then lets streams finish.
func serve(ctx context.Context, args []string, stderr io.Writer) error {
	flags := flag.NewFlagSet("tandem serve", flag.ContinueOnError)
	flags.SetOutput(stderr)
	file := flags.String("f", "", "configuration `file` (YAML)")
	check := flags.Bool("check", false, "validate the configuration and exit")
	live := flags.Bool("live", false, "with --check: also ask the engines whether they are what the configuration says")
	linger := flags.Duration("linger", 0, "after SIGTERM, go on accepting for so long while not ready: `time` for health checks to notice")
	conformance := flags.Bool("conformance", false, "honour the test headers of the Inference Extension's conformance suite: never in production")
	level := flags.String("log", "info", "lowest `level` logged: debug, info, warn, error")
	format := flags.String("log-format", "text", "`format` of the log: text or json, one object a line")
	if err := flags.Parse(args); err != nil {
		return err
	}
	log, err := logger(stderr, *level, *format)
	if err != nil {
		return err
	}
	config, warnings, err := configv1.Load(*file)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		log.Warn(w)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(400) // what lives is small and what passes through is large; GOGC and GOMEMLIMIT still rule
	}
	if *check {
		if *live {
			if err := reportLive(ctx, config); err != nil {
				return fmt.Errorf("%s:\n%w", *file, err)
			}
		}
		fmt.Fprintf(stderr, "%s: valid\n", *file)
		return nil
	}
	return runServer(ctx, *file, config, settings{*linger, *conformance}, log)
}

func logger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("-log: %w", err)
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, o)), nil
	}
	return nil, fmt.Errorf("-log-format: %q is not one of text, json", format)
}

// drainTime is how long running ext_proc streams may take to finish after SIGTERM. They are short: none of them is kept
// open for an answer.
const drainTime = 20 * time.Second

// settings are those of the command line.
type settings struct {
	linger      time.Duration
	conformance bool
}

// runServer wires the parts together and runs them until ctx ends or one of them fails.
func runServer(ctx context.Context, file string, config *configv1.Config, set settings, log *slog.Logger) error {
	registry := newRegistry()
	fleet, err := newFleet(ctx, config, log)
	if err != nil {
		return err
	}
	fleet.register(registry)
	options, err := serverOptions(config, fleet, log)
	if err != nil {
		return err
	}
	if options.Picker != nil {
		options.Picker.Conformance = set.conformance
	}
	spans, err := newSpans(config.GetTracing(), log)
	if err != nil {
		return err
	}
	defer spans.close()
	options.Tracer = spans.tracer()
	metrics := extproc.NewMetrics(registry, fleet.state)
	server := extproc.New(options, metrics)
	health := extproc.NewHealth()
	feed := status.NewFeed(status.Source{Version: version(), State: fleet.state, Totals: metrics.Totals, Recent: server.Recent, Ready: health.Ready})
	grpcServer, err := newGRPC(config, server, health)
	if err != nil {
		return err
	}
	addresses := []string{config.GetExtProc().GetListen(), config.GetReplan().GetListen(), config.GetAdmin().GetListen()}
	if fleet.board != nil {
		addresses = append(addresses, config.GetNotices().GetListen())
	}
	listeners, err := listen(ctx, addresses...)
	if err != nil {
		return err
	}
	reload := newReloader(file, config, fleet, server, registry, log)
	operator := &orders{tokenFile: config.GetAdmin().GetTokenFile(), state: fleet.state, reload: reload.reload, log: log}
	replan := &http.Server{Handler: replanPort(server, health), ReadHeaderTimeout: 10 * time.Second, MaxHeaderBytes: 256 << 10}
	admin := &http.Server{Handler: newAdmin(registry, health, server, fleet, operator, status.Handler(feed)), ReadHeaderTimeout: 10 * time.Second}

	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return grpcServer.Serve(extproc.Sources(listeners[0])) })
	group.Go(func() error { return serveHTTP(replan, listeners[1]) })
	group.Go(func() error { return serveHTTP(admin, listeners[2]) })
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group.Go(func() error { warnLive(background, config, log); return nil })
	group.Go(func() error { server.Run(background); return nil })
	group.Go(func() error { return fleet.watch(background) })
	group.Go(func() error { feed.Run(background); return nil })
	if fleet.board != nil {
		group.Go(func() error { return fleet.takeNotices(background, listeners[3], log) })
	}
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	group.Go(func() error { reload.run(background, hangup); return nil })
	log.Info("serving", "ext_proc", config.GetExtProc().GetListen(), "pools", len(config.GetPools()), "version", version())
	group.Go(func() error {
		if fleet.waitSynced(running) {
			health.SetReady(true)
		}
		return nil
	})

	<-running.Done()
	health.SetReady(false)
	log.Info("draining", "linger", set.linger, "deadline", drainTime)
	time.Sleep(set.linger) //nolint:forbidigo // until every Envoy has seen that this replica is not ready
	drain(server, grpcServer, replan, admin)
	stop()
	if err := group.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// drain lets what runs end, with a deadline each.
func drain(server *extproc.Server, grpcServer *rpc.Server, ports ...*http.Server) {
	server.Drain()
	stopGRPC(grpcServer)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	for _, s := range ports {
		_ = s.Shutdown(ctx)
	}
}

// replanPort is the replan handler, and readiness for Envoy's health checks: a second try has no third, so none should come
// to a replica that is about to leave.
func replanPort(server *extproc.Server, health *extproc.Health) http.Handler {
	replan, ready := server.Replan(), ready(health, nil)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // no ServeMux: it redirects paths that it finds unclean
		if r.Method == http.MethodGet && r.URL.Path == "/readyz" {
			ready(w, r)
			return
		}
		replan.ServeHTTP(w, r)
	})
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

// stopGRPC lets running streams end, but not for longer than drainTime. Access log streams have no end of their own.
func stopGRPC(s *rpc.Server) {
	stopped := make(chan struct{})
	go func() { s.GracefulStop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(drainTime):
		s.Stop()
		<-stopped
	}
}
