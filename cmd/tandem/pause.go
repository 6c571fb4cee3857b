package main

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// endpointPath is the path of an order about a pool, or about one of its endpoints.
func endpointPath(pool string, endpoint []string, order string) string {
	path := "/api/pools/" + url.PathEscape(pool)
	for _, e := range endpoint {
		path += "/endpoints/" + url.PathEscape(e)
	}
	return path + "/" + order
}

// newPause is `tandem pause`, and with paused false `tandem resume`.
func newPause(paused bool) *cobra.Command {
	var a adminClient
	name, short := "pause", "Give a pool, or one endpoint of it, no more work"
	if !paused {
		name, short = "resume", "Give a paused or drained pool or endpoint work again"
	}
	c := &cobra.Command{
		Use: name + " POOL [ENDPOINT]", Short: short, Args: cobra.RangeArgs(1, 2),
		Long: short + ". The order holds for this replica until it ends.",
		RunE: func(c *cobra.Command, args []string) error {
			_, answer, err := a.order(c.Context(), http.MethodPost, endpointPath(args[0], args[1:], name), nil, 0)
			if err != nil {
				return err
			}
			if len(args) == 2 {
				return a.showOrdered(c.OutOrStdout(), answer)
			}
			var pool struct {
				Pool   string
				Paused bool
			}
			return a.show(c.OutOrStdout(), answer, &pool, func(w io.Writer) { fmt.Fprintf(w, "pool %s: %s\n", pool.Pool, orderState(pool.Paused)) })
		},
	}
	a.register(c)
	return c
}

// showOrdered prints the endpoints that an order was about.
func (a *adminClient) showOrdered(w io.Writer, answer []byte) error {
	var found []ordered
	return a.show(w, answer, &found, func(w io.Writer) {
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "endpoint\tstate\tweight\trequests")
		for _, e := range found {
			fmt.Fprintf(t, "%s\t%s\t%d %%\t%d\n", e.Address, orderState(e.Paused), e.Weight, e.Requests)
		}
		_ = t.Flush()
	})
}

func orderState(paused bool) string {
	if paused {
		return "paused"
	}
	return "active"
}
