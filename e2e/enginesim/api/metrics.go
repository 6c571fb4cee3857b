package api

import (
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"tandem/e2e/enginesim/connector"
	"tandem/e2e/enginesim/engine"
)

// metricsHandler serves /metrics.
func (s *Server) metricsHandler() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(s)
	shown := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		all, err := reg.Gather()
		return slices.DeleteFunc(all, func(f *dto.MetricFamily) bool {
			return s.cfg.Front.Uncounted && slices.Contains(counts, f.GetName())
		}), err
	})
	return promhttp.HandlerFor(shown, promhttp.HandlerOpts{DisableCompression: true})
}

// counts are what an engine counts of its answers.
var counts = []string{
	"vllm:request_generation_tokens", "vllm:inter_token_latency_seconds", "vllm:generation_tokens_total",
}

// Describe sends nothing, which makes the collector unchecked: its series come and go with their labels.
func (s *Server) Describe(chan<- *prometheus.Desc) {}

// Collect reads every count at once.
func (s *Server) Collect(ch chan<- prometheus.Metric) {
	for rank, n := range s.ranks {
		labels := prometheus.Labels{"engine": strconv.Itoa(rank), "model_name": s.cfg.Models[0]}
		c := engine.Collector{Ch: ch, Labels: labels}
		n.Collect(&c)
		collectOurs(&c, n, s.heldBy(n))
	}
}

// collectOurs sends the simulator's own series of a rank.
func collectOurs(c *engine.Collector, n *connector.Node, held int64) {
	m := n.Metrics
	const heldHelp = "KV blocks handed over and neither fetched, released nor expired, or waiting for the other leg."
	c.Gauge("enginesim_blocks_held", heldHelp, float64(held))
	if n.Events != nil {
		c.Gauge("enginesim_kv_events_subscribers", "Connections to the socket that publishes KV events.",
			float64(n.Events.Subs.Count()))
	}
	const over = "KV hand-overs of the prefill side by how they ended; given counts them all."
	c.Counter("enginesim_handovers_total", over, n.Ledger.Given.Load(), "outcome", "given")
	c.Counter("enginesim_handovers_total", over, n.Ledger.Fetched.Load(), "outcome", "fetched")
	c.Counter("enginesim_handovers_total", over, n.Ledger.Freed.Load(), "outcome", "released")
	c.Counter("enginesim_handovers_total", over, n.Ledger.Expired.Load(), "outcome", "expired")
	m.Violations.Each(func(kind string, count int64) {
		c.Counter("enginesim_violations_total",
			"Requests that a real engine would have answered from KV that was not theirs, or that broke a rule of "+
				"the protocol.", count, "kind", kind)
	})
	m.RoleMismatch.Each(func(kind string, count int64) {
		c.Counter("enginesim_role_mismatch_total",
			"Requests served although they do not belong on an engine of this role.", count, "kind", kind)
	})
	m.Requests.Each(func(key string, count int64) {
		path, leg, _ := strings.Cut(key, "\x00")
		c.Counter("enginesim_requests_total", "Requests by path and leg.", count, "path", path, "leg", leg)
	})
	m.Injected.Each(func(mode string, count int64) {
		c.Counter("enginesim_injected_failures_total", "Failures injected by POST /sim/fail.", count, "mode", mode)
	})
	c.Counter("enginesim_aborted_total", "Requests whose client left before the answer was complete.", m.Aborted.Load())
}

// Held returns the number of blocks that wait for the other leg, and of embeddings that wait for a prefill.
func (s *Server) Held() (held int64) {
	for _, n := range s.ranks {
		held += s.heldBy(n)
	}
	return held
}

// heldBy returns a rank's part of Held; embeddings are rank 0's.
func (s *Server) heldBy(n *connector.Node) int64 {
	if n == s.Node {
		return n.HeldBlocks() + s.encodings.held()
	}
	return n.HeldBlocks()
}
