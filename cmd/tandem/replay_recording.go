package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"tandem/recording"
	"tandem/replay"
)

// recordingOptions are the flags of recordings.
type recordingOptions struct {
	file, pool, profile, export string
	whatIf                      []string
	advise                      int
	needed                      bool
}

func (o *recordingOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&o.file, "recording", "", "play a recording: a `FILE`, or a folder with all of its files")
	f.StringVar(&o.pool, "pool", "", "of --recording: the `POOL` (default: the one with most requests)")
	f.StringVar(&o.profile, "profile", "",
		"of --recording: engines are as `FILE` of tandem profile says, not as Tandem had learned")
	f.StringArrayVar(&o.whatIf, "what-if", nil,
		"of --recording: also play it so, a `VARIANT` each: 4+4, 8, \"8 roles:auto\", split:never, "+
			"host:2000000, kv:500000, binding:immediate, policy:llm-d, load:2")
	f.IntVar(&o.advise, "advise", 0, "of --recording: search fleets of up to so `MANY` engines, and say which to run")
	f.BoolVar(&o.needed, "needed", false, "of --what-if: also search how many engines keep the promise")
	f.StringVar(&o.export, "export", "",
		"of --recording: write it to `FILE` as Mooncake's jsonl (.jsonl) or sessions (.sessions), and exit")
}

// replayRecording plays a recording on the fleet that it was made of, and on others.
func replayRecording(ctx context.Context, o replayOptions, stdout, bars io.Writer) error {
	x := &o.recording
	from, err := recording.Open(x.file)
	if err != nil {
		return err
	}
	load, err := replay.LoadRecorded(from, x.pool)
	if err != nil {
		return err
	}
	if x.export != "" {
		return exportRecording(load, x.export)
	}
	now, notes := load.Variant()
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
	if o.asJSON {
		return recordingJSON(ctx, stdout, load, now, replayed, variants, x.advise)
	}
	printCompared(stdout, load, &now, replayed, append(notes, load.Notes...))
	if len(variants) > 0 {
		fmt.Fprintln(stdout, "\nWhat if")
		if err := printVariants(ctx, stdout, load, replay.Row{Variant: now, RecordedResult: replayed}, variants, x.needed); err != nil {
			return err
		}
	}
	if x.advise > 0 {
		return advise(ctx, stdout, load, now, x.advise)
	}
	return nil
}

// recordingJSON prints what was measured and what is replayed as one object.
func recordingJSON(ctx context.Context, w io.Writer, load *replay.Recorded, now replay.Variant,
	replayed *replay.RecordedResult, variants []replay.Variant, most int) error {
	type row struct {
		Name string `json:"name"`
		*replay.RecordedResult
	}
	out := struct {
		Measured *replay.RecordedResult `json:"measured"`
		Replayed row                    `json:"replayed"`
		Rows     []row                  `json:"rows,omitempty"`
		Run      string                 `json:"run,omitempty"` // the fleet that is advised
		Advice   []string               `json:"advice,omitempty"`
	}{Measured: load.Measured(&now.Config), Replayed: row{now.Name, replayed}}
	for i := range variants {
		r, err := variants[i].Play(ctx, load)
		if err != nil {
			return err
		}
		out.Rows = append(out.Rows, row{variants[i].Name, r})
	}
	if most > 0 {
		a, err := replay.Advise(ctx, load, now, most, func(r *replay.Row) {
			out.Rows = append(out.Rows, row{r.Name, r.RecordedResult})
		})
		if err != nil {
			return err
		}
		out.Run, out.Advice = a.Best().Name, a.Sentences()
	}
	return json.NewEncoder(w).Encode(out)
}

// fewRequests is how many requests say little: of them the p95 is one or two.
const fewRequests = 100

