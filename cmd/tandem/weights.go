package main

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"tandem/status"
	"tandem/status/words"
)

// newWeights is `tandem weights`.
func newWeights() *cobra.Command {
	var a adminClient
	c := &cobra.Command{
		Use: "weights [POOL [ENDPOINT PERCENT|default]]", Short: "List weights, or change an endpoint's",
		Args: cobra.MaximumNArgs(3),
		Long: "List the weights of all endpoints, or of one pool, or change one. PERCENT scales the speed that Tandem learned of\n" +
			"the endpoint, from 1 to 10000; default cancels the change. The list as JSON is the whole status.\n" +
			orderLasts,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) < 2 {
				return a.listWeights(c, strings.Join(args, ""))
			}
			if len(args) == 2 {
				return fmt.Errorf("which weight for %s? PERCENT or default", args[1])
			}
			method, body := http.MethodDelete, any(nil)
			if args[2] != "default" {
				percent, err := strconv.Atoi(strings.TrimSuffix(args[2], "%"))
				if err != nil || percent < 1 || percent > 10_000 {
					return fmt.Errorf("weight %q: from 1 to 10000 in per cent, or default; tandem pause gives an endpoint no more work", args[2])
				}
				method, body = http.MethodPut, map[string]int{"weight": percent}
			}
			_, answer, err := a.order(c.Context(), method, endpointPath(args[0], args[1:2], "weight"), body, 0)
			if err != nil {
				return err
			}
			return a.showOrdered(c, answer)
		},
	}
	a.register(c)
	return c
}

// listWeights shows the weights of a pool's endpoints, or of all.
func (a *adminClient) listWeights(c *cobra.Command, pool string) error {
	var state status.Status
	err := a.query(c, statusPath, &state, func(w io.Writer) {
		state.Pools = slices.DeleteFunc(state.Pools, func(p status.Pool) bool { return pool != "" && p.Name != pool })
		if len(state.Pools) == 0 {
			return
		}
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "pool\tendpoint\trole\tstate\tweight\trequests")
		for _, p := range state.Pools {
			for _, e := range p.Endpoints {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d %%\t%d\n", p.Name, e.Address, e.Role,
					words.State(e.State, p.Paused || e.Paused), e.Weight, e.Requests)
			}
		}
		_ = t.Flush()
	})
	if err == nil && len(state.Pools) == 0 && a.output == "table" {
		return fmt.Errorf("there is no pool %q: tandem status lists the pools", pool)
	}
	return err
}
