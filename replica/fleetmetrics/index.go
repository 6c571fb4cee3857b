package fleetmetrics

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate"
	"tandem/kvstate/kvevents"
)

// indexMetrics are read when they are scraped.
type indexMetrics struct {
	state  *kvstate.State
	events *kvevents.Collector

	blocks, entries, prompts                     *prometheus.Desc
	conversations, live, memory, had, lacks      *prometheus.Desc
	again                                        *prometheus.Desc
	connected, lag, held, orphans                *prometheus.Desc
	forwarded                                    *prometheus.Desc
	batches, gaps, lost, restarts, bad, unusable *prometheus.Desc
}

// Index returns the collector of the prefix index and the KV events that fill it.
func Index(state *kvstate.State, events *kvevents.Collector) prometheus.Collector {
	return newIndexMetrics(state, events)
}

func newIndexMetrics(state *kvstate.State, events *kvevents.Collector) *indexMetrics {
	pool := func(name, help string) *prometheus.Desc { return prometheus.NewDesc(name, help, []string{"pool"}, nil) }
	feed := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, []string{"pool", "endpoint", "rank"}, nil)
	}
	return &indexMetrics{
		state: state, events: events,
		blocks: pool("tandem_index_blocks", "Different blocks in the prefix index."),
		entries: pool("tandem_index_entries",
			"Blocks in the prefix index, counted once for each endpoint that holds them."),
		prompts: pool("tandem_index_prompts",
			"Prompts whose tokens are known, so that they can be matched with KV events."),
		conversations: pool("tandem_conversations", "Conversations that this replica knows."),
		live: pool("tandem_conversation_tokens",
			"Tokens of the conversations that are expected back within two minutes, each once: the working set."),
		memory: pool("tandem_kv_memory_tokens",
			"Tokens of KV that engines keep which report it: in their memory, or on the host if that is more."),
		lacks: pool("tandem_host_memory_needed_tokens",
			"Tokens of host memory that each engine would need to keep all conversations that come back; "+
				"0: they have enough."),
		had: pool("tandem_conversation_prompt_tokens_total",
			"Tokens of prompts that earlier prompts of their conversations had."),
		again: prometheus.NewDesc("tandem_recomputed_tokens_total",
			"Of those, tokens that an engine computed again, by cause (evicted: no endpoint held them any more; "+
				"elsewhere: another endpoint held them).", []string{"pool", "cause"}, nil),
		connected: feed("tandem_kv_events_connected",
			"1 while the KV events of an endpoint's publisher reach this replica, by itself or from the replica that "+
				"the publisher connected to."),
		forwarded: feed("tandem_kv_events_forwarded_total",
			"Batches that came from the replica that the publisher connected to."),
		lag: feed("tandem_kv_events_lag_seconds",
			"Time from the engine's clock to the index, of the last batch of KV events that came as it was published."),
		held: feed("tandem_kv_events_blocks", "Blocks that the engine holds, as it reports."),
		orphans: feed("tandem_kv_events_orphan_blocks",
			"Blocks that the engine holds and that no known prefix leads to: one before them was lost or evicted."),
		batches: feed("tandem_kv_events_batches_total", "Batches of KV events taken from the engine."),
		gaps:    feed("tandem_kv_events_gaps_total", "Times that batches were missing."),
		lost: feed("tandem_kv_events_lost_total",
			"Times that batches could not be fetched again or read, so that all that was known of the engine's cache "+
				"was forgotten."),
		restarts: feed("tandem_kv_events_restarts_total", "Restarts of the engine, as its batches' numbers show."),
		bad:      feed("tandem_kv_events_malformed_total", "Messages that were no batch of KV events."),
		unusable: feed("tandem_kv_events_unusable_total",
			"Blocks stored by the engine that the index could not take."),
	}
}

// Describe implements [prometheus.Collector].
func (m *indexMetrics) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		m.blocks, m.entries, m.prompts, m.conversations, m.live, m.memory, m.lacks, m.had, m.again, m.connected, m.lag,
		m.held, m.orphans, m.forwarded, m.batches, m.gaps, m.lost, m.restarts, m.bad, m.unusable,
	} {
		out <- d
	}
}

// Collect implements [prometheus.Collector].
func (m *indexMetrics) Collect(out chan<- prometheus.Metric) {
	for _, p := range m.state.Pools() {
		stats := p.IndexStats()
		send(out, m.blocks, prometheus.GaugeValue, float64(stats.Blocks), p.Spec.Name)
		send(out, m.entries, prometheus.GaugeValue, float64(stats.Entries), p.Spec.Name)
		send(out, m.prompts, prometheus.GaugeValue, float64(p.KnownPrompts()), p.Spec.Name)
		m.conversation(out, p)
	}
	for _, s := range m.events.Stats() {
		m.feed(out, &s)
	}
}

// conversation shows what the pool's conversations need of its engines' memory.
func (m *indexMetrics) conversation(out chan<- prometheus.Metric, p *kvstate.Pool) {
	of, pool := p.Conversations(), p.Spec.Name
	send(out, m.conversations, prometheus.GaugeValue, float64(of.Known), pool)
	send(out, m.live, prometheus.GaugeValue, of.Live, pool)
	send(out, m.memory, prometheus.GaugeValue, of.Memory, pool)
	send(out, m.lacks, prometheus.GaugeValue, of.Lacks(), pool)
	send(out, m.had, prometheus.CounterValue, of.All.Had, pool)
	send(out, m.again, prometheus.CounterValue, of.All.Evicted, pool, "evicted")
	send(out, m.again, prometheus.CounterValue, of.All.Elsewhere, pool, "elsewhere")
}

// feed shows what is counted of one publisher of KV events.
func (m *indexMetrics) feed(out chan<- prometheus.Metric, s *kvevents.Stats) {
	labels := []string{s.Pool, s.Endpoint, strconv.Itoa(s.Rank)}
	gauge := func(d *prometheus.Desc, v float64) { send(out, d, prometheus.GaugeValue, v, labels...) }
	counter := func(d *prometheus.Desc, n uint64) { send(out, d, prometheus.CounterValue, float64(n), labels...) }
	gauge(m.connected, oneIf(s.Connected))
	gauge(m.lag, s.Lag.Seconds())
	gauge(m.held, float64(s.Feed.Held))
	gauge(m.orphans, float64(s.Feed.Orphans))
	counter(m.forwarded, s.Forwarded)
	counter(m.batches, s.Batches)
	counter(m.gaps, s.Gaps)
	counter(m.lost, s.Lost)
	counter(m.restarts, s.Restarts)
	counter(m.bad, s.Malformed)
	counter(m.unusable, s.Feed.Unusable)
}

func send(
	out chan<- prometheus.Metric, d *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string,
) {
	out <- prometheus.MustNewConstMetric(d, kind, value, labels...)
}

func oneIf(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
