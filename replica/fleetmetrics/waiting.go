package fleetmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/latebinding"
	"tandem/kvstate"
)

// waiting reports who waits for the memory of engines.
type waiting struct {
	state  *kvstate.State
	queued func(pool string) latebinding.Status
	memory *prometheus.Desc
}

// Waiting returns the metric of requests that wait until there is room for their KV.
func Waiting(state *kvstate.State, queued func(pool string) latebinding.Status) prometheus.Collector {
	return &waiting{state: state, queued: queued, memory: prometheus.NewDesc("tandem_queue_requests_for_memory",
		"Of the requests that wait in this replica, cold prompts that wait until conversations leave room in the KV "+
			"memory of engines.", []string{"pool"}, nil)}
}

// Describe implements [prometheus.Collector].
func (c *waiting) Describe(out chan<- *prometheus.Desc) { out <- c.memory }

// Collect implements [prometheus.Collector].
func (c *waiting) Collect(out chan<- prometheus.Metric) {
	for _, p := range c.state.Pools() {
		send(out, c.memory, prometheus.GaugeValue, float64(c.queued(p.Spec.Name).Memory), p.Spec.Name)
	}
}
