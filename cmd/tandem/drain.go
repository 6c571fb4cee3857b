package main

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"tandem/replica/orders"
)

// newDrain is `tandem drain`.
func newDrain() *cobra.Command {
	var a adminClient
	var timeout time.Duration
	c := &cobra.Command{
		Use: "drain POOL ENDPOINT", Short: "Pause an endpoint and wait until nothing runs on it",
		Args: arguments(2, "POOL", "ENDPOINT"),
		Long: "Give an endpoint no more work and wait until nothing that Tandem sent runs on it: at all replicas with Redis, else\n" +
			"at this one. For prefill wait a second more, in which decode fetches KV. The endpoint stays paused (tandem resume).\n" +
			"The exit status is 1 if something still ran when the time was up, or if Redis does not answer: then\n" +
			"other replicas may still send requests.",
		RunE: func(c *cobra.Command, args []string) error {
			status, answer, err := a.order(c.Context(), http.MethodPost, endpointPath(args[0], args[1:], "drain?timeout="+timeout.String()), nil, timeout)
			if err != nil {
				return err
			}
			if err := a.showOrdered(c, answer); err != nil {
				return err
			}
			if status == http.StatusAccepted {
				return errors.New("the time is up and requests still run there; the endpoint stays paused")
			}
			drained, err := a.heldBy().Drained()
			if err == nil && a.output != "json" {
				fmt.Fprintln(c.OutOrStdout(), drained)
			}
			return err
		},
	}
	a.register(c)
	c.Flags().DurationVar(&timeout, "timeout", orders.DrainDefault, "wait at most this `TIME`")
	return c
}
