// Command tandem routes LLM requests over disaggregated prefill and decode, as an external processor of Envoy.
//
//	tandem run --prefill URL ...     ask engines what they are, and run Tandem and Envoy in front of them
//	tandem serve -f FILE             run the server; changes of the file are taken up, on SIGHUP at once
//	tandem serve -f FILE --check     validate the configuration and exit; with --live also ask the engines
//	tandem envoy -f FILE             print the Envoy bootstrap that belongs to the configuration
//	tandem status | requests | explain            what a running replica does, and would decide
//	tandem drain | pause | resume | weights       orders to a running replica
//	tandem record start | stop | status           record its requests, for replay
//	tandem demo                      bring everything up on this machine and send real requests
//	tandem profile ENGINE            measure an idle engine, for replay
//	tandem replay --trace FILE       play a trace against modelled engines under several routing policies
//
// A file of this package for each of them; `tandem COMMAND --help` lists the flags.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tandem/docs"
	versions "tandem/internal/version"
	"tandem/status/words"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, shown(err))
		stop()
		os.Exit(1)
	}
}

// shown is an error for a terminal: it may quote an engine or a replica.
func shown(err error) string { return "tandem: " + words.Lines(err.Error()) }

// run runs the command line; what it prints for people who asked goes to stdout, everything else to stderr.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	root := &cobra.Command{
		Use:           "tandem",
		Short:         "Routes LLM requests over disaggregated prefill and decode, as an external processor of Envoy",
		Version:       version(),
		SilenceUsage:  true, // an error says what is wrong; --help says the rest
		SilenceErrors: true, // main prints them
	}
	root.SetVersionTemplate("tandem {{.Version}}\n")
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		var bad *pflag.InvalidValueError
		if errors.As(err, &bad) && strings.HasPrefix(bad.GetFlag().Value.Type(), "int") {
			err = fmt.Errorf("--%s: %q is not a whole number", bad.GetFlag().Name, bad.GetValue())
		}
		return fmt.Errorf("%w (%s --help lists the flags)", err, c.CommandPath())
	})
	root.AddGroup(&cobra.Group{ID: "run", Title: "Run:"}, &cobra.Group{ID: "watch", Title: "Look at a running replica:"},
		&cobra.Group{ID: "order", Title: "Change a running replica:"}, &cobra.Group{ID: "try", Title: "Try out:"})
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("run", newRun(), newServe(), newEnvoy())
	add("watch", newStatus(), newRequests(), newExplain())
	add("order", newDrain(), newPause(true), newPause(false), newWeights(), newRecord())
	add("try", newDemo(), newReplay(), newProfile())
	root.AddCommand(&cobra.Command{Use: "schema", Short: "Print the JSON Schema of the configuration, for editors", Args: arguments(0),
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := c.OutOrStdout().Write(docs.Schema)
			return err
		}})
	root.AddCommand(&cobra.Command{Use: "version", Short: "Print the version", Args: arguments(0), Run: func(c *cobra.Command, _ []string) {
		fmt.Fprintln(c.OutOrStdout(), "tandem", version())
	}})
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error { return belong(c.Flags()) }
	root.SetArgs(doubleDashes(root, args))
	root.SetOut(stdout)
	root.SetErr(stderr)
	return root.ExecuteContext(ctx)
}

// belong refuses a flag that does nothing without another one, whose usage begins with "of --other".
func belong(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		other, ok := strings.CutPrefix(f.Usage, "of --")
		if other = strings.TrimRight(strings.SplitN(other, " ", 2)[0], ":"); ok && !flags.Changed(other) {
			err = fmt.Errorf("--%s belongs to --%s, which is not there", f.Name, other)
		}
	})
	return err
}

// doubleDashes turns -name into --name where a command has such a flag: earlier releases took both.
func doubleDashes(root *cobra.Command, args []string) []string {
	known := map[string]bool{}
	for _, c := range root.Commands() {
		c.Flags().VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
	}
	out := make([]string, 0, len(args))
	for i, arg := range args {
		if arg == "--" {
			return append(out, args[i:]...)
		}
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "-"), "=")
		if strings.HasPrefix(arg, "-") && len(name) > 1 && known[name] {
			arg = "-" + arg
		}
		out = append(out, arg)
	}
	return out
}

// builtAs is set by the linker: -ldflags "-X 'main.builtAs=$(scripts/version.sh built)'".
var builtAs string

func version() string { return versions.Text(builtAs) }
