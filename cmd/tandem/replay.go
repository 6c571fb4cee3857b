package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tandem/picker"
	"tandem/picker/admission"
	"tandem/replay"
	"tandem/replay/report"
	"tandem/replay/sessions"
	"tandem/replay/traces"
)

const defaultTrace = "mooncake"

// newReplay is `tandem replay`.
func newReplay() *cobra.Command {
	o := replayOptions{Config: replay.DefaultConfig()}
	c := &cobra.Command{
		Use: "replay", Short: "Play a trace against modelled engines under several routing policies", Args: arguments(0),
		Long: "Play a trace against modelled engines under several routing policies.\n\n" +
			"Traces: mooncake (the public one), a file in Mooncake's format, or a synthetic one:\n" +
			listed(traces.Kinds()) + ".\n" +
			"With --load also seq:agent:reasoning (one after the other), wave:rag:reasoning (in waves), day:mixed.\n\n" +
			"With --sessions it plays sessions, each of whose requests comes after the answer before it:\n" +
			listed(sessions.Kinds()) + ", or those of a file or folder (kv-cache-tester's, aiperf's, or as\n" +
			"replay/sessions says). Policies may then be oracles, too (idle, lru, belady), and say how they split and\n" +
			"on what fleet: tandem/never, tandem/roles, tandem@2+6; tandem-no-events guesses what engines hold.\n\nPolicies:\n" + listed(replay.Policies()) + ".\n\n" +
			"With --recording it plays what a fleet was asked, first on that fleet beside what was measured, then on others\n" +
			"(--what-if, --advise).\n\n" +
			"Suites play the scenarios of docs/benchmarks.md and print its tables: quick, full, shared (prefixes that\n" +
			"many prompts have), engines (other engines, links and answers), roles (engines that serve both legs) or\n" +
			"agents (sessions of coding agents; with --trace, those of a file).",
		RunE: func(c *cobra.Command, _ []string) error {
			if err := o.recording.check(c.Flags()); err != nil {
				return err
			}
			return replayTrace(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&o.trace, "trace", defaultTrace, "`TRACE` to play: a name from above, or a file (.gz: compressed)")
	f.StringVar(&o.policies, "policy", "all", "`NAMES` of policies, separated by commas")
	f.IntVar(&o.Prefill, "prefill", o.Prefill, "`ENDPOINTS` that prefill")
	f.IntVar(&o.Decode, "decode", o.Decode, "`ENDPOINTS` that decode")
	f.IntVar(&o.Both, "both", 0, "`ENDPOINTS` that serve both legs, in place of --prefill and --decode")
	f.BoolVar(&o.Roles, "roles", false, "tandem decides which endpoints of --both prefill now (roles: auto of a pool)")
	f.Float64Var(&o.Promise.TTFT, "promise-ttft", o.Promise.TTFT,
		"`SECONDS` to the first token that tandem's pool promises; 0: none")
	f.Float64Var(&o.Promise.TPOT, "promise-tpot", o.Promise.TPOT,
		"`SECONDS` between tokens that tandem's pool promises; 0: none")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`SEED` of all random choices; of suites for roles alone")
	f.IntVar(&o.requests, "requests", 12000, "`NUMBER` of requests in a synthetic trace")
	f.Float64Var(&o.rate, "rate", 1, "arrivals `TIMES` as fast")
	f.Float64Var(&o.load, "load", 0, "set the rate by the fleet's `LOAD`; 1 saturates it, if its caches were one")
	f.Float64Var(&o.Engine.KVTokens, "kv-tokens", o.Engine.KVTokens, "KV `TOKENS` that an endpoint holds; 0: caches never forget")
	f.Float64Var(&o.Engine.TokenBytes, "kv-bytes", o.Engine.TokenBytes, "`BYTES` of KV for a token")
	f.Float64Var(&o.bandwidth, "bandwidth", o.Engine.Bandwidth/1e9, "of KV transfers, `GB/S`")
	f.Float64Var(&o.slow, "slow", 1, "engines take so many `TIMES` as long as tandem assumes at first")
	f.IntVar(&o.LocalTokens, "decode-step-tokens", o.LocalTokens, "prompt and answer `TOKENS` in one step of an endpoint that decodes")
	f.BoolVar(&o.immediate, "immediate", false, "tandem binds requests when they arrive, instead of when an endpoint is free")
	f.DurationVar(&o.wait, "max-wait", time.Duration(admission.MaxWait*float64(time.Second)), "longest `TIME` that requests wait for an endpoint; 0: without end")
	f.StringVar(&o.split, "split", "auto", "when tandem splits a request: always, auto or never")
	f.Float64Var(&o.AnswerWeight, "answer-weight", o.AnswerWeight,
		"`WEIGHT` of a second of answers in tandem's price (answerWeight of a pool)")
	f.BoolVar(&o.Routed, "routed-index", false, "tandem learns caches from what it routed, not from engines' events")
	f.IntVar(&o.Replicas, "replicas", 1, "`NUMBER` of tandems that take turns")
	f.DurationVar(&o.sharing, "sharing", 0, "`TIME` until tandems know each other's decisions; negative: never")
	f.Float64Var(&o.TTFT, "ttft", o.TTFT, "target of goodput: `SECONDS` to the first token")
	f.Float64Var(&o.AskTPOT, "ask-tpot", 0, "requests ask tandem for so many `SECONDS` between tokens; 0: they do not")
	f.Float64Var(&o.TPOT, "tpot", o.TPOT, "target of goodput: `SECONDS` between tokens")
	f.BoolVar(&o.asJSON, "json", false, "print one JSON object per policy, each on one line, and nothing else")
	f.StringVar(&o.html, "html", "", "write the report to `FILE`; - for none (default tandem-replay.html; none with --json or --recording)")
	o.closed.flags(f)
	o.recording.flags(f)
	f.StringVar(&o.suite, "suite", "", "play a `SUITE` instead of one trace")
	f.Lookup("kv-tokens").DefValue = fmt.Sprintf("%.0f", o.Engine.KVTokens) // pflag would say 1e+06
	return c
}

// listed writes names over lines of at most 100 characters.
func listed(names []string) string {
	var out strings.Builder
	used := 0
	for i, name := range names {
		if i > 0 {
			out.WriteByte(',')
			if used += len(name) + 2; used > 100 {
				out.WriteString("\n")
				used = len(name)
			} else {
				out.WriteByte(' ')
			}
		} else {
			used = len(name)
		}
		out.WriteString(name)
	}
	return out.String()
}

// replayOptions are the command's flags.
type replayOptions struct {
	replay.Config
	closed                              closedOptions
	recording                           recordingOptions
	trace, policies, split, html, suite string
	requests                            int
	rate, load, bandwidth, slow         float64
	immediate, asJSON                   bool
	wait, sharing                       time.Duration
}

// replayTrace plays a trace against a model of the engines under several policies.
func replayTrace(ctx context.Context, o replayOptions, stdout, stderr io.Writer) error {
	bars := stderr
	if !isTerminal(stderr) { // a file would get a line of hundreds of bars
		bars = io.Discard
	}
	c, err := o.config()
	if err != nil {
		return err
	}
	if o.html != "" && o.html != "-" { // not after minutes
		if err := writable(o.html); err != nil {
			return fmt.Errorf("--html: %w", err)
		}
	}
	if len(o.recording.files) > 0 {
		o.Config = c
		return replayRecording(ctx, o, stdout, bars)
	}
	if o.suite == "agents" {
		return agentsSuite(ctx, o, stdout, bars)
	}
	if o.suite != "" {
		return replay.Suite(ctx, o.suite, c.Seed, stdout, bars)
	}
	if o.recording.profile != "" {
		v := replay.Variant{Config: c}
		if err := replay.ReadProfile(o.recording.profile, &v); err != nil {
			return err
		}
		c = v.Config
		o.closed.host = max(o.closed.host, v.Host/c.Engine.KVTokens)
	}
	if o.closed.active != "" {
		return replaySessions(ctx, o, c, stdout, bars)
	}
	if slices.Contains(sessions.Kinds(), o.trace) || replay.IsTrace(o.trace) && replay.IsSessions(o.trace) {
		return fmt.Errorf("--trace: %s is sessions: --sessions says how many at a time", o.trace)
	}
	names := replay.Policies()
	if o.policies != "all" {
		names = strings.Split(o.policies, ",")
	} else if c.Both == 0 { // those that never split would leave endpoints of a fixed role idle
		names = slices.DeleteFunc(names, func(name string) bool { return strings.HasSuffix(name, "/never") })
	}
	if err := replay.CheckPolicies(names); err != nil {
		return err
	}
	t, err := replay.Prepare(o.trace, o.requests, o.rate, o.load, c)
	if err != nil {
		return err
	}
	results, err := replay.RunAll(ctx, t, names, c, bars)
	if err != nil {
		return err
	}
	if o.asJSON {
		enc := json.NewEncoder(stdout)
		for _, r := range results {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
	} else {
		report.Print(stdout, results)
	}
	return writeReport(o.html, o.asJSON, t, c, results, stderr)
}

// config returns the fleet and the settings that the flags say.
func (o *replayOptions) config() (replay.Config, error) {
	c := o.Config
	c.Late, c.Sharing = !o.immediate, o.sharing.Seconds()
	if c.MaxWait = o.wait.Seconds(); c.MaxWait <= 0 {
		c.MaxWait = math.Inf(1)
	}
	c.Engine.Bandwidth = o.bandwidth * 1e9
	c.Engine = replay.Slower(c.Engine, o.slow)
	if c.Engine.KVTokens <= 0 {
		c.Engine.KVTokens = math.Inf(1)
	}
	var ok bool
	if c.Split, ok = map[string]picker.Split{"always": picker.SplitAlways, "auto": picker.SplitAuto, "never": picker.SplitNever}[o.split]; !ok {
		return c, fmt.Errorf("--split: %q is not always, auto or never", o.split)
	}
	return c, nil
}

// writeReport writes the HTML page where it is wanted.
func writeReport(file string, asJSON bool, t *traces.Trace, c replay.Config, results []*replay.Result, stderr io.Writer) (err error) {
	if file == "-" || file == "" && asJSON {
		return nil
	}
	file = cmp.Or(file, "tandem-replay.html")
	out, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("writing the report: %w", err)
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	fmt.Fprintln(stderr, "report:", file)
	return (&report.Report{Title: "Replay of " + t.Name, About: replay.About(t, c), Results: results}).Write(out)
}
