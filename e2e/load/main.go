// Command load puts Envoy, Tandem and N simulated engines under load with well-known tools, and writes a report.
//
//	go run ./e2e/load [-suite NAME] [-out DIR]        or make load, LOAD=full make load, LOAD=replicas make load
//
// Envoy's and Tandem's configurations are those of envoy-configs/ (two-hop; replicas for several), with other ports
// and as many endpoints as a case needs. h2load (Debian: nghttp2-client) drives plain HTTP/1.1, aiperf (PyPI) streamed
// answers, for which it measures times to the first token and between tokens. Closed loop: each client asks again when
// it has its answer. Open loop: requests come at a rate, even if earlier ones are not answered yet.
//
// The report, DIR/report.html, is one file without outside assets: per case percentiles, requests per second and per
// core of Envoy and Tandem, CPU per request by process, memory, errors; and report.json next to it. Cases whose tool is
// missing are left out, and named. The report begins with a summary and contains the exact configuration: Tandem's
// files, Envoy's bootstrap, and every command line. e2e/bench compares runs, as multiples of the floor; figures here do
// not compare from day to day.
//
// h2load sends one body, so all prompts of a case are equal: every prefix is known after the first. Compare cases of
// one run only. The program imports nothing of Tandem.
//
// Files: cases.go has the cases, stand.go starts them, h2load.go and aiperf.go drive them, report.go writes,
// summary.go interprets.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"tandem/e2e/process"
)

func main() {
	runtime.LockOSThread() // processes die with the thread that started them (Pdeathsig), and this thread lasts
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

// options are the values of the flags.
type options struct {
	suite, out, only      string
	figures               string
	time                  time.Duration
	workers               int
	envoy, h2load, python string
	tandem, enginesim     string
}

func run(ctx context.Context, args []string, log io.Writer) error {
	var o options
	f := flag.NewFlagSet("load", flag.ContinueOnError)
	f.SetOutput(log)
	f.StringVar(&o.suite, "suite", os.Getenv("LOAD"), "`name` of the cases: quick (the default, a few minutes), full "+
		"(all sizes, clients, endpoints and replicas) or replicas (the same loads with 1, 4 and 8 replicas)")
	f.StringVar(&o.out, "out", ".cache/load", "`directory` of the report")
	f.StringVar(&o.only, "only", "", "run only the cases whose name contains this `text`")
	f.StringVar(&o.figures, "json", "", "`file` with the figures of docs/benchmarks.md (docs/figures/load.json): "+
		"replace those that are measured again")
	f.DurationVar(&o.time, "time", 5*time.Second, "how long each case is measured")
	f.IntVar(&o.workers, "workers", 2, "Envoy's --concurrency")
	f.StringVar(&o.python, "aiperf", ".tools/load/bin/aiperf", "aiperf `binary`")
	bin := f.String("bin", "bin", "`directory` with tandem and enginesim")
	if err := f.Parse(args); err != nil {
		return err
	}
	o.tandem, o.enginesim = filepath.Join(*bin, "tandem"), filepath.Join(*bin, "enginesim")
	o.envoy = process.Program(os.Getenv("ENVOY"), "envoy", ".tools/bin/envoy")
	o.h2load = process.Program(os.Getenv("H2LOAD"), "h2load")
	o.python = process.Program(o.python)
	if o.envoy == "" {
		return errors.New("no Envoy found: run scripts/tools.sh, put envoy on PATH, or set ENVOY")
	}
	r := &report{Began: time.Now().UTC(), Machine: process.Machine(), Versions: o.versions(ctx)}
	if o.h2load == "" {
		r.Missing = append(r.Missing, "h2load is not installed (Debian: apt-get install nghttp2-client): no plain HTTP")
	}
	if o.python == "" {
		r.Missing = append(r.Missing, "aiperf is not installed (scripts/tools.sh load): no streamed answers")
	}
	if err := o.runCases(ctx, r, log); err != nil {
		return err
	}
	file, err := r.write(o.out)
	if err != nil {
		return err
	}
	fmt.Fprintf(log, "report: %s\n", file)
	if o.figures == "" {
		return nil
	}
	return r.publish(o.figures)
}

// runCases runs one case after the other. A case that cannot be run is in the report with its reason.
func (o *options) runCases(ctx context.Context, r *report, log io.Writer) error {
	var all []testCase
	suite, err := cases(o.suite)
	if err != nil {
		return err
	}
	for _, c := range suite {
		if (c.Stream && o.python == "") || (!c.Stream && o.h2load == "") || !strings.Contains(c.name(), o.only) {
			continue
		}
		all = append(all, c)
	}
	rates := map[string]float64{} // of closed loops, for the open ones
	var s *stand
	defer func() { s.stop() }()
	for i, c := range all {
		bar(log, i, len(all), c.name())
		if s == nil || !s.serves(c) {
			s.stop()
			var err error
			if s, err = o.startStand(ctx, c); err != nil {
				return fmt.Errorf("%s: %w", c.name(), err)
			}
			r.keepConfig(s)
		}
		if c.Share > 0 {
			c.Rate = rates[c.like()] * c.Share
		}
		result, err := o.runCase(ctx, s, c)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			result.Error = err.Error()
		}
		if c.Share == 0 {
			rates[c.like()] = result.PerSecond
		}
		r.Results = append(r.Results, result)
		if _, err := r.write(o.out); err != nil { // if the rest is not run, the cases so far are not lost
			return err
		}
	}
	bar(log, len(all), len(all), "done")
	fmt.Fprintln(log)
	return nil
}

// runCase measures one case: the tool's figures, and the resources that the processes used meanwhile.
func (o *options) runCase(ctx context.Context, s *stand, c testCase) (result, error) {
	r := result{Case: c, Name: c.name()}
	w, err := s.watch()
	if err != nil {
		return r, err
	}
	if c.Stream {
		err = o.aiperf(ctx, s, c, &r)
	} else {
		err = o.plain(ctx, s, c, &r)
	}
	time.Sleep(2 * lookEvery) // Envoy's access log comes 50 ms late
	samples, watchErr := w.end()
	if err = errors.Join(err, watchErr); err != nil {
		return r, err
	}
	r.Seconds = r.to.Sub(r.from).Seconds()
	r.account(between(samples, r.from, r.to))
	return r, nil
}

// bar shows the progress of the run.
func bar(w io.Writer, done, all int, what string) {
	const width = 30
	filled := width * done / max(all, 1)
	fmt.Fprintf(w, "\r\033[K[%s%s] %d/%d %s", strings.Repeat("#", filled), strings.Repeat(".", width-filled), done, all,
		what)
}

// versions returns the versions of the programs that take part.
func (o *options) versions(ctx context.Context) string {
	first := func(path string, args ...string) string {
		if path == "" {
			return ""
		}
		out, _ := exec.CommandContext(ctx, path, args...).Output()
		line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
		return line
	}
	out := []string{first(o.tandem, "version"), process.EnvoyVersion(ctx, o.envoy), first(o.h2load, "--version")}
	if o.python != "" {
		out = append(out, "aiperf "+first(filepath.Join(filepath.Dir(o.python), "python"), "-c",
			"import importlib.metadata as m; print(m.version('aiperf'))"))
	}
	return strings.Join(out, ", ")
}
