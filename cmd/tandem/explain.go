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
		Long: "Show where a prompt of so many tokens, none of them cached, would go now, and the price of each endpoint.\n" +
			"Nothing is reserved. Prices are times, and include the time that other requests wait.",
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
