package extproc

import (
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"tandem/extproc/kvtransfer"
	"tandem/internal/budget"
	"tandem/kvstate"
)

func TestDurationsAreCountedInQuartersOfOctaves(t *testing.T) {
	for i := range durationBuckets {
		top := bucketTop(i)
		require.Equal(t, i, bucketOf(top-1), "just below %v", top)
		require.Equal(t, min(i+1, durationBuckets-1), bucketOf(top), "from %v on", top)
	}
	require.Zero(t, bucketOf(-time.Second))
	require.Equal(t, durationBuckets-1, bucketOf(24*time.Hour))
}

func TestQuantilesAreAtMostAQuarterTooLong(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var h liveDurations
	var all []time.Duration
	for range 10_000 {
		d := time.Duration(rng.ExpFloat64() * float64(80*time.Millisecond))
		all = append(all, d)
		h.observe(d)
	}
	slices.Sort(all)
	counted := h.load()
	for _, q := range []float64{.5, .9, .99, 1} {
		exact, got := all[int(q*float64(len(all)))-1], counted.Quantile(q)
		require.GreaterOrEqual(t, got, exact, "q %v", q)
		require.LessOrEqual(t, got, exact*5/4+time.Nanosecond, "q %v", q)
	}
	require.Zero(t, new(Durations).Quantile(.5))
	half := counted.Since(&counted)
	require.Zero(t, half.Quantile(.99), "nothing came since")
}

// TestARequestIsCounted takes one request through both hops and reads what an operator would scrape.
func TestARequestIsCounted(t *testing.T) {
	s := newStand(t, Options{Log: slog.New(slog.DiscardHandler)})
	registry := s.registry
	s.pool("chat", splitting(), "p1", "d1")
	s.state.Pool("chat").ObservePrefill(1<<20, time.Hour) // so a time is expected

	q := s.newRequest("/v1/chat/completions", "req-1", chatBody)
	require.Zero(t, q.pass().status())
	require.Equal(t, 307, q.prefillLeg(answer{status: 200, body: prefilled(params(4))}).status())
	q.follow()
	require.Zero(t, q.pass().status())
	s.log(q.entry(200, "via_upstream"))
	require.Eventually(t, func() bool { return s.server.metrics.Totals().OK == 1 }, 30*time.Second, time.Millisecond)

	m := s.server.metrics
	require.InDelta(t, 1, testutil.ToFloat64(m.requests.WithLabelValues("chat", "split", "")), 0)
	require.Positive(t, testutil.ToFloat64(m.expected.time.WithLabelValues("chat", "expected")))
	require.Positive(t, testutil.ToFloat64(m.expected.time.WithLabelValues("chat", "measured")))
	require.Equal(t, 1, testutil.CollectAndCount(m.expected.ratio))
	require.Equal(t, 1, testutil.CollectAndCount(m.whole))
	require.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP tandem_endpoint_up Whether an endpoint is in use (1) or left out because it failed (0).
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
	s := newStand(t, Options{Log: slog.New(slog.DiscardHandler), Tracer: sdktrace.NewTracerProvider().Tracer("test")})
	s.pool("chat", splitting(), "p1", "d1")
	q := s.newRequest("/v1/chat/completions", "req-1", chatBody)
	q.headers[headerTraceparent] = clientsSpan
	first := q.pass()
	require.Zero(t, first.status())
	require.Equal(t, 307, q.prefillLeg(answer{status: 200, body: prefilled(params(4))}).status())
	q.follow()
	require.Zero(t, q.pass().status())
	e := q.entry(200, "via_upstream")
	e.Request.RequestHeaders[headerTraceparent] = first.set[headerTraceparent]
	s.log(e)
	require.Eventually(t, func() bool { return s.server.metrics.Totals().OK == 1 }, 30*time.Second, time.Millisecond)

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

func TestExemplarsAreOfSampledTraces(t *testing.T) {
	require.Equal(t, exemplar{"trace_id": traceID}, exemplarIn([]byte(clientsSpan)))
	for _, not := range []string{"", "00", notSampled, clientsSpan + "-more", strings.Replace(clientsSpan, "0af7", "zzzz", 1), "00-" + strings.Repeat("0", 32) + "-b7ad6b7169203331-01"} {
		require.Nil(t, exemplarIn([]byte(not)), not)
	}
}

// Without a trace an exemplar is not even thought of.
func TestNoTraceNoExemplarAlloc(t *testing.T) {
	h := prometheus.NewHistogram(histogramOpts("h", "help", []float64{1}))
	observe(h, time.Second, nil)
	budget.Allocs(t, 100, 0, func() { observe(h, time.Second, exemplarIn(nil)) })
}

// TestSeriesOfEndpointsThatLeftAreDropped, or a fleet of pods would leave more of them each day.
func TestSeriesOfEndpointsThatLeftAreDropped(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	m := NewMetrics(prometheus.NewRegistry(), state)
	spec := kvstate.PoolSpec{Name: "chat"}
	stays, leaves := kvstate.EndpointSpec{Addr: "10.0.0.1:1", Role: kvstate.RolePrefill}, kvstate.EndpointSpec{Addr: "10.0.0.2:1", Role: kvstate.RoleDecode}
	state.SetPool(spec, []kvstate.EndpointSpec{stays, leaves})
	for _, e := range []string{stays.Addr, leaves.Addr} {
		m.hop("chat", "prefill", e, "ok", time.Second, nil)
		m.prefillEnded(&kvtransfer.Ticket{Pool: "chat", Prefill: e}, 999, "failed", time.Second, nil)
	}
	now := time.Unix(0, 0)
	m.prune(state, now)
	state.SetPool(spec, []kvstate.EndpointSpec{stays})
	m.prune(state, now.Add(keepSeries/2))
	require.Equal(t, 4, testutil.CollectAndCount(m.hops), "its last requests may still end")
	m.prune(state, now.Add(keepSeries))
	require.Equal(t, 2, testutil.CollectAndCount(m.hops))
	require.Equal(t, 1, testutil.CollectAndCount(m.prefillErrors))
	require.InDelta(t, 1, testutil.ToFloat64(m.prefillErrors.WithLabelValues("chat", stays.Addr, "other")), 0, "an engine does not make labels")
	m.prune(state, now.Add(9*keepSeries))
	require.Equal(t, 2, testutil.CollectAndCount(m.hops), "what stays, stays")
}
