package fleetmetrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"tandem/picker/roles"
)

// words reports what pools want, and the words of their endpoints.
type words struct {
	advice        func() map[string]roles.Advice
	wanted, words *prometheus.Desc
}

// Words returns the metrics of how many engines package roles advises, and of the words that it gave.
func Words(advice func() map[string]roles.Advice) prometheus.Collector {
	return &words{
		advice: advice,
		wanted: prometheus.NewDesc("tandem_engines_wanted",
			"Engines that a leg needs to keep the pool's targets under its load, from a minute after the start on. "+
				"A pool that splits nothing has the role decode alone.", []string{"pool", "role"}, nil),
		words: prometheus.NewDesc("tandem_endpoint_word",
			"1 for the role that an endpoint of a pool with roles auto has now.",
			[]string{"pool", "endpoint", "role"}, nil),
	}
}

// Describe implements [prometheus.Collector].
func (c *words) Describe(out chan<- *prometheus.Desc) { out <- c.wanted; out <- c.words }

// Collect implements [prometheus.Collector].
func (c *words) Collect(out chan<- prometheus.Metric) {
	for pool, at := range c.advice() {
		for role, n := range map[string]int{"prefill": at.WantedPrefill, "decode": at.WantedDecode} {
			if n == 0 { // not known yet, or no such leg
				continue
			}
			out <- prometheus.MustNewConstMetric(c.wanted, prometheus.GaugeValue, float64(n), pool, role)
		}
		for addr, w := range at.Words {
			out <- prometheus.MustNewConstMetric(c.words, prometheus.GaugeValue, 1, pool, addr, w.Word)
		}
	}
}
