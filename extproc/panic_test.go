package extproc

import (
	"context"
	"log/slog"
	"testing"

	logdatav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	"github.com/stretchr/testify/require"

	"tandem/extproc/core"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/names"
	"tandem/extproc/openai"
)

// A panic while a request is decided is that request's 500. The replica goes on, and the panic is counted.
func TestAPanicCostsOneRequest(t *testing.T) {
	s := newStand(t, core.Options{})
	s.pool("chat", splitting(), "p1", "d1")
	policy := s.core.Settings().Pools["chat"]
	good := policy.Dialect
	policy.Dialect.Prefill = func(*openai.Request, *openai.Patch, *kvtransfer.Pair) { panic("broken") }
	s.policy("chat", policy)
	for range 3 {
		q := s.newRequest("/v1/chat/completions", "r1", chatBody)
		v := q.pass()
		require.Equal(t, 500, v.status())
		require.Contains(t, string(v.immediate.GetBody()), `"code":"internal_error"`)
	}
	require.Zero(t, s.server.Memory.Load())
	require.InDelta(t, 3, s.count("tandem_panics_total", "ext_proc main"), 0)

	policy.Dialect = good
	s.policy("chat", policy)
	q := s.newRequest("/v1/chat/completions", "r2", chatBody)
	q.pass()
	require.Equal(t, "prefill", q.headers[names.HeaderLeg])
}

// A panic while one entry of the access log is handled costs that entry: the others of its batch, and of its stream, are
// other requests'.
func TestAPanicCostsOneLogEntry(t *testing.T) {
	s := newStand(t, core.Options{Log: slog.New(panics{slog.DiscardHandler, "r2"})})
	s.pool("chat", splitting(), "p1", "d1")
	var entries []*logdatav3.HTTPAccessLogEntry
	for _, id := range []string{"r1", "r2", "r3"} {
		q := s.newRequest("/v1/chat/completions", id, chatBody)
		q.pass()
		entries = append(entries, q.entry(200, "via_upstream"))
	}
	held := s.server.State.Bookings.Reservations()
	s.log(entries...)
	require.InDelta(t, 1, s.count("tandem_panics_total", "access log"), 0)
	require.Equal(t, held/3, s.server.State.Bookings.Reservations(), "those of the second request, which end by their time")
}

// panics is a log that panics when the end of a request is logged.
type panics struct {
	slog.Handler
	request string
}

func (panics) Enabled(context.Context, slog.Level) bool { return true }

func (p panics) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if r.Message == "pass ended" && a.Key == "request_id" && a.Value.String() == p.request {
			panic("broken")
		}
		return true
	})
	return nil
}
