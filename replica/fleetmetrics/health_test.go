package fleetmetrics

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// Each change is logged and counted once, with its cause, and with why if that is known.
func TestHealthChangesAreToldOnce(t *testing.T) {
	var text bytes.Buffer
	h := NewHealthLog(slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})))
	s := kvstate.New(kvstate.Options{HealthChanged: h.Changed})
	s.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "10.0.0.1:80", Role: kvstate.RolePrefill}})
	e := s.Pool("chat").Endpoint("10.0.0.1:80")
	for range 3 {
		s.Health.MarkFailed(e)
		s.Health.Mark(e, true, kvstate.CauseTimeLimit, "")
		s.Health.ApplyFailed(e, true, false)
	}
	s.Health.MarkGood(e)
	s.Health.MarkGood(e)
	s.Health.Mark(e, true, kvstate.CauseTimeLimit, "")
	s.Health.ApplyFailed(e, false, false)
	s.Health.Mark(e, false, kvstate.CauseCheck, "GET /health: status 500")
	require.Equal(t, []string{
		`level=WARN msg="endpoint is out" endpoint=10.0.0.1:80 role=prefill cause=request`,
		`level=INFO msg="endpoint is back" endpoint=10.0.0.1:80 role=prefill cause=answer`,
		`level=WARN msg="endpoint is out" endpoint=10.0.0.1:80 role=prefill cause=time_limit`,
		`level=INFO msg="endpoint is back" endpoint=10.0.0.1:80 role=prefill cause=replica`,
		`level=WARN msg="endpoint is out" endpoint=10.0.0.1:80 role=prefill cause=check why="GET /health: status 500"`,
	}, strings.Split(strings.TrimSpace(text.String()), "\n"))
	out := prometheus.Labels{"endpoint": "10.0.0.1:80", "to": "out", "cause": "time_limit"}
	require.InDelta(t, 1, testutil.ToFloat64(h.With(out)), 0)
}
