package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"tandem/e2e/enginesim/api"
	"tandem/internal/version"
)

// exitEngineDied is the status of a simulator whose request would have killed a real engine.
const exitEngineDied = 70

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// builtAs is set by the linker: -ldflags "-X 'main.builtAs=$(scripts/version.sh built)'".
var builtAs string

// run is the program. The version, if asked for, goes to stdout, everything else to stderr. It returns the exit status:
// 0 when asked to stop, 2 for bad flags, 1 when a port is taken, and exitEngineDied when a request killed the engine.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	cfg, err := parseFlags(args, stderr)
	if errors.Is(err, errVersion) {
		fmt.Fprintln(stdout, "enginesim", version.Text(builtAs))
		return 0
	}
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		fmt.Fprintln(stderr, "enginesim:", err)
		return 2
	}
	all, err := hosts(cfg)
	if err != nil {
		fmt.Fprintln(stderr, "enginesim:", err)
		return 2
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan int, len(all))
	for _, c := range all {
		go func() { ended <- serve(ctx, c, stderr) }()
	}
	status := 0
	for range all { // one that ends takes the others with it
		status = max(status, <-ended)
		cancel()
	}
	return status
}

// serve runs one engine, and those that start in its place, until ctx ends, and returns the exit status.
func serve(ctx context.Context, cfg *api.Config, stderr io.Writer) int {
	for {
		s, err := api.Start(cfg, stderr)
		if err != nil {
			fmt.Fprintln(stderr, "enginesim:", err)
			return 1
		}
		fmt.Fprintf(stderr, "enginesim ready listen=%s side-channel=%s role=%s engine=%s\n", s.Addr(), s.Side.Addr(),
			cfg.Role, s.EngineID)
		select {
		case <-s.Died:
		case <-ctx.Done():
			grace, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			s.Shutdown(grace)
			return 0
		}
		next, after := s.Next()
		if next == nil {
			return exitEngineDied
		}
		select {
		case <-time.After(after):
		case <-ctx.Done():
			return 0
		}
		cfg = next
	}
}
