package extproc

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/names"
)

// The report of a request's end can be read before the request: it comes over another connection, where no bodies are in its way. Then
// nothing is reserved for the request. Nobody would report its end again.
func TestTheEndArrivesBeforeTheRequest(t *testing.T) {
	for name, c := range map[string]struct {
		status  int
		details string
	}{
		"the client left":                  {0, "downstream_remote_disconnect"},
		"Envoy waited too long for Tandem": {504, "ext_proc_error_per-message_timeout_exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, core.Options{})
				s.pool("chat", splitting(), "p1", "d1")
				request := func(key string) *request {
					q := s.newRequest("/v1/chat/completions", "one id for all", chatBody)
					q.headers[names.HeaderReservation] = key
					return q
				}
				early := request("first")
				e := early.entry(c.status, c.details)
				e.Request.RequestHeaders = map[string]string{names.HeaderReservation: "first"}
				s.log(e)
				early.pass()
				require.Zero(t, s.state.Bookings.Reservations(), "its end has been reported")
				request("second").pass()
				require.Equal(t, 2, s.state.Bookings.Reservations(), "another request's has not")
			})
		})
	}
}
