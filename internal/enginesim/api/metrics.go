package api

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tandem/internal/enginesim/engine"
)

// handler serves /metrics.
func (s *Server) metricsHandler() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s)
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{DisableCompression: true})
}

// Describe makes the collector an unchecked one: its series come and go with their labels.
func (s *Server) Describe(chan<- *prometheus.Desc) {}

// Collect reads every count at once.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	c := engine.Collector{Ch: ch, Labels: prometheus.Labels{"engine": "0", "model_name": s.cfg.Models[0]}}
	s.Node.Collect(&c)
	s.collectOurs(&c)
}

func (s *Server) collectOurs(c *engine.Collector) {
	m := s.Metrics
	c.Gauge("enginesim_blocks_held", "KV blocks handed over and neither fetched, released nor expired, or waiting for the other leg.", float64(s.Held()))
	if s.Events != nil {
		c.Gauge("enginesim_kv_events_subscribers", "Connections to the socket that publishes KV events.", float64(s.Events.Subs.Count()))
	}
	const over = "KV hand-overs of the prefill side by how they ended; given counts them all."
	c.Counter("enginesim_handovers_total", over, s.Ledger.Given.Load(), "outcome", "given")
	c.Counter("enginesim_handovers_total", over, s.Ledger.Fetched.Load(), "outcome", "fetched")
	c.Counter("enginesim_handovers_total", over, s.Ledger.Freed.Load(), "outcome", "released")
	c.Counter("enginesim_handovers_total", over, s.Ledger.Expired.Load(), "outcome", "expired")
	m.Violations.Each(func(kind string, n int64) {
		c.Counter("enginesim_violations_total", "Requests that a real engine would have answered from KV that was not theirs, or that broke a rule of the protocol.", n, "kind", kind)
	})
	m.RoleMismatch.Each(func(kind string, n int64) {
		c.Counter("enginesim_role_mismatch_total", "Requests served although they do not belong on an engine of this role.", n, "kind", kind)
	})
	m.Requests.Each(func(key string, n int64) {
		path, leg := cutNUL(key)
		c.Counter("enginesim_requests_total", "Requests by path and leg.", n, "path", path, "leg", leg)
	})
	m.Injected.Each(func(mode string, n int64) {
		c.Counter("enginesim_injected_failures_total", "Failures injected by POST /sim/fail.", n, "mode", mode)
	})
	c.Counter("enginesim_aborted_total", "Requests whose client left before the answer was complete.", m.Aborted.Load())
}

// Held is how many blocks wait for the other leg, and embeddings for a prefill.
func (s *Server) Held() int64 { return s.HeldBlocks() + s.encodings.held() }

func cutNUL(s string) (before, after string) {
	for i := range len(s) {
		if s[i] == 0 {
			return s[:i], s[i+1:]
		}
	}
	return s, ""
}
