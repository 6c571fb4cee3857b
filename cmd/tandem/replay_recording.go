package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"tandem/recording"
	"tandem/replay"
	"tandem/replay/report"
	"tandem/replay/traces"
)

// recordingOptions are the flags of recordings.
type recordingOptions struct {
	files, whatIf         []string
	pool, profile, export string
	advise                int
	needed                bool
}

func (o *recordingOptions) flags(f *pflag.FlagSet) {
	f.StringArrayVar(&o.files, "recording", nil,
		"play a recording: a `FILE`, or a folder of files; those of several replicas are joined")
	f.StringVar(&o.pool, "pool", "", "of --recording: the `POOL` (default: the one with most requests)")
	f.StringVar(&o.profile, "profile", "",
		"engines are as `FILE` of tandem profile says; with --recording not as Tandem had learned")
	f.StringArrayVar(&o.whatIf, "what-if", nil,
		"of --recording: also play it so, a `VARIANT` each: 4+4, 8, \"8 roles:auto\", split:never, "+
			"host:2000000, kv:500000, binding:immediate, policy:llm-d, load:2")
	f.IntVar(&o.advise, "advise", 0, "of --recording: search fleets of up to so `MANY` engines, and say which to run")
	f.BoolVar(&o.needed, "needed", false, "of --what-if: also search how many engines keep the promise")
	f.StringVar(&o.export, "export", "",
		"of --recording: write it to `FILE` as Mooncake's jsonl (.jsonl) or sessions (.sessions), and exit")
}

// check refuses flags that would change nothing, since what is played is not what they say.
func (o *recordingOptions) check(given *pflag.FlagSet) (err error) {
	if len(o.files) == 0 {
		return nil
	}
	trace := len(o.files) == 1 && replay.IsTrace(o.files[0])
	fleet := []string{"prefill", "decode", "both", "roles", "promise-ttft", "promise-tpot", "kv-tokens", "kv-bytes", "bandwidth", "slow",
		"decode-step-tokens", "immediate", "max-wait", "split", "answer-weight", "routed-index", "replicas", "sharing", "ttft", "ask-tpot", "tpot"}
	of := []string{"recording", "pool", "what-if", "needed", "advise", "export", "profile", "seed", "json", "html"}
	given.Visit(func(f *pflag.Flag) {
		switch {
		case slices.Contains(of, f.Name), trace && slices.Contains(fleet, f.Name):
		case slices.Contains(fleet, f.Name):
			err = fmt.Errorf("--%s: a recording has its own; --what-if plays it otherwise", f.Name)
		default:
			err = fmt.Errorf("--%s has nothing to do with --recording", f.Name)
		}
	})
	if err == nil && given.Changed("advise") && (o.advise < 2 || o.advise > 1024) {
		err = fmt.Errorf("--advise: fleets have 2 to 1024 engines, not %d", o.advise)
	}
	return err
}

// replayRecording plays a recording on the fleet that it was made of, and on others.
func replayRecording(ctx context.Context, o replayOptions, stdout, bars io.Writer) error {
	x := &o.recording
	load, now, notes, err := x.load(o.Config)
	if err != nil {
		return err
	}
	if x.export != "" {
		return exportRecording(load, x.export)
	}
	now.Config.Seed = o.Seed
	if x.profile != "" {
		if err := replay.ReadProfile(x.profile, &now); err != nil {
			return err
		}
		notes = nil
	}
	var variants []replay.Variant
	for _, text := range x.whatIf {
		v, err := now.With(text)
		if err != nil {
			return fmt.Errorf("--what-if: %w", err)
		}
		variants = append(variants, v)
	}
	now.Config.Progress = replay.NewBar(bars, "replay").Show
	replayed, err := now.Play(ctx, load)
	if err != nil {
		return err
	}
	now.Config.Progress = nil
	a := replay.NewAnswer(load, now, replayed, notes)
	if err := x.ask(ctx, a, variants, o.html != "" && o.html != "-"); err != nil {
		return err
	}
	if o.html != "" && o.html != "-" {
		if err := writePage(o.html, a); err != nil {
			return err
		}
		fmt.Fprintln(bars, "page:", o.html)
	}
	if o.asJSON {
		return printAnswerJSON(stdout, a)
	}
	printAnswer(stdout, a, x)
	return nil
}

// load reads recordings, and the fleet that they were made of; or a trace, whose fleet flags say.
func (o *recordingOptions) load(flags replay.Config) (*replay.Recorded, replay.Variant, []string, error) {
	if len(o.files) == 1 && replay.IsTrace(o.files[0]) {
		load, err := loadTrace(o.files[0], flags.Seed)
		now := replay.Variant{Policy: "tandem", Config: flags, Load: 1}
		now.Name = now.Fleet()
		return load, now, []string{"a trace: nobody measured how it was served"}, err
	}
	from, err := recording.Open(o.files...)
	if err != nil {
		return nil, replay.Variant{}, nil, err
	}
	load, err := replay.LoadRecorded(from, o.pool)
	if err != nil {
		return nil, replay.Variant{}, nil, err
	}
	now, notes := load.Variant()
	return load, now, notes, nil
}

