package main

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate"
	"tandem/kvstate/kvevents"
)

// indexMetrics show the prefix index and the KV events that fill it. They are read when somebody asks.
type indexMetrics struct {
	state  *kvstate.State
	events *kvevents.Collector

	blocks, entries, prompts                     *prometheus.Desc
	connected, here, lag, held, aside            *prometheus.Desc
	relayed, missed                              *prometheus.Desc
	batches, gaps, lost, restarts, bad, unusable *prometheus.Desc
}

func newIndexMetrics(state *kvstate.State, events *kvevents.Collector) *indexMetrics {
	pool := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, []string{"pool"}, nil) }
	feed := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, []string{"pool", "endpoint", "rank"}, nil)
	}
	return &indexMetrics{
		state: state, events: events,
		blocks:    pool("tandem_index_blocks", "Different blocks in the prefix index."),
		entries:   pool("tandem_index_entries", "Blocks in the prefix index, counted once for each endpoint that holds them."),
		prompts:   pool("tandem_index_prompts", "Prompts whose tokens are known, so that they can be matched with KV events."),
		connected: feed("tandem_kv_events_connected", "1 while what an endpoint's publisher of KV events says reaches this replica: over its own connection, or from the replica that collects it."),
		here:      feed("tandem_kv_events_collected_here", "1 while the publisher is connected to this replica, which tells the others."),
		relayed:   feed("tandem_kv_events_relayed_total", "Times that batches came from the replica that collects them."),
		missed:    feed("tandem_kv_events_missed_total", "Times that batches of the replica that collects them were missed, so that all of it had to be asked for."),
		lag:       feed("tandem_kv_events_lag_seconds", "From the engine's clock to the index, of the last batch of KV events."),
		held:      feed("tandem_kv_events_blocks", "Blocks that the engine said it holds."),
		aside:     feed("tandem_kv_events_blocks_aside", "Of those, blocks to which no known prefix leads: one before them was lost or evicted."),
		batches:   feed("tandem_kv_events_batches_total", "Batches of KV events taken from the engine."),
		gaps:      feed("tandem_kv_events_gaps_total", "Times that batches were missing."),
		lost:      feed("tandem_kv_events_lost_total", "Times that missing batches could not be had again, and all that was known of the engine's cache was forgotten."),
		restarts:  feed("tandem_kv_events_restarts_total", "Restarts of the engine, as its numbers show."),
		bad:       feed("tandem_kv_events_malformed_total", "Messages that were no batch of KV events."),
		unusable:  feed("tandem_kv_events_unusable_total", "Blocks stored by the engine that the index could not take."),
	}
}

// Describe implements [prometheus.Collector].
func (m *indexMetrics) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, out) }

// Collect implements [prometheus.Collector].
func (m *indexMetrics) Collect(out chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, kind, value, labels...)
	}
	for _, p := range m.state.Pools() {
		stats := p.IndexStats()
		send(m.blocks, prometheus.GaugeValue, float64(stats.Blocks), p.Spec.Name)
		send(m.entries, prometheus.GaugeValue, float64(stats.Entries), p.Spec.Name)
		send(m.prompts, prometheus.GaugeValue, float64(p.KnownPrompts()), p.Spec.Name)
	}
	for _, s := range m.events.Stats() {
		labels := []string{s.Pool, s.Endpoint, strconv.Itoa(s.Rank)}
		send(m.connected, prometheus.GaugeValue, oneIf(s.Known), labels...)
		send(m.here, prometheus.GaugeValue, oneIf(s.Connected), labels...)
		send(m.relayed, prometheus.CounterValue, float64(s.Relayed), labels...)
		send(m.missed, prometheus.CounterValue, float64(s.Missed), labels...)
		send(m.lag, prometheus.GaugeValue, s.Lag.Seconds(), labels...)
		send(m.held, prometheus.GaugeValue, float64(s.Feed.Held), labels...)
		send(m.aside, prometheus.GaugeValue, float64(s.Feed.Aside), labels...)
		send(m.batches, prometheus.CounterValue, float64(s.Batches), labels...)
		send(m.gaps, prometheus.CounterValue, float64(s.Gaps), labels...)
		send(m.lost, prometheus.CounterValue, float64(s.Lost), labels...)
		send(m.restarts, prometheus.CounterValue, float64(s.Restarts), labels...)
		send(m.bad, prometheus.CounterValue, float64(s.Malformed), labels...)
		send(m.unusable, prometheus.CounterValue, float64(s.Feed.Unusable), labels...)
	}
}

func oneIf(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
