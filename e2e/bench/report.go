package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"tandem/e2e/process"
)

// report gathers results and writes them as Markdown.
type report struct {
	names   []string // of the stacks, the floor first
	rows    []row
	figures []figures
	targets []target
	peaks   []string
}

// row is one line of the table.
type row [15]string

// target is a limit for Tandem's figures.
type target struct {
	what            string
	limit, measured float64
}

func newReport(stacks []*stack) *report {
	r := &report{}
	for _, s := range stacks {
		r.names = append(r.names, s.name)
	}
	return r
}

// median of unsorted values.
func median[T float64 | time.Duration](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func each[T any](rounds []round, f func(*round) T) (out []T) {
	for i := range rounds {
		out = append(out, f(&rounds[i]))
	}
	return out
}

func millis(d time.Duration) string {
	ms := float64(d.Nanoseconds()) / 1e6
	switch {
	case ms < 1:
		return fmt.Sprintf("%.3f", ms)
	case ms < 10:
		return fmt.Sprintf("%.2f", ms)
	}
	return fmt.Sprintf("%.1f", ms)
}

// ratio returns the median, over rounds, of a figure against the floor's of the same round.
func ratio(ours, floor []round, figure func(*round) time.Duration) float64 {
	var all []float64
	for i := range ours {
		all = append(all, float64(figure(&ours[i]))/float64(figure(&floor[i])))
	}
	return median(all)
}

func p50(r *round) time.Duration   { return quantile(r.took, .5) }
func first(r *round) time.Duration { return quantile(r.first, .5) }

// tail returns a high percentile over all rounds: a single one may have had fewer than a hundred requests.
func tail(rounds []round, q float64) time.Duration {
	var all []time.Duration
	for _, r := range rounds {
		all = append(all, r.took...)
	}
	slices.Sort(all)
	return quantile(all, q)
}

// add adds the rounds of one shape and number of clients, by stack. k is their key except the stack.
func (r *report) add(sh shape, k key, results [][]round) {
	floor, clients := results[0], k.Clients
	for i, rounds := range results {
		var tandem []round // to compare with
		if i > 1 {
			tandem = results[1]
		}
		k.Stack = r.names[i]
		r.figures = append(r.figures, figuresOf(k, sh, rounds, floor, tandem))
		cpus := each(rounds, (*round).cpu)
		line := row{
			sh.title, fmt.Sprint(clients), r.names[i],
			millis(median(each(rounds, func(r *round) time.Duration { return r.envoy }))), "",
			fmt.Sprintf("%s (%s-%s)", millis(median(cpus)), millis(slices.Min(cpus)), millis(slices.Max(cpus))), "", "",
			millis(median(each(rounds, p50))), "",
			millis(tail(rounds, .99)), "", millis(tail(rounds, .999)),
			fmt.Sprintf("%.0f", median(each(rounds, func(r *round) float64 { return r.rate }))),
			fmt.Sprintf("%.2f", median(each(rounds, func(r *round) float64 { return r.cpu().Seconds() * r.rate }))),
		}
		if sh.stream {
			line[8] += " (" + millis(median(each(rounds, first))) + ")"
		}
		if i > 0 {
			line[4] = millis(median(each(rounds, func(r *round) time.Duration { return r.tandem })))
			line[6] = fmt.Sprintf("**%.2f**", ratio(rounds, floor, (*round).cpu))
			line[9] = fmt.Sprintf("**%.2f**", ratio(rounds, floor, p50))
			line[11] = fmt.Sprintf("**%.2f**", float64(tail(rounds, .99))/float64(tail(floor, .99)))
		}
		if i > 1 {
			line[7] = fmt.Sprintf("%.2f", ratio(rounds, results[1], (*round).cpu))
		}
		r.rows = append(r.rows, line)
	}
	r.hold(sh, clients, results[1], floor)
}

// hold compares the first Tandem with its targets.
func (r *report) hold(sh shape, clients int, ours, floor []round) {
	cpu := ratio(ours, floor, (*round).cpu)
	name := fmt.Sprintf("CPU, %s, %d clients", sh.title, clients)
	switch sh.name {
	case "json1k":
		r.targets = append(r.targets, target{name, 4, cpu})
	case "json220k":
		r.targets = append(r.targets, target{name, 6, cpu})
	case "sse256":
		r.targets = append(r.targets, target{name, 1.2, cpu})
	}
	if clients == 1 && !sh.stream {
		r.targets = append(r.targets, target{"p50, " + sh.title + ", 1 client", 3, ratio(ours, floor, p50)})
	}
}

// memory records each process's peak memory.
func (r *report) memory(stacks []*stack) {
	for _, s := range stacks {
		if s.tandem == nil && len(s.routers) > 0 {
			text := fmt.Sprintf("%s: %d (processes: %d)", s.name, peakOf(s.routers)>>20, len(s.routers))
			r.peaks = append(r.peaks, text)
			continue
		}
		text := fmt.Sprintf("%s: Envoy %d", s.name, s.envoy.Peak()>>20)
		if s.tandem != nil {
			text += fmt.Sprintf(", Tandem %d", peakOf(s.tandems)>>20)
		}
		r.peaks = append(r.peaks, text)
	}
}

// peakOf returns the sum of processes' peak memory, in bytes.
func peakOf(all []*process.Process) (sum int64) {
	for _, p := range all {
		sum += p.Peak()
	}
	return sum
}

// manyEngines adds what is measured with so many engines to the figures of the last results.
func (r *report) manyEngines(n int, results [][]round) {
	last := r.figures[len(r.figures)-len(results):]
	for i, rounds := range results {
		rate := median(each(rounds, func(r *round) float64 { return r.rate }))
		last[i].Rest = &moreFigures{Engines: n, PerSecond: round3(rate)}
	}
}

// fleetFigures sets what is measured of a stack with many engines: idle is a share of a core for each, if it was
// measured.
func (r *report) fleetFigures(stacks []*stack, idle []float64) {
	for i, s := range stacks {
		peak := s.envoy.Peak() + peakOf(s.routers) + peakOf(s.tandems)
		for k := range r.figures {
			if f := &r.figures[k]; f.Stack == s.name {
				f.Rest.Peak = peak >> 20
				if idle != nil {
					f.Rest.Idle = round3(idle[i])
				}
			}
		}
	}
}

// write prints the tables.
func (r *report) write(w io.Writer) {
	fmt.Fprint(w, "CPU is milliseconds per request, median over rounds (least-most); times are milliseconds, for a "+
		"stream until its end (until its first byte).\n\n")
	head := row{"shape", "clients", "stack", "Envoy CPU", "router CPU", "sum", "x floor", "x tandem", "p50", "x floor",
		"p99", "x floor", "p99.9", "req/s", "cores"}
	table(w, append([]row{head}, r.rows...))
	fmt.Fprintf(w, "\nMost memory, MiB: %s.\n\n", strings.Join(r.peaks, "; "))
	fmt.Fprint(w, "| target, as a multiple of the floor | at most | measured | |\n|---|---|---|---|\n")
	for _, t := range r.targets {
		verdict := "held"
		if t.measured > t.limit {
			verdict = "**missed**"
		}
		fmt.Fprintf(w, "| %s | %.1f | %.2f | %s |\n", t.what, t.limit, t.measured, verdict)
	}
}

// table prints rows, the first of them the head, with their columns aligned.
func table(w io.Writer, rows []row) {
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	for i, line := range rows {
		fmt.Fprintf(t, "| %s\t|\n", strings.Join(line[:], "\t| "))
		if i == 0 {
			fmt.Fprintf(t, "|%s\n", strings.Repeat("---\t|", len(line)))
		}
	}
	_ = t.Flush()
}
