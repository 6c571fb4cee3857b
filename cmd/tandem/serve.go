package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tandem/internal/logwriter"
	configv1 "tandem/protos/config/v1"
	"tandem/replica"
	"tandem/replica/beside"
	"tandem/replica/config"
	"tandem/replica/livecheck"
	"tandem/status/words"
)

// newServe is `tandem serve`.
func newServe() *cobra.Command {
	var file, level, format string
	var check, live bool
	set := replica.Settings{Release: version()}
	c := &cobra.Command{
		Use: "serve", Short: "Run the server, or check its configuration", Args: arguments(0),
		Long: "Run the server until SIGTERM, then let streams finish. Changes of the file take effect while it runs.\n" +
			"With --check, validate the configuration, report all errors, and exit.",
		RunE: func(c *cobra.Command, _ []string) error {
			if live && !check {
				return errors.New("--live belongs to --check: add --check to ask the engines and exit, or leave out " +
					"--live; a server that starts asks them by itself")
			}
			to := c.ErrOrStderr()
			if !check {
				lines := logwriter.New(to)
				defer lines.Close()
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
	fileFlag(f, &file, "configuration `FILE` (YAML)")
	f.BoolVar(&check, "check", false, "validate the configuration and exit")
	f.BoolVar(&live, "live", false, "with --check: also ask the engines whether they are what the configuration says")
	f.DurationVar(&set.Drain, "drain", 0, "after SIGTERM, wait at most this `TIME` for streams to end "+
		"(default 20s; 10m for an endpoint picker that watches answers)")
	f.DurationVar(&set.Linger, "linger", 0, "after SIGTERM, take requests for this `TIME` while not ready, so that health checks notice")
	f.StringVar(&set.Advertise, "advertise", "",
		"the `ADDRESS` at which Envoys reach this replica, for envoy.replicas: redis; a host name is looked up once")
	f.BoolVar(&set.Conformance, "conformance", false, "honour the test headers of the Inference Extension's conformance suite: never in production")
	f.StringVar(&level, "log", "info", "lowest `LEVEL` logged: debug, info, warn, error")
	f.StringVar(&format, "log-format", "text", "`FORMAT` of the log: text or json, one object a line")
	return c
}

// defaultFile is the configuration file if none is named.
const defaultFile = "tandem.yaml"

// fileFlag adds -f.
func fileFlag(f *pflag.FlagSet, file *string, usage string) {
	f.StringVarP(file, "file", "f", defaultFile, usage)
}

// serve checks the configuration, or runs the server until ctx ends and lets streams finish.
func serve(
	ctx context.Context, file string, check, live bool, set replica.Settings, stdout io.Writer, log *slog.Logger,
) error {
	var also []func(*configv1.Config) config.ValidationErrors
	if check {
		also = append(also, checkFiles)
	}
	cfg, warnings, err := config.Load(file, also...)
	for _, w := range warnings {
		log.Warn(w)
	}
	if err != nil {
		return err
	}
	go replica.TuneGC(ctx)
	if check {
		if live {
			report := livecheck.Check(ctx, cfg, true)
			report.AskContinuing(ctx, cfg)
			report.Print(stdout)
			if err := errors.Join(report.Err(), livecheck.CheckRedis(ctx, cfg)); err != nil {
				return fmt.Errorf("%s:\n%w", file, err)
			}
		}
		fmt.Fprintf(stdout, "%s: valid\n", file)
		return nil
	}
	if config.Inside(cfg) {
		return fmt.Errorf("%s: envoy.run is inside: Envoy loads Tandem itself, with what `tandem envoy` prints", file)
	}
	release, _ := claim(file) // of several replicas with this file the first has it
	defer release()
	return beside.Serve(ctx, file, cfg, set, log)
}

func logger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("--log: %q is not one of debug, info, warn, error", level)
	}
	o := &slog.HandlerOptions{Level: l}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, o)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(words.Escaped(w), o)), nil
	}
	return nil, fmt.Errorf("--log-format: %q is not one of text, json", format)
}
