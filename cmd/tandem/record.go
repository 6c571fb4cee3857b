package main

import (
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"tandem/extproc/recorder"
	"tandem/status/words"
)

// newRecord is `tandem record`.
func newRecord() *cobra.Command {
	var a adminClient
	var lasts time.Duration
	var sample int
	c := &cobra.Command{
		Use: "record start|stop|status", Short: "Record requests for tandem replay, without their text",
		Long: "Begin or end the recording of a replica's requests, or say what it does. A recording has no text of any\n" +
			"prompt or answer: when requests came, keyed hashes of what they share, tokens and times (docs/recordings.md).\n" +
			"Its files are at the replica, as section record of its configuration says. The order is for the replica at\n" +
			"--admin: with several, give it to each. `tandem replay --recording FILES` plays them.",
		Args: arguments(1, "start|stop|status"), ValidArgs: []string{"start", "stop", "status"},
		RunE: func(c *cobra.Command, args []string) error {
			var answer []byte
			var err error
			switch args[0] {
			case "start":
				q := url.Values{}
				if lasts > 0 {
					q.Set("for", lasts.String())
				}
				if sample > 0 {
					q.Set("sample", strconv.Itoa(sample))
				}
				_, answer, err = a.order(c.Context(), http.MethodPost, "/api/recording?"+q.Encode(), nil, 0)
			case "stop":
				_, answer, err = a.order(c.Context(), http.MethodDelete, "/api/recording", nil, time.Second)
			case "status":
				answer, err = a.get(c.Context(), "/api/recording")
			default:
				return fmt.Errorf("%q is not start, stop or status", args[0])
			}
			if err != nil {
				return err
			}
			var s recorder.Status
			return a.show(c.OutOrStdout(), c.OutOrStdout(), answer, &s, func(w io.Writer) { printRecording(w, &s) })
		},
	}
	a.register(c)
	c.Flags().DurationVar(&lasts, "for", 0, "end it after so much `TIME` (default: as configured, 24h)")
	c.Flags().IntVar(&sample, "sample", 0, "record one conversation in `SO_MANY` (default: as configured, 1)")
	return c
}

func printRecording(w io.Writer, s *recorder.Status) {
	switch {
	case s.On && s.Until.IsZero():
		fmt.Fprintf(w, "recording since %s, without end\n", s.Began.Format(time.DateTime))
	case s.On:
		fmt.Fprintf(w, "recording since %s, until %s\n", s.Began.Format(time.DateTime), s.Until.Format(time.DateTime))
	case s.Files == "":
		fmt.Fprintln(w, "nothing is recorded")
		return
	default:
		fmt.Fprintln(w, "the last recording has ended")
	}
	fmt.Fprintf(w, "%d requests in %s\n", s.Lines, words.Plain(s.Files))
	if s.Sample > 1 {
		fmt.Fprintf(w, "one conversation in %d\n", s.Sample)
	}
	if s.Dropped+s.Failed > 0 {
		fmt.Fprintf(w, "%d dropped, since too many waited; %d failed, since the file could not be written\n", s.Dropped,
			s.Failed)
	}
	if s.Error != "" {
		fmt.Fprintf(w, "last error: %s\n", words.Plain(s.Error))
	}
}