func loadTrace(file string, seed uint64) (*replay.Recorded, error) {
	if replay.IsSessions(file) {
		return replay.LoadSessions(file)
	}
	t, err := traces.Open(file, 0, seed)
	if err != nil {
		return nil, err
	}
	return replay.LoadTrace(t)
}

// ask plays all that was asked for, and the loads of pictures where there is a page.
func (o *recordingOptions) ask(ctx context.Context, a *replay.Answer, variants []replay.Variant, page bool) error {
	if len(variants) > 0 && o.needed {
		if err := a.Need(ctx, &a.Now); err != nil {
			return err
		}
	}
	for i := range variants {
		if err := a.WhatIf(ctx, &variants[i]); err != nil {
			return err
		}
		if o.needed {
			if err := a.Need(ctx, &a.Rows[i]); err != nil {
				return err
			}
		}
	}
	if o.advise > 0 {
		if err := a.Advise(ctx, o.advise); err != nil {
			return err
		}
	}
	if page {
		return a.Draw(ctx)
	}
	return nil
}

// writePage writes the answer as a page.
func writePage(file string, a *replay.Answer) (err error) {
	to, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	return report.WriteAnswer(to, a)
}

// printAnswerJSON prints what was measured and what is replayed as one object.
func printAnswerJSON(w io.Writer, a *replay.Answer) error {
	type row struct {
		Name string `json:"name"`
		*replay.RecordedResult
	}
	out := struct {
		Measured *replay.RecordedResult `json:"measured"`
		Replayed row                    `json:"replayed"`
		Rows     []row                  `json:"rows,omitempty"`
		Off      []string               `json:"off,omitempty"`    // by more than a fifth
		Notes    []string               `json:"notes,omitempty"`  // what is known to disturb
		Run      string                 `json:"run,omitempty"`    // the fleet that is advised
		Advice   []string               `json:"advice,omitempty"` // in sentences
	}{Measured: a.Measured, Replayed: row{a.Now.Name, a.Now.RecordedResult}, Off: a.Off, Notes: a.Notes}
	for _, r := range slices.Concat(a.Rows, a.Fleets) {
		out.Rows = append(out.Rows, row{r.Name, r.RecordedResult})
	}
	if a.Advice != nil {
		out.Run, out.Advice = a.Advice.Best().Name, a.Advice.Sentences()
	}
	return json.NewEncoder(w).Encode(out)
}

// printAnswer prints how well the replay predicts what happened, and then what was asked.
func printAnswer(w io.Writer, a *replay.Answer, x *recordingOptions) {
	printCompared(w, a)
	table := func(title string, rows []replay.Row, needed bool) {
		fmt.Fprintln(w, "\n"+title)
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		variantHead(t, needed)
		for i := range rows {
			variantRow(t, &rows[i], needed)
		}
		_ = t.Flush()
	}
	if len(a.Rows) > 0 {
		was := a.Now
		was.Name += " (as it was)"
		table("What if", append([]replay.Row{was}, a.Rows...), x.needed)
	}
	if a.Advice != nil {
		table(fmt.Sprintf("Fleets of up to %d engines", x.advise), a.Fleets, false)
		fmt.Fprintln(w, "\n"+strings.Join(a.Advice.Sentences(), "\n"))
	}
}

func printCompared(w io.Writer, a *replay.Answer) {
	if len(a.Off) > 0 {
		fmt.Fprintln(w, replay.OffWarning)
		for _, line := range a.Off {
			fmt.Fprintln(w, "  "+line)
		}
	}
	for _, n := range a.Notes {
		fmt.Fprintln(w, "  note:", n)
	}
	fmt.Fprintln(w, strings.Join(a.About(), "\n"))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\n\tmeasured\treplayed")
	for _, c := range a.Compared() {
		fmt.Fprintf(t, "%s\t%s\t%s\n", c.What, c.Measured, c.Replayed)
	}
	_ = t.Flush()
}

func variantHead(t io.Writer, needed bool) {
	fmt.Fprint(t, "\tpromise kept\tfirst token p50, p95\tper token mean, p95\tcached\tcomputed again\tin the queue, p95")
	if needed {
		fmt.Fprint(t, "\tengines that keep it")
	}
	fmt.Fprintln(t)
}

func variantRow(t io.Writer, r *replay.Row, needed bool) {
	fmt.Fprintf(t, "%s\t%.1f %%\t%.2f, %.2f s\t%.1f, %.1f ms\t%.1f %%\t%.1f %%\t%.2f s", r.Name, 100*r.Kept, r.TTFT.P50,
		r.TTFT.P95, 1000*r.TPOT.Mean, 1000*r.TPOT.P95, 100*r.Cached, 100*r.Again, r.Waits.P95)
	if needed {
		fmt.Fprint(t, "\t"+r.NeededWords())
	}
	fmt.Fprintln(t)
}

// exportRecording writes a recording in a common format.
func exportRecording(load *replay.Recorded, file string) (err error) {
	write := load.WriteMooncake
	if strings.HasSuffix(file, ".sessions") {
		write = load.WriteSessions
	}
	to, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("--export: %w", err)
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	return write(to)
}
