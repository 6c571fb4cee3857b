package main

import (
	"fmt"
	"io"
	"net/url"

	"github.com/spf13/cobra"

	"tandem/extproc/telemetry"
	"tandem/status"
)

// newRequests is `tandem requests`.
func newRequests() *cobra.Command {
	var a adminClient
	n, failed, slow, search := 0, false, false, ""
	c := &cobra.Command{
		Use: "requests", Short: "List the latest requests: where each went, and why it was not split",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return fmt.Errorf("unexpected argument %q: `tandem explain REQUEST_ID` shows one request, --search TEXT finds some", args[0])
			}
			return nil
		},
		Long: "List the latest requests, newest first: where each went, and in brackets why it was not split.\n" +
			"tokens is the prompt's length as prefill counted it, ~ an estimate. hop 1 is the time of prefill (as\n" +
			"expected), hop 2 that of decode. 2nd plan: a hop failed, and the request was planned again.\n" +
			"200, cut: the answer broke off.\n\n" +
			"With --slow those of the latest 256 of each replica come first that lost most time: by how much each took\n" +
			"longer than it would have without queues, failures and slow engines. A long answer is not slow.",
		RunE: func(c *cobra.Command, _ []string) error {
			if n < 1 {
				return fmt.Errorf("--number: %d is not a number of requests", n)
			}
			var recent []telemetry.Trace
			return a.query(c, fmt.Sprintf("/debug/requests?n=%d&failed=%t&slow=%t&search=%s%s", n, failed, slow,
				url.QueryEscape(search), a.scope),
				&recent, func(w io.Writer) { status.PrintRequests(w, recent, failed, slow) })
		},
	}
	a.register(c)
	a.onlyThis(c)
	c.Flags().BoolVar(&failed, "failed", false, "show only requests that failed")
	c.Flags().BoolVar(&slow, "slow", false, "show first what lost most time, and why")
	c.Flags().StringVar(&search, "search", "", "show only requests that have each word of `TEXT` in their id, endpoints, pool,\n"+
		"model or tenant (the last two with usage)")
	c.Flags().IntVarP(&n, "number", "n", 20, "`NUMBER` of requests to show at most")
	return c
}
