package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tandem/status"
	"tandem/status/words"
)

// statusPath is where a replica shows its status; no points of charts are needed.
const statusPath = "/status.json?"

// onlyThis adds the flag that leaves out the other replicas.
func (a *adminClient) onlyThis(c *cobra.Command) {
	const usage = "leave out the other replicas (with Redis, all that answer are shown)"
	c.Flags().BoolFunc("this-replica", usage, func(string) error {
		a.scope = "&scope=replica"
		return nil
	})
}

// newStatus is `tandem status`.
func newStatus() *cobra.Command {
	var a adminClient
	var watch, asJSON bool
	c := &cobra.Command{
		Use: "status", Short: "Show endpoints, flow, rates and the latest requests", Args: arguments(0),
		RunE: func(c *cobra.Command, _ []string) error {
			if asJSON {
				a.output = "json"
			}
			if watch {
				return watchStatus(c.Context(), &a, c.OutOrStdout())
			}
			return a.printStatus(c.Context(), c.OutOrStdout(), c.OutOrStdout())
		},
	}
	a.register(c)
	a.onlyThis(c)
	c.Flags().BoolVar(&watch, "watch", false, "show it again once a second, until Ctrl-C")
	c.Flags().BoolVar(&asJSON, "json", false, "the same as --output json")
	return c
}

// printStatus writes the status to w, coloured if the command's output is a terminal.
func (a *adminClient) printStatus(ctx context.Context, w, output io.Writer) error {
	answer, err := a.get(ctx, statusPath+a.scope)
	if err != nil {
		return err
	}
	var s status.Status
	return a.show(w, output, answer, &s, func(w io.Writer) { status.Print(w, &s) })
}

// watchStatus shows the status again and again until ctx ends.
func watchStatus(ctx context.Context, a *adminClient, stdout io.Writer) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		var screen strings.Builder
		if err := a.printStatus(ctx, &screen, stdout); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			fmt.Fprintln(&screen, words.Lines(err.Error())) // it may come back
		}
		text := screen.String()
		if f, ok := stdout.(*os.File); ok {
			if width, _, err := term.GetSize(int(f.Fd())); err == nil {
				text = cutRows(text, width)
			}
		}
		fmt.Fprint(stdout, "\x1b[H\x1b[2J", text)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// cutRows cuts the lines of tables, which begin with two spaces, at the terminal's width: wrapped, their columns would
// not stand below each other.
func cutRows(text string, width int) string {
	const most = 1000 // times that a regular expression can repeat
	row := fmt.Sprintf(`(?m)^((?:\x1b\[\d+m)?  [^\x1b\n]{%d})[^\x1b\n]+`, min(max(width-2, 0), most))
	return regexp.MustCompile(row).ReplaceAllString(text, "$1")
}
