package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"tandem/replay"
	"tandem/replay/report"
	"tandem/replay/sessions"
)

// generated is how many sessions are generated to draw from.
const generated = 1000

// closedOptions are the flags of closed loops.
type closedOptions struct {
	play   replay.Closed
	active string
	seeds  int
	limits sessions.Limits
	host   float64 // times the KV memory
}

func (o *closedOptions) flags(f *pflag.FlagSet) {
	o.play, o.limits = replay.DefaultClosed(), sessions.DefaultLimits()
	f.StringVar(&o.active, "sessions", "", "play sessions, so `MANY` at a time; 32-128: a day from 32 to 128 and back")
	f.Float64Var(&o.play.Day, "day", 4*3600, "of --sessions 32-128: length of the day, `SECONDS`")
	f.Float64Var(&o.play.PerHour, "sessions-per-hour", 0, "so `MANY` sessions come in an hour; --sessions are there at first")
	f.Float64Var(&o.play.Patience, "patience", 0, "users of sessions give up after so many `SECONDS` without a first token; 0: never")
	f.Float64Var(&o.limits.Think, "longest-gap", o.limits.Think, "longer gaps in sessions last so many `SECONDS`")
	f.IntVar(&o.limits.Context, "longest-context", o.limits.Context, "sessions end before they need more `TOKENS`")
	f.Float64Var(&o.play.Warm, "warm-up", o.play.Warm, "`SECONDS` of sessions before those that are measured")
	f.Float64Var(&o.play.Measured, "measured", o.play.Measured, "`SECONDS` of sessions that are measured")
	f.IntVar(&o.seeds, "seeds", 1, "play sessions with so `MANY` seeds, from --seed on")
	f.Float64Var(&o.host, "host-memory", 0, "engines have host memory for so many `TIMES` their KV")
}

// open reads or generates sessions.
func (o *closedOptions) open(trace string, seed uint64) (all []sessions.Session, err error) {
	if slices.Contains(sessions.Kinds(), trace) {
		all, err = sessions.Generate(trace, generated, seed)
	} else {
		all, err = sessions.Open(trace)
	}
	return sessions.Within(all, o.limits), err
}

// agentsSuite plays the suite of agents with the sessions of a file, if one is named.
func agentsSuite(ctx context.Context, o replayOptions, stdout, bars io.Writer) error {
	trace := o.trace
	if trace == defaultTrace {
		trace = "coding"
	}
	all, err := o.closed.open(trace, 1)
	if err != nil {
		return err
	}
	return replay.AgentsSuite(ctx, all, o.Seed, stdout, bars)
}

// replaySessions plays sessions in a closed loop.
func replaySessions(ctx context.Context, o replayOptions, c replay.Config, stdout, bars io.Writer) error {
	x := o.closed
	var err error
	if n, _ := fmt.Sscanf(x.active+".", "%d-%d.", &x.play.Active, &x.play.Most); n != 2 {
		if x.play.Most = 0; n < 1 {
			return fmt.Errorf("--sessions: %q is not a number, or two such as 32-128", x.active)
		}
	}
	if x.play.Sessions, err = x.open(o.trace, c.Seed); err != nil {
		return err
	}
	if x.host > 0 {
		x.play = x.play.Host(&c, x.host)
	}
	names := strings.Split(o.policies, ",")
	if o.policies == "all" {
		names = append(replay.Oracles(), replay.Policies()...)
	}
	var who []replay.Contender
	for _, name := range names {
		w, err := replay.ParseContender(name)
		if err != nil {
			return err
		}
		who = append(who, w)
	}
	var seeds []uint64
	for i := range x.seeds {
		seeds = append(seeds, c.Seed+uint64(i))
	}
	results, err := replay.RunContenders(ctx, who, seeds, c, x.play, bars)
	if err != nil {
		return err
	}
	if !o.asJSON {
		report.PrintClosed(stdout, results)
		return nil
	}
	enc := json.NewEncoder(stdout)
	for _, row := range results {
		for _, r := range row {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
	}
	return nil
}
