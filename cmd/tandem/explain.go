package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"tandem/extproc/telemetry"
	"tandem/picker/roles"
	"tandem/status"
	"tandem/status/words"
)

// newExplain is `tandem explain`.
func newExplain() *cobra.Command {
	var a adminClient
	var pool string
	var tokens int64
	c := &cobra.Command{
		Use: "explain [REQUEST_ID]", Args: cobra.MaximumNArgs(1),
		Short: "Show why a request went where it did, or where one would go now",
		Long: "Show where a prompt of so many tokens, none of them cached, would go now, and the price of each endpoint.\n" +
			"Nothing is reserved. Prices are times, and include the time that other requests wait.\n\n" +
			"With REQUEST_ID (x-request-id of the answer, or from tandem requests) show what was decided about that request:\n" +
			"one of the latest 256 of each replica. Prices of endpoints are kept of ten decisions a second at most.",
		RunE: func(c *cobra.Command, args []string) error {
			for _, flag := range []string{"pool", "tokens"} {
				if len(args) == 1 && c.Flags().Changed(flag) {
					return fmt.Errorf("--%s is for a prompt of now: it does not go with the id of a request", flag)
				}
			}
			if len(args) == 1 && args[0] == "" {
				return errors.New("REQUEST_ID is empty")
			}
			if tokens < 1 {
				return fmt.Errorf("--tokens: a prompt has 1 token or more, not %d", tokens)
			}
			if len(args) == 1 {
				var found []telemetry.Trace
				return a.query(c, "/debug/requests?"+url.Values{"id": args}.Encode(), &found,
					func(w io.Writer) { status.PrintDecided(w, found, a.roles(c)) })
			}
			var e status.Explained
			asked := url.Values{"pool": {pool}, "tokens": {strconv.FormatInt(tokens, 10)}}
			return a.query(c, "/debug/explain?"+asked.Encode(), &e, func(w io.Writer) { status.PrintExplanation(w, &e) })
		},
	}
	a.register(c)
	c.Flags().StringVar(&pool, "pool", "", "`NAME` of the pool (default: the one that takes any model)")
	c.Flags().Int64Var(&tokens, "tokens", 1000, "`TOKENS` of the prompt")
	return c
}

// roles returns the roles that endpoints have now, by pool; nil if the replica does not say.
func (a *adminClient) roles(c *cobra.Command) (out map[string]roles.Advice) {
	answer, err := a.get(c.Context(), "/debug/roles")
	if err == nil {
		answer, err = words.PlainJSON(answer)
	}
	if err != nil || json.Unmarshal(answer, &out) != nil {
		return nil
	}
	return out
}
