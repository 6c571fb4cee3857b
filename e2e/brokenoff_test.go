package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An answer that breaks off counts as a failure, whatever status was sent before: alerts use these metrics.
func TestAnswersThatBreakOffAreFailures(t *testing.T) {
	t.Parallel()
	for _, dialect := range []string{"nixl", "sglang"} {
		t.Run(dialect, func(t *testing.T) {
			f := start(t, options{dialect: dialect, prefills: 1, decodes: 1, engineArgs: []string{"--decode-step", "20ms"}})
			f.lenient = true
			// Its tokens come one after the other: an answer that breaks before its headers were sent is another
			// engine's to give.
			body := `{"model":"tiny","messages":[{"role":"user","content":"A prompt."}],"max_tokens":16}`
			require.Equal(t, 200, f.post("/v1/chat/completions", streamed(body)).status)
			for i, rule := range []string{`{"mode":"stream-reset-after","events":6,"count":1}`, `{"mode":"reset-mid-body","count":1}`} {
				f.inject(f.decodes[0], rule)
				if i == 0 {
					body = streamed(body)
				} else {
					body = strings.Replace(body, `"stream":true,`, "", 1)
				}
				got, err := f.try(t.Context(), "POST", "/v1/chat/completions", body)
				require.True(t, err != nil || !strings.Contains(got.body, "[DONE]"), "%d %s", got.status, got.body)
				for _, name := range []string{"tandem_request_duration_seconds_count", "tandem_hop_duration_seconds_count"} {
					labels := []string{`result="failed"`}
					if strings.Contains(name, "hop") {
						labels = append(labels, `hop="decode"`, f.decodes[0].addr)
					}
					require.Eventually(t, func() bool { return metric(t, f.admins[0], name, labels...) == float64(i+1) }, patience, 20*time.Millisecond, fmt.Sprint(name, rule))
				}
			}
			var cut []row
			require.NoError(t, getJSON(f.admins[0]+"/debug/requests?failed=true", &cut))
			require.Len(t, cut, 2, "and not the one that was complete")
			var ended []string
			for _, r := range cut {
				ended = append(ended, fmt.Sprint(r.Status, " ", r.Ended, " ", r.Decode))
				require.Positive(t, r.Took)
			}
			require.Equal(t, slices.Repeat([]string{"200 cut " + f.decodes[0].addr}, 2), ended)
			log, err := os.ReadFile(f.tandems[0].log)
			require.NoError(t, err)
			require.Equal(t, 2, strings.Count(string(log), `msg="an answer broke off" request_id=`))
			require.InDelta(t, 1, metric(t, f.admins[0], "tandem_request_duration_seconds_count", `result="ok"`), 0)
		})
	}
}
