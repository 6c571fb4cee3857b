// Command tandem routes LLM requests over disaggregated prefill and decode, as an external processor of Envoy.
//
//	tandem serve -f FILE             run the server; changes of the file are taken up, on SIGHUP at once
//	tandem serve -f FILE --check     validate the configuration and exit; with --live also ask the engines
//	tandem envoy -f FILE             print the Envoy bootstrap that belongs to the configuration
//	tandem status [--watch]          what a running replica does: endpoints, flow, rates, the latest decisions
//	tandem demo                      bring everything up on this machine and send real requests
//	tandem replay --trace FILE       play a trace against modelled engines under several routing policies
//	tandem version
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			fmt.Fprintln(os.Stderr, "tandem:", err)
		}
		stop()
		os.Exit(1)
	}
}

const usage = `usage: tandem serve -f FILE [--check [--live]]
       tandem envoy -f FILE
       tandem status [-f FILE | -admin ADDRESS] [--watch] [--json]
       tandem demo [-h]
       tandem replay --trace FILE --policy NAME,... --prefill X --decode Y [--json] [-h]
       tandem version
`

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return errors.New("no command given")
	}
	switch args[0] {
	case "serve":
		return serve(ctx, args[1:], stderr)
	case "envoy":
		return envoy(args[1:], stdout, stderr)
	case "status":
		return showStatus(ctx, args[1:], stdout, stderr)
	case "demo":
		return demo(ctx, args[1:], stdout, stderr)
	case "replay":
		return replayTrace(ctx, args[1:], stdout, stderr)
	case "version":
		fmt.Fprintln(stdout, "tandem", version())
		return nil
	case "-h", "--help", "help":
		fmt.Fprint(stdout, usage)
		return nil
	}
	fmt.Fprint(stderr, usage)
	return fmt.Errorf("unknown command %q", args[0])
}

// version is what the Go toolchain stamped into the binary.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "(unknown)"
	}
	v := info.Main.Version
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			v += " " + s.Value[:12]
		}
	}
	return v + " " + info.GoVersion
}
