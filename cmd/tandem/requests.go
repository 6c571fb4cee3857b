package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"tandem/extproc/telemetry"
	"tandem/status"
)

// newRequests is `tandem requests`.
func newRequests() *cobra.Command {
	var a adminClient
	n, failed := 0, false
	c := &cobra.Command{
		Use: "requests", Short: "List the latest requests: where each went, and why it was not split",
		Args: cobra.NoArgs,
		Long: "List the latest requests, newest first: where each went, and in brackets why it was not split.\n" +
			"tokens is the prompt's length as prefill counted it, ~ an estimate. hop 1 is the time of prefill (as\n" +
			"expected), hop 2 that of decode. 2nd plan: a hop failed, and the request was planned again.\n" +
			"200, cut: the answer broke off.",
		RunE: func(c *cobra.Command, _ []string) error {
			if n < 1 {
				return fmt.Errorf("--number: %d is not a number of requests", n)
			}
			var recent []telemetry.Trace
			return a.query(c, fmt.Sprintf("/debug/requests?n=%d&failed=%t%s", n, failed, a.scope), &recent,
				func(w io.Writer) { status.PrintRequests(w, recent, failed) })
		},
	}
	a.register(c)
	a.onlyThis(c)
	c.Flags().BoolVar(&failed, "failed", false, "show only requests that failed")
	c.Flags().IntVarP(&n, "number", "n", 20, "`NUMBER` of requests to show at most")
	return c
}
