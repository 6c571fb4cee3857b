package extproc

import (
	"bytes"
	"fmt"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/names"
)

// TestRedirectsNotFollowedHaveReasons: what Envoy's access log tells of a redirect that it did not follow becomes a reason, in the log
// and in the metric, and nothing stays booked.
func TestRedirectsNotFollowedHaveReasons(t *testing.T) {
	for why, given := range map[string]struct {
		tag       string
		missing   int // bytes of the body that did not go out
		redirects int
	}{
		"incomplete":  {tag: "redirect", missing: 1},
		"not_kept":    {tag: "redirect"},
		"too_many":    {tag: "redirect", redirects: 8},
		"no_location": {tag: names.UnfollowedLocation},
		"":            {}, // any other 503
	} {
		t.Run(why, func(t *testing.T) {
			var log bytes.Buffer
			s := newStand(t, core.Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
			s.pool("chat", splitting(), "p1", "d1")
			q := s.newRequest("/v1/chat/completions", "r1", chatBody)
			q.goOn(q.pass())
			ticket := s.ticket(q.headers[names.HeaderTicket], "r1")
			if given.redirects > 0 {
				ticket.Redirects = given.redirects
				sealed, err := s.server.passes.Keys().Seal(nil, ticket, "r1")
				require.NoError(t, err)
				q.headers[names.HeaderTicket] = string(sealed)
			}
			e := q.entry(503, "via_upstream")
			e.Request.UpstreamHeaderBytesSent = 300
			e.CommonProperties.UpstreamWireBytesSent = uint64(300 + ticket.BodyBytes - given.missing)
			if given.tag != "" {
				e.CommonProperties.CustomTags = map[string]string{names.TagUnfollowed: given.tag}
			}
			s.log(e)
			require.Zero(t, s.state.Bookings.Reservations())
			if why == "" {
				require.Zero(t, s.count("tandem_redirects_not_followed_total"))
				require.Empty(t, log.String())
				return
			}
			require.InDelta(t, 1, s.count("tandem_redirects_not_followed_total", why), 0)
			require.Contains(t, log.String(), fmt.Sprintf(`level=WARN msg="Envoy did not follow a redirect" request_id=r1 reason=%s stage=`, why))
		})
	}
}
