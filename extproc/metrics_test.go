package extproc

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"tandem/extproc/core"
	"tandem/extproc/names"
)

// TestARequestIsCounted takes one request through both hops and reads what an operator would scrape.
func TestARequestIsCounted(t *testing.T) {
	s := newStand(t, core.Options{Log: slog.New(slog.DiscardHandler)})
	registry := s.registry
	s.pool("chat", splitting(), "p1", "d1")
	s.state.Pool("chat").ObservePrefill(1<<20, time.Hour) // so a time is expected

	q := s.newRequest("/v1/chat/completions", "req-1", chatBody)
	require.Zero(t, q.pass().status())
	require.Equal(t, 307, q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(4))}).status())
	q.follow()
	require.Zero(t, q.pass().status())
	s.log(q.entry(200, "via_upstream"))
	require.Eventually(t, func() bool { return s.server.observer.Totals().OK == 1 }, 30*time.Second, time.Millisecond)

	m := s.server.observer
	require.InDelta(t, 1, s.count("tandem_decisions_total", "chat", "split"), 0)
	require.Positive(t, s.count("tandem_prefill_seconds_compared_total", "chat", "expected"))
	require.Positive(t, s.count("tandem_prefill_seconds_compared_total", "chat", "measured"))
	for _, name := range []string{"tandem_prefill_time_ratio", "tandem_request_duration_seconds"} {
		n, err := testutil.GatherAndCount(registry, name)
		require.NoError(t, err)
		require.Equal(t, 1, n, name)
	}
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP tandem_endpoint_up Whether an endpoint is in use (1) or marked as failed (0).
# TYPE tandem_endpoint_up gauge
tandem_endpoint_up{endpoint="10.0.1.1:8000",pool="chat",role="prefill"} 1
tandem_endpoint_up{endpoint="10.0.2.1:8000",pool="chat",role="decode"} 1
# HELP tandem_reservations Reservations that are held now.
# TYPE tandem_reservations gauge
tandem_reservations 0
`), "tandem_endpoint_up", "tandem_reservations"))
	problems, err := testutil.GatherAndLint(registry)
	require.NoError(t, err)
	require.Empty(t, problems)
	totals := m.Totals()
	require.Equal(t, uint64(1), totals.Split)
	require.Positive(t, totals.Prefill.Quantile(.5))
	require.Positive(t, totals.Decisions.Quantile(.5))
}

// TestTimesLeadToTraces: a scraper that asks for OpenMetrics finds, in the buckets, requests to look at.
func TestTimesLeadToTraces(t *testing.T) {
	s := newStand(t, core.Options{Log: slog.New(slog.DiscardHandler), Tracer: sdktrace.NewTracerProvider().Tracer("test")})
	s.pool("chat", splitting(), "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "req-1", chatBody)
	q.headers[names.HeaderTraceparent] = clientsSpan
	first := q.pass()
	require.Zero(t, first.status())
	require.Equal(t, 307, q.prefillLeg(engineAnswer{status: 200, body: prefilled(params(4))}).status())
	q.follow()
	require.Zero(t, q.pass().status())
	e := q.entry(200, "via_upstream")
	e.Request.RequestHeaders[names.HeaderTraceparent] = first.set[names.HeaderTraceparent]
	s.log(e)
	require.Eventually(t, func() bool { return s.server.observer.Totals().OK == 1 }, 30*time.Second, time.Millisecond)

	families, err := s.registry.Gather()
	require.NoError(t, err)
	var led []string
	for _, family := range families {
		if slices.ContainsFunc(family.GetMetric(), func(m *dto.Metric) bool {
			return slices.ContainsFunc(m.GetHistogram().GetBucket(), func(b *dto.Bucket) bool {
				of := b.GetExemplar().GetLabel()
				return len(of) == 1 && of[0].GetName() == "trace_id" && of[0].GetValue() == traceID
			})
		}) {
			led = append(led, family.GetName())
		}
	}
	require.Equal(t, []string{"tandem_ext_proc_duration_seconds", "tandem_ext_proc_phase_seconds", "tandem_hop_duration_seconds", "tandem_request_duration_seconds"}, led)
}
