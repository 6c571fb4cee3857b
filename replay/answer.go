package replay

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
)

// Answer is what the replay of a recording says: how right it is, how other fleets would do, and what to run.
type Answer struct {
	Load     *Recorded
	Measured *RecordedResult // what happened
	Now      Row             // what the replay of the fleet says that it was
	Off      []string        // of that, what is off by more than a fifth
	Notes    []string        // what the replay does not know
	Rows     []Row           // what-if
	Fleets   []Row           // that were searched for the advice
	Advice   *Advice         // nil: none was asked for
	Curves   []Curve         // pictures of the fleets that matter
}

// Curve is how a fleet does with other loads.
type Curve struct {
	Of   Row
	Kept []float64 // share of requests that keep their targets, at each of [Loads]
}

// fewRequests is how many requests say little: of them the p95 is one or two.
const fewRequests = 100

// NewAnswer compares the replay of a fleet with what happened.
func NewAnswer(load *Recorded, now Variant, replayed *RecordedResult, notes []string) *Answer {
	a := &Answer{Load: load, Measured: load.Measured(&now.Config), Now: Row{Variant: now, RecordedResult: replayed}}
	a.Off = Off(a.Measured, replayed)
	a.Notes = append(notes, load.Notes...)
	if len(a.Off) > 0 && len(a.Notes) == 0 {
		a.Notes = append(a.Notes, "no reason is known: engines may differ in kind from the model (tandem profile "+
			"measures one)")
	}
	if a.Measured.TTFT.Mean == 0 {
		a.Notes = append(a.Notes, "no stream's times were read (usage), so nobody knows whether the replay is right")
	}
	if a.Measured.Requests < fewRequests {
		a.Notes = append(a.Notes, fmt.Sprintf("%d requests are few: record more before you decide anything",
			a.Measured.Requests))
	}
	return a
}

// OffWarning is what is said on top of figures that are off.
const OffWarning = "The replay is off by more than a fifth, so do not trust what it says of other fleets:"

// About returns what was played, in sentences.
func (a *Answer) About() []string {
	load, c := a.Load, &a.Now.Config
	out := []string{fmt.Sprintf("%d requests in %.0f s on %s (pool %s), first token within %g s and a token each %g "+
		"ms promised",
		len(load.Turns), load.Seconds, a.Now.Fleet(), load.Pool.Name, c.TTFT, 1000*c.TPOT)}
	if load.Recordings > 1 {
		out = append(out, fmt.Sprintf("%d recordings are joined; %d requests continue a conversation of another one",
			load.Recordings, load.Crossed))
	}
	if load.Sample > 1 {
		out = append(out, fmt.Sprintf("one conversation in %d was recorded; each is played so many times", load.Sample))
	}
	for _, why := range slices.Sorted(maps.Keys(load.Skipped)) {
		out = append(out, fmt.Sprintf("%d requests are not played: they %s", load.Skipped[why], why))
	}
	if load.Guessed > 0 {
		out = append(out, fmt.Sprintf("%d answers have the mean length: nobody read how long they were (usage)",
			load.Guessed))
	}
	return out
}

// Compared is a figure as it was measured and as it is replayed, in words.
type Compared struct{ What, Measured, Replayed string }

// Compared returns how well the replay predicts what happened.
func (a *Answer) Compared() (out []Compared) {
	was, is := a.Measured, a.Now.RecordedResult
	row := func(what string, known bool, was, is float64, format string) {
		c := Compared{what, "unknown", fmt.Sprintf(format, is)}
		if known {
			c.Measured = fmt.Sprintf(format, was)
		}
		out = append(out, c)
	}
	first, each := was.TTFT.Mean > 0, was.TPOT.Mean > 0
	row("promise kept", was.Kept >= 0, 100*was.Kept, 100*is.Kept, "%.1f %%")
	row("first token, p50", first, was.TTFT.P50, is.TTFT.P50, "%.3f s")
	row("first token, p95", first, was.TTFT.P95, is.TTFT.P95, "%.3f s")
	row("per token, mean", each, 1000*was.TPOT.Mean, 1000*is.TPOT.Mean, "%.1f ms")
	row("per token, p95", each, 1000*was.TPOT.P95, 1000*is.TPOT.P95, "%.1f ms")
	row("cached", was.Cached >= 0, 100*was.Cached, 100*is.Cached, "%.1f %%")
	row("in the queue, mean", true, was.Waits.Mean, is.Waits.Mean, "%.3f s")
	row("in the queue, p95", true, was.Waits.P95, is.Waits.P95, "%.3f s")
	return out
}

// WhatIf plays a variant.
func (a *Answer) WhatIf(ctx context.Context, v *Variant) error {
	r, err := v.Play(ctx, a.Load)
	if err == nil {
		a.Rows = append(a.Rows, Row{Variant: *v, RecordedResult: r})
	}
	return err
}

// mostNeeded bounds the search for enough engines.
const mostNeeded = 32

// Need searches how many engines in a row's proportion keep the promise.
func (a *Answer) Need(ctx context.Context, r *Row) (err error) {
	if r.Needed, err = r.Variant.Needed(ctx, a.Load, mostNeeded); r.Needed == 0 {
		r.Needed = -1
	}
	return err
}

// NeededWords returns how many engines keep the promise.
func (r *Row) NeededWords() string {
	if r.Needed < 0 {
		return fmt.Sprint("more than ", mostNeeded)
	}
	return fmt.Sprint(r.Needed)
}

// Advise searches fleets of up to most engines.
func (a *Answer) Advise(ctx context.Context, most int) (err error) {
	a.Advice, err = Advise(ctx, a.Load, a.Now.Variant, most, func(r *Row) { a.Fleets = append(a.Fleets, *r) })
	return err
}

// mostCurves is how many fleets a picture shows.
const mostCurves = 6

// Draw plays the fleets of the pictures with other loads: as it was, as asked, and those of the advice.
func (a *Answer) Draw(ctx context.Context) error {
	rows := append([]Row{a.Now}, a.Rows...)
	if a.Advice != nil {
		rows = append(rows, a.Advice.Split, a.Advice.Whole)
		if a.Advice.Fewest != nil {
			rows = append(rows, *a.Advice.Fewest)
		}
	}
	shown := map[*RecordedResult]bool{} // variants that are one were played once
	for i := range rows {
		r := &rows[i]
		if r.RecordedResult == nil || shown[r.RecordedResult] || len(a.Curves) == mostCurves {
			continue
		}
		shown[r.RecordedResult] = true
		kept, err := r.OverLoad(ctx, a.Load)
		if err != nil {
			return err
		}
		a.Curves = append(a.Curves, Curve{*r, kept})
	}
	return nil
}

// Off returns how far the replay is from what happened, as a sentence for each figure that is off by more than a
// fifth.
func Off(measured, replayed *RecordedResult) (out []string) {
	for _, f := range []struct {
		what           string
		was, is, least float64 // less than least apart does not count: clocks and the network
	}{
		{"first token p50", measured.TTFT.P50, replayed.TTFT.P50, .02}, {"first token p95", measured.TTFT.P95,
			replayed.TTFT.P95, .05},
		{"time per token", measured.TPOT.Mean, replayed.TPOT.Mean, .001},
		{"cached share", measured.Cached, replayed.Cached, .05},
	} {
		if unknown := f.what != "cached share" && f.was == 0; unknown || f.was < 0 {
			continue
		}
		if d := f.is - f.was; math.Abs(d) > max(f.least, .2*f.was) {
			out = append(out, fmt.Sprintf("%s: %.3g in the replay, %.3g measured", f.what, f.is, f.was))
		}
	}
	return out
}
