package telemetry

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"tandem/kvstate"
)

// stateCollector exports the fleet as it is when scraped: an endpoint that has left has no series.
type stateCollector struct {
	state                *kvstate.State
	up, requests, tokens *prometheus.Desc
	remote               *prometheus.Desc
}

func newStateCollector(state *kvstate.State) *stateCollector {
	endpoint := []string{"pool", "endpoint", "role"}
	return &stateCollector{
		state: state,
		up: prometheus.NewDesc("tandem_endpoint_up", "Whether an endpoint is in use (1) or marked as failed (0).",
			endpoint, nil),
		requests: prometheus.NewDesc("tandem_endpoint_requests", "Requests booked on an endpoint now.", endpoint, nil),
		tokens: prometheus.NewDesc("tandem_endpoint_prompt_tokens",
			"Prompt tokens of the requests reserved on an endpoint now.", endpoint, nil),
		remote: prometheus.NewDesc("tandem_queue_requests_remote",
			"Requests known to wait in other replicas. This one dispatches them before its own that rank behind them.",
			[]string{"pool"}, nil),
	}
}

// Describe implements [prometheus.Collector].
func (c *stateCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.up, c.requests, c.tokens, c.remote} {
		out <- d
	}
}

// Collect implements [prometheus.Collector].
func (c *stateCollector) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for _, p := range c.state.Pools() {
		if c.state.HasReplicas() {
			gauge(c.remote, float64(p.RemoteQueueLength()), p.Spec.Name)
		}
		for _, e := range p.Endpoints() {
			up := 1.
			if e.Failed() {
				up = 0
			}
			requests, tokens := e.Load()
			gauge(c.up, up, p.Spec.Name, e.Addr, e.Role.String())
			gauge(c.requests, float64(requests), p.Spec.Name, e.Addr, e.Role.String())
			gauge(c.tokens, float64(tokens), p.Spec.Name, e.Addr, e.Role.String())
		}
	}
}

// departed records the endpoints with series, to drop the series of endpoints that have left. Pods come and go with
// new addresses; without this each of them would be exported for ever.
type departed struct {
	mu   sync.Mutex
	seen map[string]time.Time // by address: when it was last in a pool, or had series although it was in none
}

// vec is a metric with labels, of which one may be an endpoint's address.
type vec interface {
	prometheus.Collector
	DeletePartialMatch(of prometheus.Labels) int
}

const endpointLabel = "endpoint"

// PruneToo makes m drop the series of departed endpoints in other metrics than its own. Call it before
// [Metrics.PruneSeries].
func (m *Metrics) PruneToo(vecs ...vec) { m.byEndpoint = append(m.byEndpoint, vecs...) }

// addSeries adds to seen the endpoints that have series and are not there. So it does not matter whether an endpoint
// was ever in a pool while prune ran, nor whether its last request ended after its series were dropped.
func (d *departed) addSeries(vecs []vec, now time.Time) {
	for _, v := range vecs {
		series := make(chan prometheus.Metric, 64)
		go func() { v.Collect(series); close(series) }()
		for one := range series {
			var out dto.Metric
			if one.Write(&out) != nil {
				continue
			}
			for _, l := range out.GetLabel() {
				if _, known := d.seen[l.GetValue()]; l.GetName() == endpointLabel && !known {
					d.seen[l.GetValue()] = now
				}
			}
		}
	}
}

// Series of an endpoint stay for keepSeries after it left, so that the last values are scraped: the time after which
// Prometheus itself takes a series for gone. An answer that ends later begins its series anew, which stay as long.
const (
	keepSeries   = 5 * time.Minute
	pruneEvery   = time.Minute
	maxDepartees = 1 << 16
)

// prune drops the series of endpoints that left long ago.
func (m *Metrics) prune(state *kvstate.State, now time.Time) {
	d := &m.endpoints
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.seen == nil {
		d.seen = map[string]time.Time{}
	}
	for _, p := range state.Pools() {
		for _, e := range p.Endpoints() {
			d.seen[e.Addr] = now
		}
	}
	vecs := slices.Clone(m.byEndpoint)
	for _, v := range m.Usage.ByEndpoint() {
		vecs = append(vecs, v)
	}
	d.addSeries(vecs, now)
	for addr, last := range d.seen {
		if now.Equal(last) || (now.Sub(last) < keepSeries && len(d.seen) <= maxDepartees) {
			continue
		}
		delete(d.seen, addr)
		for _, v := range vecs {
			v.DeletePartialMatch(prometheus.Labels{endpointLabel: addr})
		}
	}
}

// PruneSeries calls prune regularly until ctx ends.
func (m *Metrics) PruneSeries(ctx context.Context, state *kvstate.State) {
	t := time.NewTicker(pruneEvery)
	defer t.Stop()
	for {
		m.prune(state, time.Now())
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}
