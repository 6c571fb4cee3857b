package fleetmetrics

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/lag"
)

// RegisterRedis shows the traffic between this replica and Redis, and whether it has no slot among the replicas.
func RegisterRedis(r prometheus.Registerer, store *redisstore.Store, state *kvstate.State, noSlot *atomic.Bool) {
	gauge := func(name, help string, value func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("tandem_redis_up", "Whether Redis accepted this replica's last write (1) or not (0).", func() float64 {
		_, up := store.Status()
		return oneIf(up)
	})
	gauge("tandem_replica_without_slot", "Whether Envoys have so many replicas that they skip this one (1).",
		func() float64 { return oneIf(noSlot.Load()) })
	gauge("tandem_ticket_keys_differ",
		"Other replicas whose ticket keys differ from this one's: requests that both serve fail.",
		func() float64 { return float64(len(store.KeyCheck().Differ)) })
	gauge("tandem_clock_ahead_seconds", "By how much this host's clock is ahead of Redis's, whose time replicas share.",
		func() float64 { return state.Clock.Ahead().Seconds() })
	gauge("tandem_replicas",
		"Replicas known to be alive, this one included.", func() float64 { return float64(store.Replicas()) })
	r.MustRegister(lagCollector{store, prometheus.NewDesc("tandem_redis_lag_seconds",
		"Time until a prompt that another replica routed was known here.", nil, nil)})
	for _, c := range storeCounters() {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: c.name, Help: c.help},
			func() float64 { return float64(c.value(store.Stats())) }))
	}
}

// storeCounter is a counter of redisstore's.
type storeCounter struct {
	name, help string
	value      func(redisstore.Stats) int64
}

func storeCounters() []storeCounter {
	return []storeCounter{
		{"tandem_redis_commands_total",
			"Commands sent to Redis.",
			func(s redisstore.Stats) int64 { return s.Commands }},
		{"tandem_redis_errors_total",
			"Of the commands, those that failed or came too late.",
			func(s redisstore.Stats) int64 { return s.Errors }},
		{"tandem_redis_sent_bytes_total",
			"Bytes sent to Redis.",
			func(s redisstore.Stats) int64 { return s.BytesSent }},
		{"tandem_redis_received_bytes_total",
			"Bytes received from Redis.",
			func(s redisstore.Stats) int64 { return s.BytesRead }},
		{"tandem_redis_batches_sent_total",
			"Batches published to other replicas.",
			func(s redisstore.Stats) int64 { return s.BatchesSent }},
		{"tandem_redis_batches_received_total",
			"Batches received from other replicas.",
			func(s redisstore.Stats) int64 { return s.BatchesRead }},
		{"tandem_redis_gaps_total",
			"Times that batches of another replica were missed, so that a snapshot was requested.",
			func(s redisstore.Stats) int64 { return s.Gaps }},
		{"tandem_redis_kv_events_dropped_total",
			"Batches of KV events that were not forwarded to the other replicas.",
			func(s redisstore.Stats) int64 { return s.EventsDropped }},
		{"tandem_redis_notices_dropped_total",
			"LMCache's notices that were not published: Redis did not take them, or too many waited.",
			func(s redisstore.Stats) int64 { return s.NoticesDropped }},
		{"tandem_redis_dropped_total",
			"Routed prompts dropped while Redis did not answer; a snapshot publishes them later.",
			func(s redisstore.Stats) int64 { return s.Dropped }},
		{"tandem_redis_unknown_endpoints_total",
			"Times that another replica's batch named an endpoint that this replica does not have.",
			func(s redisstore.Stats) int64 { return s.Unknown }},
		{"tandem_redis_forged_total",
			"Texts in Redis that were not used, because they are not signed with this replica's keys " +
				"(tickets.keyFile).",
			func(s redisstore.Stats) int64 { return s.Forged }},
		{"tandem_redis_snapshots_total",
			"Snapshots and feeds of KV events written for other replicas.",
			func(s redisstore.Stats) int64 { return s.Snapshots }},
		{"tandem_tickets_consumed_locally_total",
			"Tickets consumed in this replica's own memory: Redis did not answer in time, or had just failed to.",
			func(s redisstore.Stats) int64 { return s.SpendUnknown }},
	}
}

// lagCollector shows redisstore's histogram, which counts without knowing of Prometheus.
type lagCollector struct {
	store *redisstore.Store
	desc  *prometheus.Desc
}

func (c lagCollector) Describe(to chan<- *prometheus.Desc) { to <- c.desc }

func (c lagCollector) Collect(to chan<- prometheus.Metric) {
	to <- lagHistogram(c.desc, c.store.Stats().Lag)
}

func lagHistogram(desc *prometheus.Desc, l lag.Lag) prometheus.Metric {
	buckets := make(map[float64]uint64, len(l.Buckets))
	for i, n := range l.Buckets {
		buckets[lag.Bucket(i).Seconds()] = n
	}
	return prometheus.MustNewConstHistogram(desc, l.Count, l.Seconds, buckets)
}
