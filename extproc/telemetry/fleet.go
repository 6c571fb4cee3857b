package telemetry

import (
	"context"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

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
	seen map[string]time.Time // by address: when it was last in a pool
}

// Series of an endpoint stay for keepSeries after it left, so that the last values are scraped: the time after which
// Prometheus itself takes a series for gone. A longer answer that ends later begins its series anew.
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
	for addr, last := range d.seen {
		if now.Equal(last) || (now.Sub(last) < keepSeries && len(d.seen) <= maxDepartees) {
			continue
		}
		delete(d.seen, addr)
		of := prometheus.Labels{"endpoint": addr}
		m.hops.DeletePartialMatch(of)
		m.firstByte.DeletePartialMatch(of)
		m.prefillErrors.DeletePartialMatch(of)
		m.orphaned.DeletePartialMatch(of)
		m.loadFailures.DeletePartialMatch(of)
		m.full.DeletePartialMatch(of)
		m.Usage.Forget(addr)
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
