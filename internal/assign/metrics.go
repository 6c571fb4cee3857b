package assign

import "github.com/prometheus/client_golang/prometheus"

// collector reports what pools want.
type collector struct {
	a             *Assigner
	wanted, words *prometheus.Desc
}

// Collector returns the metrics of the words.
func (a *Assigner) Collector() prometheus.Collector {
	return &collector{
		a: a,
		wanted: prometheus.NewDesc("tandem_engines_wanted",
			"Engines that the pool's load needs for a leg to keep its targets.", []string{"pool", "role"}, nil),
		words: prometheus.NewDesc("tandem_endpoint_word",
			"1 for the role that an endpoint of a pool with roles auto has now.",
			[]string{"pool", "endpoint", "role"}, nil),
	}
}

// Describe implements [prometheus.Collector].
func (c *collector) Describe(out chan<- *prometheus.Desc) { out <- c.wanted; out <- c.words }

// Collect implements [prometheus.Collector].
func (c *collector) Collect(out chan<- prometheus.Metric) {
	for pool, at := range c.a.Advice() {
		for role, n := range map[string]int{"prefill": at.WantedPrefill, "decode": at.WantedDecode} {
			out <- prometheus.MustNewConstMetric(c.wanted, prometheus.GaugeValue, float64(n), pool, role)
		}
		for addr, w := range at.Words {
			out <- prometheus.MustNewConstMetric(c.words, prometheus.GaugeValue, 1, pool, addr, w.Word)
		}
	}
}
