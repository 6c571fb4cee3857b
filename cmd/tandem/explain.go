package main

import (
	"io"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"tandem/extproc"
	"tandem/status"
)

// newExplain is `tandem explain`.
func newExplain() *cobra.Command {
	var a adminClient
	var pool string
	var tokens int64
	c := &cobra.Command{
		Use: "explain", Short: "Show how a request would be placed now, and what each endpoint would cost", Args: cobra.NoArgs,
		Long: "Show how a request of so many prompt tokens, none of them cached, would be placed now, and what each endpoint\n" +
			"would cost. Nothing is booked. Prices are times, waiting of others included.",
		RunE: func(c *cobra.Command, _ []string) error {
			answer, err := a.get(c.Context(), "/debug/explain?"+url.Values{"pool": {pool}, "tokens": {strconv.FormatInt(tokens, 10)}}.Encode())
			if err != nil {
				return err
			}
			var e extproc.Explanation
			return a.show(c.OutOrStdout(), answer, &e, func(w io.Writer) { status.PrintExplanation(w, &e) })
		},
	}
	a.register(c)
	c.Flags().StringVar(&pool, "pool", "", "`NAME` of the pool (default: the one that takes any model)")
	c.Flags().Int64Var(&tokens, "tokens", 1000, "`TOKENS` of the prompt")
	return c
}
