package report

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"

	"tandem/replay"
)

// PrintClosed writes the results of closed loops as a table for people: a line for each policy, the mean over its
// seeds.
func PrintClosed(w io.Writer, results [][]*replay.ClosedResult) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t,
		"policy\tgood turns/h\tleast-most\tgood\tturns/h\tTTFT p50\tp95\tp99\tTPOT p99\tslowdown\tof sessions: "+
			"p95\tworst\tagain %\tevicted\telsewhere\tpreempted\twasted %\tgave up\t")
	for _, seeds := range results {
		mean := func(f func(*replay.ClosedResult) float64) float64 { return replay.MeanOf(seeds, f) }
		least, most := math.Inf(1), 0.0
		for _, r := range seeds {
			least, most = min(least, r.GoodPerHour), max(most, r.GoodPerHour)
		}
		fmt.Fprintf(t,
			"%s\t%.0f\t%.0f-%.0f\t%.3f\t%.0f\t%.2f s\t%.1f\t%.0f\t%.0f "+
				"ms\t%.2f\t%.2f\t%.0f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.0f\t\n",
			seeds[0].Policy,
			mean(func(r *replay.ClosedResult) float64 { return r.GoodPerHour }), least, most,
			mean(func(r *replay.ClosedResult) float64 { return r.Good }),
			mean(func(r *replay.ClosedResult) float64 { return r.PerHour }),
			mean(func(r *replay.ClosedResult) float64 { return r.TTFT.P50 }),
			mean(func(r *replay.ClosedResult) float64 { return r.TTFT.P95 }),
			mean(func(r *replay.ClosedResult) float64 { return r.TTFT.P99 }),
			mean(func(r *replay.ClosedResult) float64 { return 1000 * r.TPOT.P99 }),
			mean(func(r *replay.ClosedResult) float64 { return r.Slowdown }),
			mean(func(r *replay.ClosedResult) float64 { return r.Sessions.P95 }),
			mean(func(r *replay.ClosedResult) float64 { return r.Sessions.Worst }),
			mean(func(r *replay.ClosedResult) float64 { return 100 * r.Again.All }),
			mean(func(r *replay.ClosedResult) float64 { return 100 * r.Again.Evicted }),
			mean(func(r *replay.ClosedResult) float64 { return 100 * r.Again.Elsewhere }),
			mean(func(r *replay.ClosedResult) float64 { return 100 * r.Again.Preempted }),
			mean(func(r *replay.ClosedResult) float64 { return 100 * r.Wasted }),
			mean(func(r *replay.ClosedResult) float64 { return float64(r.GaveUp) }))
	}
	_ = t.Flush()
}
