package report

import (
	"fmt"
	"io"
	"text/tabwriter"

	"tandem/replay"
)

// Print writes results as a table for people.
func Print(w io.Writer, results []*replay.Result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "policy\tTTFT mean\tp50\tp90\tp99\tTPOT mean\tp99\tend to end\thit "+
		"share\tmax/mean\tgoodput\talone\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%.3f s\t%.3f\t%.2f\t%.2f\t%.1f ms\t%.1f\t%.2f s\t%.3f\t%.2f\t%.3f\t%.2f\t\n", r.Policy,
			r.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99, 1000*r.TPOT.Mean, 1000*r.TPOT.P99, r.EndToEnd.Mean,
			r.HitShare, r.MaxMeanLoad, r.Goodput, r.Alone)
	}
	_ = t.Flush()
}
