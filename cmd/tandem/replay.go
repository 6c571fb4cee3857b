package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"strings"
	"time"

	"tandem/picker"
	"tandem/replay"
)

// replayTrace plays a trace against a model of the engines under several policies.
func replayTrace(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	c := replay.DefaultConfig()
	flags := flag.NewFlagSet("tandem replay", flag.ContinueOnError)
	flags.SetOutput(stderr)
	trace := flags.String("trace", "mooncake", "`FILE` in Mooncake's format (.gz: compressed), mooncake for the public one, or conversation, agent, mixed to make one up")
	policies := flags.String("policy", strings.Join(replay.Policies(), ","), "`names`, separated by commas")
	flags.IntVar(&c.Prefill, "prefill", c.Prefill, "`endpoints` that prefill")
	flags.IntVar(&c.Decode, "decode", c.Decode, "`endpoints` that decode")
	flags.Uint64Var(&c.Seed, "seed", c.Seed, "of all chance")
	requests := flags.Int("requests", 12000, "`number` of a trace that is made up")
	rate := flags.Float64("rate", 1, "arrivals `times` as fast")
	load := flags.Float64("load", 0, "set the rate by the fleet's `load` instead: 1 is where it saturates if all its caches were one")
	flags.Float64Var(&c.Engine.KVTokens, "kv-tokens", c.Engine.KVTokens, "KV `tokens` that an endpoint holds; 0: caches never forget")
	immediate := flags.Bool("immediate", false, "tandem binds requests when they arrive, instead of when an endpoint is free")
	wait := flags.Duration("max-wait", time.Duration(picker.MaxWait*float64(time.Second)), "the longest `time` that requests wait with tandem for their endpoint; 0: without end")
	split := flags.String("split", "auto", "when tandem splits a request: always, auto or never")
	temperature := flags.Duration("temperature", 0, "`price` that makes an endpoint e times as seldom tandem's choice; 0: it takes the cheapest")
	flags.BoolVar(&c.Routed, "routed-index", false, "tandem knows of caches by what it routed, not by the engines' events")
	flags.IntVar(&c.Replicas, "replicas", 1, "`number` of tandems that take turns")
	sharing := flags.Duration("sharing", 0, "`time` until they know of each other's decisions; negative: never")
	flags.Float64Var(&c.TTFT, "ttft", c.TTFT, "target of goodput: `seconds` to the first token")
	flags.Float64Var(&c.TPOT, "tpot", c.TPOT, "target of goodput: `seconds` between tokens")
	asJSON := flags.Bool("json", false, "one JSON object a policy and line, and nothing else, to standard output")
	html := flags.String("html", "", "write the report to `FILE`; - for none (default tandem-replay.html, none with -json)")
	suite := flags.String("suite", "", "play the scenarios of docs/benchmarks.md instead, and print its tables: quick or full")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if *suite != "" {
		return replay.Suite(ctx, *suite, stdout, stderr)
	}
	c.Late, c.Sharing, c.Temperature = !*immediate, sharing.Seconds(), temperature.Seconds()
	if c.MaxWait = wait.Seconds(); c.MaxWait <= 0 {
		c.MaxWait = math.Inf(1)
	}
	if c.Engine.KVTokens <= 0 {
		c.Engine.KVTokens = math.Inf(1)
	}
	var ok bool
	if c.Split, ok = map[string]picker.Split{"always": picker.SplitAlways, "auto": picker.SplitAuto, "never": picker.SplitNever}[*split]; !ok {
		return fmt.Errorf("-split: %q is not always, auto or never", *split)
	}
	names := strings.Split(*policies, ",")
	if err := replay.CheckPolicies(names); err != nil {
		return err
	}
	t, err := replay.Prepare(*trace, *requests, *rate, *load, c)
	if err != nil {
		return err
	}
	results, err := replay.RunAll(ctx, t, names, c, stderr)
	if err != nil {
		return err
	}
	if *asJSON {
		enc := json.NewEncoder(stdout)
		for _, r := range results {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
	} else {
		replay.Print(stdout, results)
	}
	return writeReport(*html, *asJSON, t, c, results, stderr)
}

// writeReport writes the HTML page where it is wanted.
func writeReport(file string, asJSON bool, t *replay.Trace, c replay.Config, results []*replay.Result, stderr io.Writer) (err error) {
	if file == "" && !asJSON {
		file = "tandem-replay.html"
	}
	if file == "" || file == "-" {
		return nil
	}
	out, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	fmt.Fprintln(stderr, "report:", file)
	return (&replay.Report{Title: "Replay of " + t.Name, About: replay.About(t, c), Results: results}).Write(out)
}
