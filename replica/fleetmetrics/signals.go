// Package fleetmetrics shows what the packages under kvstate count as Prometheus metrics: they do not know Prometheus.
// docs/operations.md has a row for each metric.
package fleetmetrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate"
	"tandem/kvstate/scrape"
)

// signals are what decisions are made from, and how old it is.
type signals struct {
	state                                           *kvstate.State
	scraper                                         *scrape.Scraper
	running, waiting, external, usage, age, scrapes *prometheus.Desc
	bandwidth, tokenBytes, output, perToken         *prometheus.Desc
	slowness                                        *prometheus.Desc
}

// Signals returns the collector of the load that engines report.
func Signals(state *kvstate.State, scraper *scrape.Scraper) prometheus.Collector {
	gauge := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, []string{"pool", "endpoint"}, nil)
	}
	return &signals{
		state:   state,
		scraper: scraper,
		scrapes: prometheus.NewDesc("tandem_scrapes_total",
			"Times that this replica asked an engine for its metrics, by result (ok, "+
				"failed).", []string{"result"}, nil),
		running: gauge("tandem_engine_running",
			"Running requests, as the engine reports them. Absent: not reported."),
		waiting: gauge("tandem_engine_waiting",
			"Waiting requests, as the engine reports them. Absent: not reported."),
		external: gauge("tandem_engine_requests_external",
			"Running and waiting requests that no replica reserved, in two scrapes: load that did not come through "+
				"Tandem. Absent: not reported."),
		usage: gauge("tandem_engine_kv_usage",
			"Share of the KV cache in use, 0 to 1, as the engine reports it. Absent: not reported."),
		bandwidth: gauge("tandem_engine_transfer_bytes_per_second",
			"Rate of KV transfers to the endpoint, learned from its engine's counters. Absent: not learned."),
		tokenBytes: prometheus.NewDesc("tandem_kv_bytes_per_token",
			"KV bytes of a token, learned from the engines' counters of transfers. Absent: not "+
				"learned.", []string{"pool"}, nil),
		output: gauge("tandem_engine_output_tokens_total",
			"Tokens that the engine has written since it started, as it reports them. Absent: not reported."),
		perToken: gauge("tandem_engine_inter_token_seconds",
			"Time between two tokens of an answer: sum and count since the engine started. Absent: not reported."),
		slowness: prometheus.NewDesc("tandem_endpoint_slowness",
			"Learned time of an endpoint's work (leg: prefill, decode) over that of its peers in the pool: 2 is "+
				"twice as slow. Absent: not learned, or no peers.", []string{"pool", "endpoint", "leg"}, nil),
		age: gauge("tandem_engine_signals_age_seconds",
			"Age of the oldest figure that the engine has reported. Absent: none yet."),
	}
}

// Describe implements [prometheus.Collector].
func (s *signals) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		s.running, s.waiting, s.external, s.usage, s.age, s.scrapes, s.bandwidth, s.tokenBytes, s.output, s.perToken,
		s.slowness,
	} {
		out <- d
	}
}

// Collect implements [prometheus.Collector].
func (s *signals) Collect(out chan<- prometheus.Metric) {
	answered, failed := s.scraper.Counts()
	out <- prometheus.MustNewConstMetric(s.scrapes, prometheus.CounterValue, float64(answered), "ok")
	out <- prometheus.MustNewConstMetric(s.scrapes, prometheus.CounterValue, float64(failed), "failed")
	now := time.Now()
	for _, p := range s.state.Pools() {
		if bytes := p.TokenBytes(); bytes > 0 {
			out <- prometheus.MustNewConstMetric(s.tokenBytes, prometheus.GaugeValue, bytes, p.Spec.Name)
		}
		for _, one := range s.state.SlownessIn(p) {
			for leg, v := range map[string]float64{"prefill": one.Prefill, "decode": one.Decode} {
				if v > 0 {
					out <- prometheus.MustNewConstMetric(s.slowness, prometheus.GaugeValue, v, p.Spec.Name,
						one.Endpoint.Addr, leg)
				}
			}
		}
		for _, e := range p.Endpoints() {
			g := e.Signals()
			if g == nil {
				continue
			}
			show := func(d *prometheus.Desc, v float64) {
				if v >= 0 {
					out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, p.Spec.Name, e.Addr)
				}
			}
			show(s.running, float64(g.Running))
			show(s.waiting, float64(g.Waiting))
			if g.Running >= 0 && g.Waiting >= 0 {
				show(s.external, float64(g.External))
			}
			show(s.usage, g.KVUsage)
			if bandwidth := s.state.Bandwidth(p, e); bandwidth > 0 {
				show(s.bandwidth, bandwidth)
			}
			if n := g.Answers.Written(); n > 0 {
				out <- prometheus.MustNewConstMetric(s.output, prometheus.CounterValue, float64(n), p.Spec.Name, e.Addr)
			}
			if w := &g.Answers; w.Gaps > 0 {
				gaps, sum := uint64(w.Gaps), w.GapTime.Seconds()
				out <- prometheus.MustNewConstSummary(s.perToken, gaps, sum, nil, p.Spec.Name, e.Addr)
			}
			show(s.age, max(g.Age(now).Seconds(), 0))
		}
	}
}
