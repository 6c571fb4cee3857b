package extproc

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/names"
)

// atReplan sends a ticket to the replan port, as anybody could.
func (q *request) atReplan(ticket, path string, restart bool) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, "http://evil.host"+path, strings.NewReader(string(q.body)))
	r.Header.Set("x-request-id", q.headers[names.HeaderRequestID])
	if ticket != "" {
		r.Header.Set(names.HeaderTicket, ticket)
	}
	if restart {
		r.Header.Set(names.HeaderRestart, "true")
	}
	w := httptest.NewRecorder()
	q.s.server.Replan().ServeHTTP(w, r)
	return w
}

// The replan port gives nothing without a genuine ticket of the right stage, and takes each once.
func TestReplanPortTakesGenuineTicketsOnce(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "p2", "d1")
	q := s.newRequest("/v1/chat/completions", "r1", chatBody)
	q.mode = filterv3.ProcessingMode_BUFFERED
	q.pass()
	leg, undecided := q.headers[names.HeaderTicket], q.undecided
	require.NotEmpty(t, undecided)
	refused := func(w *httptest.ResponseRecorder) {
		t.Helper()
		require.Equal(t, 503, w.Code)
		require.Empty(t, w.Header().Get(names.HeaderTicket))
		require.Empty(t, w.Header().Get("location"))
	}
	for _, restart := range []bool{false, true} {
		refused(q.atReplan("", "/v1/chat/completions", restart))
		refused(q.atReplan(strings.Repeat("A", 100), "/v1/chat/completions", restart))
	}
	refused(q.atReplan(leg, "/v1/chat/completions", true)) // no pass begins with it
	refused(q.atReplan(undecided, "/v1/chat/completions", false))
	require.Zero(t, s.count("tandem_endpoint_health_changes_total"))

	w := q.atReplan(leg, "/sleep", false)
	require.Equal(t, 307, w.Code)
	require.Equal(t, "http://tandem/v1/chat/completions", w.Header().Get("location"))
	failed := w.Header().Get(names.HeaderTicket)
	refused(q.atReplan(leg, "/v1/chat/completions", false)) // a second time
	refused(q.atReplan(failed, "/v1/chat/completions", false))

	w = q.atReplan(undecided, "/v1/chat/completions", true)
	require.Equal(t, 307, w.Code)
	refused(q.atReplan(undecided, "/v1/chat/completions", true))
	refused(q.atReplan(w.Header().Get(names.HeaderTicket), "/v1/chat/completions", true)) // a pass is restarted once
}

// The path and host of a pass are those of the ticket, wherever the redirect leads.
func TestARedirectLeadsToTheClientsPath(t *testing.T) {
	for _, restart := range []bool{false, true} {
		for _, path := range []string{"/v1/chat/completions", "/v1/chat/completions?a=b"} {
			s := newStand(t, core.Options{})
			s.pool("chat", splitting(), "p1", "p2", "d1")
			q := s.newRequest(path, "r1", chatBody)
			q.mode = filterv3.ProcessingMode_BUFFERED
			q.pass()
			ticket := q.headers[names.HeaderTicket]
			if restart {
				ticket, q.body = q.undecided, []byte(chatBody)
			}
			q.taken = q.atReplan(ticket, path, restart).Header().Get(names.HeaderTicket)
			q.follow()
			q.headers[":path"], q.headers[":authority"] = "/sleep", "evil.host"
			q.pass()
			require.Equal(t, "prefill", q.headers[names.HeaderLeg])
			require.Equal(t, path, q.headers[":path"])
			require.NotEqual(t, "evil.host", q.headers[":authority"])
		}
	}
}

// A request on a path that is never split begins again as what it was, and is checked again.
func TestAnotherPathIsDecidedAgain(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1")
	q := s.newRequest("/tokenize", "r1", `{"model":"m","prompt":"a"}`)
	q.mode = filterv3.ProcessingMode_BUFFERED
	q.pass()
	require.Equal(t, "pass true", q.headers[names.HeaderLeg]+" "+q.headers[names.HeaderOther])
	q.taken = q.atReplan(q.undecided, "/tokenize", true).Header().Get(names.HeaderTicket)
	q.follow()
	q.pass()
	require.Equal(t, "pass true", q.headers[names.HeaderLeg]+" "+q.headers[names.HeaderOther])
	require.Equal(t, addressOf("d1"), q.headers[names.HeaderEndpoint])
}

// A ticket that is not ours costs the request, and nothing that it reserved is left: neither where the pass began again,
// nor where the log alone tells of it.
func TestForgedTicketsLeaveNothingReserved(t *testing.T) {
	for _, ticket := range []string{"", "A", strings.Repeat("A", 100)} {
		for _, logged := range []bool{false, true} {
			s := newStand(t, core.Options{})
			s.pool("chat", splitting(), "p1", "d1")
			q := s.newRequest("/v1/chat/completions", "r1", chatBody)
			q.pass()
			require.Positive(t, s.state.Bookings.Reservations())
			if logged {
				if ticket == "" {
					continue
				}
				entry := q.entry(307, "internal_redirect")
				entry.Request.RequestHeaders[names.HeaderTicket] = ticket
				s.log(entry)
			} else {
				q.headers[names.HeaderTicket] = ticket
				v := q.pass()
				require.Equal(t, 503, v.status())
				require.Contains(t, string(v.immediate.GetBody()), names.CodeTicketRefused)
			}
			require.Zero(t, s.state.Bookings.Reservations())
		}
	}
}
