package e2e

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Engines see of Tandem's headers only those that the way of their answer needs: the ticket, the name of the request's
// reservations, and for pairs where the other leg goes. A body that Envoy buffers has a length.
func TestHeadersAtEngines(t *testing.T) {
	t.Parallel()
	known := map[string]bool{
		"X-Tandem-Ticket": true, "X-Tandem-Reservation": true, "X-Tandem-Request-Id": true, "X-Tandem-Mirror": true,
		"X-Tandem-Prefill-Endpoint": true,
	}
	for dialect, mode := range map[string]string{
		"nixl": "auto", "none": "auto", "trtllm": "auto", "sglang": "auto", "mooncake": "duplex", "nixl-push": "buffered",
	} {
		t.Run(dialect+" "+mode, func(t *testing.T) {
			t.Parallel() // mostly waits
			f := start(t, options{dialect: dialect, envoyFields: ", bodyMode: " + mode})
			const long = 200_000
			for _, filler := range []string{"", strings.Repeat(" long", long/5)} {
				body := strings.Replace(pairBody, " long", " long"+filler, 1)
				for range 3 {
					got := f.post("/v1/chat/completions", body)
					require.Equal(t, 200, got.status, got.body)
				}
			}
			legs := 0
			for _, s := range f.requests("", f.engines()...) {
				if s.Path != "/v1/chat/completions" {
					continue
				}
				legs++
				for header := range s.Headers {
					require.True(t, !strings.HasPrefix(header, "X-Tandem-") || known[header], "%s %s", s.Leg, header)
				}
				if mode == "buffered" || mode == "auto" && s.BodyBytes > long {
					require.Equal(t, []string{strconv.Itoa(s.BodyBytes)}, s.Headers["Content-Length"], s.Leg)
				}
			}
			require.GreaterOrEqual(t, legs, 6)
		})
	}
}
