package telemetry

import (
	"log/slog"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/usage"
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

func TestQuantilesAreOffByAQuarterAtMost(t *testing.T) {
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
		require.GreaterOrEqual(t, got, exact*4/5, "q %v", q)
		require.LessOrEqual(t, got, exact*5/4+time.Nanosecond, "q %v", q)
	}
	require.Zero(t, new(Durations).Quantile(.5))
	half := counted.Since(&counted)
	require.Zero(t, half.Quantile(.99), "nothing came since")
}

func TestExemplarsAreOfSampledTraces(t *testing.T) {
	require.Equal(t, exemplar{"trace_id": traceID}, exemplarIn([]byte(clientsSpan)))
	for _, not := range []string{"", "00", notSampled, clientsSpan + "-more", strings.Replace(clientsSpan, "0af7", "zzzz", 1), "00-" + strings.Repeat("0", 32) + "-b7ad6b7169203331-01"} {
		require.Nil(t, exemplarIn([]byte(not)), not)
	}
}

// Without a trace no exemplar is built.
func TestNoTraceNoExemplarAlloc(t *testing.T) {
	h := prometheus.NewHistogram(histogramOpts("h", "help", []float64{1}))
	observe(h, time.Second, nil)
	budget.Allocs(t, 100, 0, func() { observe(h, time.Second, exemplarIn(nil)) })
}

// TestSeriesOfEndpointsThatLeftAreDropped: otherwise a fleet of pods would accumulate more of them each day.
func TestSeriesOfEndpointsThatLeftAreDropped(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	m := NewMetrics(prometheus.NewRegistry(), state)
	spec := kvstate.PoolSpec{Name: "chat"}
	stays, leaves := kvstate.EndpointSpec{Addr: "10.0.0.1:1", Role: kvstate.RolePrefill}, kvstate.EndpointSpec{Addr: "10.0.0.2:1", Role: kvstate.RoleDecode}
	state.SetPool(spec, []kvstate.EndpointSpec{stays, leaves})
	for _, e := range []string{stays.Addr, leaves.Addr} {
		m.HopEnded("chat", "prefill", e, "ok", time.Second, nil)
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

// An endpoint that came and went between two looks, or whose last request ended long after it left, has series in every
// kind of metric, which are removed like all others.
func TestSeriesGoHoweverShortAnEndpointLived(t *testing.T) {
	state, registry := kvstate.New(kvstate.Options{}), prometheus.NewRegistry()
	m := NewMetrics(registry, state)
	var err error
	m.Usage, err = usage.New(usage.Options{}, registry, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	other := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "other_total", Help: "x"}, []string{"endpoint"})
	registry.MustRegister(other)
	m.PruneToo(other)
	const gone = "10.0.0.9:1"
	fill := func() {
		vecs := slices.Clone(m.byEndpoint)
		for _, v := range m.Usage.ByEndpoint() {
			vecs = append(vecs, v)
		}
		for _, v := range vecs {
			labels := prometheus.Labels{}
			for _, name := range labelsOf(v) {
				labels[name] = "x"
			}
			labels[endpointLabel] = gone
			switch v := v.(type) {
			case *prometheus.MetricVec:
				_, err := v.GetMetricWith(labels)
				require.NoError(t, err)
			case *prometheus.CounterVec:
				v.With(labels).Inc()
			case *prometheus.HistogramVec:
				v.With(labels).Observe(1)
			default:
				t.Fatalf("a metric of another type: %T", v)
			}
		}
	}
	left := func() (out []string) {
		all, err := registry.Gather()
		require.NoError(t, err)
		for _, family := range all {
			for _, one := range family.GetMetric() {
				for _, l := range one.GetLabel() {
					if l.GetValue() == gone {
						out = append(out, family.GetName())
					}
				}
			}
		}
		return out
	}
	now := time.Unix(0, 0)
	for range 2 { // the second time: its last request ended after its series had gone
		fill()
		require.Len(t, left(), 13, left())
		m.prune(state, now)
		m.prune(state, now.Add(keepSeries/2))
		require.Len(t, left(), 13, "its last values are scraped")
		now = now.Add(keepSeries)
		m.prune(state, now)
		require.Empty(t, left())
	}
}

var variableLabels = regexp.MustCompile(`variableLabels: \{([^}]*)\}`)

// labelsOf returns the names of a metric's labels.
func labelsOf(v vec) []string {
	all := make(chan *prometheus.Desc, 1)
	v.Describe(all)
	return strings.Split(variableLabels.FindStringSubmatch((<-all).String())[1], ",")
}

func TestTraceContextIsOfTwoHeaders(t *testing.T) {
	var c TraceContext
	c.Set("traceparent", "a")
	c.Set("tracestate", "b")
	c.Set("baggage", "c")
	require.Equal(t, "a b ", strings.Join([]string{c.Get("traceparent"), c.Get("tracestate"), c.Get("baggage")}, " "))
	require.Len(t, c.Keys(), 2)
}

// A trace context of the W3C's examples, and one that is not sampled.
const (
	traceID     = "0af7651916cd43dd8448eb211c80319c"
	clientsSpan = "00-" + traceID + "-b7ad6b7169203331-01"
	notSampled  = "00-" + traceID + "-00f067aa0ba902b7-00"
)
