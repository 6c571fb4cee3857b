package main

import (
	"errors"
	"net/http"
	"time"

	"github.com/spf13/cobra"
)

// newDrain is `tandem drain`.
func newDrain() *cobra.Command {
	var a adminClient
	var timeout time.Duration
	c := &cobra.Command{
		Use: "drain POOL ENDPOINT", Short: "Pause an endpoint and wait until nothing runs on it", Args: cobra.ExactArgs(2),
		Long: "Give an endpoint no more work and wait until nothing that this replica sent runs on it. The endpoint stays\n" +
			"paused (tandem resume). The exit status is 1 if something still ran when the time was up.",
		RunE: func(c *cobra.Command, args []string) error {
			status, answer, err := a.order(c.Context(), http.MethodPost, endpointPath(args[0], args[1:], "drain?timeout="+timeout.String()), nil, timeout)
			if err != nil {
				return err
			}
			if err := a.showOrdered(c.OutOrStdout(), answer); err != nil {
				return err
			}
			if status == http.StatusAccepted {
				return errors.New("the time is up and requests still run there; the endpoint stays paused")
			}
			return nil
		},
	}
	a.register(c)
	c.Flags().DurationVar(&timeout, "timeout", drainDefault, "wait at most this `TIME`")
	return c
}
