package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"tandem/replica/orders"
	"tandem/status/words"
)

// endpointPath is the path of an order about a pool, or about one of its endpoints.
func endpointPath(pool string, endpoint []string, order string) string {
	path := "/api/pools/" + url.PathEscape(pool)
	for _, e := range endpoint {
		path += "/endpoints/" + url.PathEscape(e)
	}
	return path + "/" + order
}

// orderLasts is how long an order holds, for the help of commands.
const orderLasts = "With Redis the command holds for all replicas, until it is cancelled at any of them. Without Redis it holds for\n" +
	"this replica, until that ends."

// arguments demands the first n of the arguments named, and no more than those.
func arguments(n int, names ...string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		switch {
		case len(args) < n:
			return fmt.Errorf("%s is missing\nUsage: %s (%s --help explains)", names[len(args)], c.UseLine(), c.CommandPath())
		case len(args) > len(names):
			return fmt.Errorf("unexpected argument %q\nUsage: %s (%s --help explains)", args[len(names)], c.UseLine(), c.CommandPath())
		}
		return nil
	}
}

// newPause is `tandem pause`, and with paused false `tandem resume`.
func newPause(paused bool) *cobra.Command {
	var a adminClient
	name, short := "pause", "Give a pool, or one endpoint of it, no more work"
	if !paused {
		name, short = "resume", "Give a paused or drained pool or endpoint work again"
	}
	c := &cobra.Command{
		Use: name + " POOL [ENDPOINT]", Short: short, Args: arguments(1, "POOL", "ENDPOINT"),
		Long: short + ".\n" + orderLasts,
		RunE: func(c *cobra.Command, args []string) error {
			_, answer, err := a.order(c.Context(), http.MethodPost, endpointPath(args[0], args[1:], name), nil, 0)
			if err != nil {
				return err
			}
			if len(args) == 2 {
				return a.showOrdered(c, answer)
			}
			var pool struct {
				Pool   string
				Paused bool
			}
			return a.showOrder(c, answer, &pool, func(w io.Writer) {
				fmt.Fprintf(w, "pool %s: %s\n", pool.Pool, words.State("", pool.Paused))
			})
		},
	}
	a.register(c)
	return c
}

// showOrdered prints the endpoints that an order was about.
func (a *adminClient) showOrdered(c *cobra.Command, answer []byte) error {
	var found []orders.Ordered
	return a.showOrder(c, answer, &found, func(w io.Writer) { orders.Print(w, found) })
}

// showOrder prints the answer to an order, and which replicas it holds for, to stderr where the answer is JSON. What
// the order leaves without endpoints goes to stderr always.
func (a *adminClient) showOrder(c *cobra.Command, answer []byte, into any, table func(io.Writer)) error {
	if err := a.show(c.OutOrStdout(), c.OutOrStdout(), answer, into, table); err != nil {
		return err
	}
	if a.warns != "" {
		fmt.Fprintf(c.ErrOrStderr(), "warning: %s\n", words.Plain(a.warns))
	}
	if a.holds == "" { // a replica of an earlier build does not say
		return nil
	}
	w := c.OutOrStdout()
	if a.output == "json" {
		w = c.ErrOrStderr()
	}
	_, err := fmt.Fprintf(w, "holds for %s\n", a.heldBy())
	return err
}

// heldBy returns the replicas that the last order holds for; this replica only, if it does not say.
func (a *adminClient) heldBy() *orders.Holds {
	var holds orders.Holds
	_ = json.Unmarshal([]byte(a.holds), &holds)
	return &holds
}