// printCompared prints how well the replay predicts what happened.
func printCompared(w io.Writer, load *replay.Recorded, now *replay.Variant, replayed *replay.RecordedResult,
	notes []string) {
	measured := load.Measured(&now.Config)
	off := replay.Off(measured, replayed)
	if len(off) > 0 {
		fmt.Fprintln(w, "The replay is off by more than a fifth, so do not trust what it says of other fleets:")
		for _, line := range off {
			fmt.Fprintln(w, "  "+line)
		}
		if len(notes) == 0 {
			fmt.Fprintln(w, "  no reason is known: engines may differ in kind from the model (tandem profile measures one)")
		}
	}
	if measured.TTFT.Mean == 0 {
		fmt.Fprintln(w, "No stream's times were read (usage), so nobody knows whether the replay is right.")
	}
	if measured.Requests < fewRequests {
		notes = append(notes, fmt.Sprintf("%d requests are few: record more before you decide anything", measured.Requests))
	}
	for _, n := range notes {
		fmt.Fprintln(w, "  note:", n)
	}
	fmt.Fprintf(w, "%d requests in %.0f s on %s (pool %s), first token within %g s and a token each %g ms promised\n",
		len(load.Turns), load.Seconds, now.Fleet(), load.Pool.Name, now.Config.TTFT, 1000*now.Config.TPOT)
	if load.Sample > 1 {
		fmt.Fprintf(w, "one conversation in %d was recorded; each is played so many times\n", load.Sample)
	}
	for _, why := range slices.Sorted(maps.Keys(load.Skipped)) {
		fmt.Fprintf(w, "%d requests are not played: they %s\n", load.Skipped[why], why)
	}
	if load.Guessed > 0 {
		fmt.Fprintf(w, "%d answers have the mean length: nobody read how long they were (usage)\n", load.Guessed)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "\n\tmeasured\treplayed")
	row := func(what string, was, is float64, format string) {
		text := "unknown"
		if was >= 0 {
			text = fmt.Sprintf(format, was)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", what, text, fmt.Sprintf(format, is))
	}
	unless := func(s replay.Spread, x float64) float64 {
		if s.Mean == 0 {
			return -1
		}
		return x
	}
	row("promise kept", 100*measured.Kept, 100*replayed.Kept, "%.1f %%")
	row("first token, p50", unless(measured.TTFT, measured.TTFT.P50), replayed.TTFT.P50, "%.3f s")
	row("first token, p95", unless(measured.TTFT, measured.TTFT.P95), replayed.TTFT.P95, "%.3f s")
	row("per token, mean", unless(measured.TPOT, 1000*measured.TPOT.Mean), 1000*replayed.TPOT.Mean, "%.1f ms")
	row("per token, p95", unless(measured.TPOT, 1000*measured.TPOT.P95), 1000*replayed.TPOT.P95, "%.1f ms")
	row("cached", 100*measured.Cached, 100*replayed.Cached, "%.1f %%")
	row("in the queue, mean", measured.Waits.Mean, replayed.Waits.Mean, "%.3f s")
	row("in the queue, p95", measured.Waits.P95, replayed.Waits.P95, "%.3f s")
	_ = t.Flush()
}

func variantHead(t io.Writer, needed bool) {
	fmt.Fprint(t, "\tpromise kept\tfirst token p50, p95\tper token mean, p95\tcached\tcomputed again\tin the queue, p95")
	if needed {
		fmt.Fprint(t, "\tengines that keep it")
	}
	fmt.Fprintln(t)
}

func variantRow(t io.Writer, name string, r *replay.RecordedResult) {
	fmt.Fprintf(t, "%s\t%.1f %%\t%.2f, %.2f s\t%.1f, %.1f ms\t%.1f %%\t%.1f %%\t%.2f s", name, 100*r.Kept, r.TTFT.P50,
		r.TTFT.P95,
		1000*r.TPOT.Mean, 1000*r.TPOT.P95, 100*r.Cached, 100*r.Again, r.Waits.P95)
}

// printVariants plays variants, and prints them below the fleet as it was, which has been played.
func printVariants(
	ctx context.Context, w io.Writer, load *replay.Recorded, was replay.Row, variants []replay.Variant, needed bool,
) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	variantHead(t, needed)
	row := func(name string, v *replay.Variant, r *replay.RecordedResult) error {
		variantRow(t, name, r)
		if needed {
			n, err := v.Needed(ctx, load, 32)
			if err != nil {
				return err
			}
			text := fmt.Sprint(n)
			if n == 0 {
				text = "more than 32"
			}
			fmt.Fprint(t, "\t"+text)
		}
		fmt.Fprintln(t)
		return nil
	}
	if err := row(was.Name+" (as it was)", &was.Variant, was.RecordedResult); err != nil {
		return err
	}
	for i := range variants {
		v := &variants[i]
		r, err := v.Play(ctx, load)
		if err != nil {
			return err
		}
		if err := row(v.Name, v, r); err != nil {
			return err
		}
	}
	return t.Flush()
}

func advise(ctx context.Context, w io.Writer, load *replay.Recorded, now replay.Variant, most int) error {
	fmt.Fprintf(w, "\nFleets of up to %d engines\n", most)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	variantHead(t, false)
	a, err := replay.Advise(ctx, load, now, most, func(r *replay.Row) {
		variantRow(t, r.Name, r.RecordedResult)
		fmt.Fprintln(t)
	})
	if err != nil {
		return err
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w, "\n"+strings.Join(a.Sentences(), "\n"))
	return nil
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
