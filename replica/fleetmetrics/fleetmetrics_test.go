package fleetmetrics

import (
	"log/slog"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"

	"tandem/kvstate"
	"tandem/kvstate/kvevents"
	"tandem/kvstate/notices"
	"tandem/kvstate/prefixindex"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/lag"
	"tandem/kvstate/scrape"
	"tandem/picker/roles"
)

// values are the series that a collector shows: name and label values, in the order of the labels' names.
func values(t *testing.T, c prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := c.Gather()
	require.NoError(t, err)
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			out[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return out
}

// collecting shows what f sends.
func collecting(f func(chan<- prometheus.Metric)) prometheus.Gatherer {
	r := prometheus.NewRegistry()
	r.MustRegister(collectFunc(f))
	return r
}

type collectFunc func(chan<- prometheus.Metric)

func (collectFunc) Describe(chan<- *prometheus.Desc)       {}
func (f collectFunc) Collect(out chan<- prometheus.Metric) { f(out) }

// What engines say is shown as they say it, and what they do not say is not: each by its own name, as old as it is.
func TestWhatEnginesSayIsShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state := kvstate.New(kvstate.Options{})
		state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "p", Role: kvstate.RolePrefill}, {Addr: "d", Role: kvstate.RoleDecode}, {Addr: "x", Role: kvstate.RoleDecode}})
		p, d := state.Pool("chat").Endpoint("p"), state.Pool("chat").Endpoint("d")
		state.Bookings.Reserve(d, kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 100})
		for i := range 2 { // two looks
			time.Sleep(2 * time.Second)
			state.Observe(d, kvstate.Signals{Running: 5, Waiting: 2 + int64(i), KVUsage: .25, KVTokens: 1000, At: time.Now()})
		}
		time.Sleep(3 * time.Second)
		state.Observe(p, kvstate.Signals{Running: -1, Waiting: 4, KVUsage: .5, KVTokens: -1, At: time.Now()})
		time.Sleep(time.Second)
		signals := Signals(state, scrape.New(state, nil, nil, slog.New(slog.DiscardHandler)))
		show := func() map[string]float64 { return values(t, collecting(signals.Collect)) }
		want := map[string]float64{
			"tandem_scrapes_total ok": 0, "tandem_scrapes_total failed": 0,
			"tandem_engine_running d chat": 5, "tandem_engine_waiting d chat": 3, "tandem_engine_kv_usage d chat": .25,
			"tandem_engine_requests_external d chat": 6, "tandem_engine_signals_age_seconds d chat": 4,
			"tandem_engine_waiting p chat": 4, "tandem_engine_kv_usage p chat": .5, "tandem_engine_signals_age_seconds p chat": 1,
		}
		require.Equal(t, want, show())

		// An answer's header is news of two figures; the others are as old as they were.
		state.Observe(d, kvstate.Signals{Running: -1, Waiting: 9, KVUsage: .75, KVTokens: -1, At: time.Now()})
		want["tandem_engine_waiting d chat"], want["tandem_engine_kv_usage d chat"] = 9, .75
		require.Equal(t, want, show())
	})
}

// What engines have written is shown as counters.
func TestOutputIsShown(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "d", Role: kvstate.RoleDecode}})
	written := kvstate.AnswerCounters{Answers: 2, Tokens: 30, Gaps: 40, GapTime: 500 * time.Millisecond, Generated: 42}
	state.Observe(state.Pool("chat").Endpoint("d"), kvstate.Signals{Running: 1, Answers: written, At: time.Now()})
	got := collecting(Signals(state, scrape.New(state, nil, nil, slog.New(slog.DiscardHandler))).Collect)
	require.InDelta(t, 42, values(t, got)["tandem_engine_output_tokens_total d chat"], 0)
	families, err := got.Gather()
	require.NoError(t, err)
	i := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "tandem_engine_inter_token_seconds" })
	require.NotEqual(t, -1, i)
	summary := families[i].GetMetric()[0].GetSummary()
	require.EqualValues(t, 40, summary.GetSampleCount())
	require.InDelta(t, .5, summary.GetSampleSum(), 1e-9)
}

// What is learned of transfers is shown in the units that the names say.
func TestTransfersAreShown(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "d", Role: kvstate.RoleDecode}})
	pool := state.Pool("chat")
	d, at, moved := pool.Endpoint("d"), time.Now().Add(-50*time.Second), kvstate.TransferCounters{Transfers: 1, Bytes: 400e6, Tokens: 4000, Time: 26 * time.Millisecond}
	for n := range int64(40) {
		all := kvstate.TransferCounters{Transfers: 10 * n, Bytes: 10 * n * moved.Bytes, Tokens: 10 * n * moved.Tokens, Time: time.Duration(10*n) * moved.Time}
		state.Observe(d, kvstate.Signals{Running: 0, Waiting: 0, KVUsage: 0, KVTokens: -1, Transfers: all, At: at.Add(time.Duration(n) * time.Second)})
	}
	signals := Signals(state, scrape.New(state, nil, nil, slog.New(slog.DiscardHandler)))
	got := values(t, collecting(signals.Collect))
	require.InDelta(t, 100_000, got["tandem_kv_bytes_per_token chat"], 1000)
	require.InEpsilon(t, 25e9, got["tandem_engine_transfer_bytes_per_second d chat"], .2, "10 ms of the 26 are the start of each")
}

// Each figure of a publisher of KV events is shown by its own name.
func TestEachFigureOfKVEventsIsShown(t *testing.T) {
	m := newIndexMetrics(kvstate.New(kvstate.Options{}), nil)
	s := kvevents.Stats{
		Pool: "chat", Endpoint: "e", Rank: 3, Connected: true, Lag: 1500 * time.Millisecond, Batches: 11, Events: 12, Malformed: 13, Gaps: 14,
		Recovered: 15, Lost: 16, Restarts: 17, Forwarded: 18, Feed: prefixindex.FeedStats{Stored: 20, Removed: 21, Clears: 22, Unusable: 23, Held: 24, Orphans: 25},
	}
	require.Equal(t, map[string]float64{
		"tandem_kv_events_connected e chat 3": 1, "tandem_kv_events_lag_seconds e chat 3": 1.5,
		"tandem_kv_events_batches_total e chat 3": 11, "tandem_kv_events_malformed_total e chat 3": 13, "tandem_kv_events_gaps_total e chat 3": 14,
		"tandem_kv_events_lost_total e chat 3": 16, "tandem_kv_events_restarts_total e chat 3": 17, "tandem_kv_events_forwarded_total e chat 3": 18,
		"tandem_kv_events_unusable_total e chat 3": 23, "tandem_kv_events_blocks e chat 3": 24, "tandem_kv_events_orphan_blocks e chat 3": 25,
	}, values(t, collecting(func(out chan<- prometheus.Metric) { m.feed(out, &s) })))
	s.Connected = false
	got := values(t, collecting(func(out chan<- prometheus.Metric) { m.feed(out, &s) }))
	require.Zero(t, got["tandem_kv_events_connected e chat 3"])
}

// Blocks are counted once, and once for each endpoint that holds them.
func TestTheIndexIsShown(t *testing.T) {
	state := kvstate.New(kvstate.Options{})
	state.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "p", Role: kvstate.RolePrefill}, {Addr: "d", Role: kvstate.RoleDecode}})
	pool := state.Pool("chat")
	state.Routed(pool, pool.Endpoint("p"), []uint64{1, 2, 3})
	state.Routed(pool, pool.Endpoint("d"), []uint64{1, 2})
	m := Index(state, kvevents.NewCollector(kvevents.Options{State: state, Log: slog.New(slog.DiscardHandler)}))
	require.Equal(t, map[string]float64{"tandem_index_blocks chat": 3, "tandem_index_entries chat": 5, "tandem_index_prompts chat": 0,
		"tandem_conversations chat": 0, "tandem_conversation_tokens chat": 0, "tandem_conversation_prompt_tokens_total chat": 0,
		"tandem_kv_memory_tokens chat": 0, "tandem_host_memory_needed_tokens chat": 0,
		"tandem_recomputed_tokens_total evicted chat": 0, "tandem_recomputed_tokens_total elsewhere chat": 0},
		values(t, collecting(m.Collect)))
}

// Each figure of what passes between this replica and Redis is shown by its own name.
func TestEachFigureOfRedisIsShown(t *testing.T) {
	s := redisstore.Stats{
		Commands: 1, BytesSent: 2, BytesRead: 3, BatchesSent: 4, BatchesRead: 5, Errors: 6, Dropped: 7, EventsDropped: 8, Gaps: 9, Unknown: 10, Snapshots: 11, SpendUnknown: 12, NoticesDropped: 13, Forged: 14,
	}
	got := map[string]int64{}
	for _, c := range storeCounters() {
		got[c.name] = c.value(s)
	}
	require.Equal(t, map[string]int64{
		"tandem_redis_commands_total": 1, "tandem_redis_sent_bytes_total": 2, "tandem_redis_received_bytes_total": 3, "tandem_redis_batches_sent_total": 4,
		"tandem_redis_batches_received_total": 5, "tandem_redis_errors_total": 6, "tandem_redis_dropped_total": 7, "tandem_redis_kv_events_dropped_total": 8,
		"tandem_redis_gaps_total": 9, "tandem_redis_unknown_endpoints_total": 10, "tandem_redis_snapshots_total": 11, "tandem_tickets_consumed_locally_total": 12,
		"tandem_redis_notices_dropped_total": 13, "tandem_redis_forged_total": 14,
	}, got)

	late := lag.Lag{Count: 7, Seconds: 12.5}
	for i := range late.Buckets { // each counts those below it
		late.Buckets[i] = uint64(min(i, 6))
	}
	var m dto.Metric
	require.NoError(t, lagHistogram(prometheus.NewDesc("lag", "help", nil, nil), late).Write(&m))
	require.Equal(t, uint64(7), m.GetHistogram().GetSampleCount())
	require.InDelta(t, 12.5, m.GetHistogram().GetSampleSum(), 0)
	for i, b := range m.GetHistogram().GetBucket() {
		require.Equal(t, uint64(min(i, 6)), b.GetCumulativeCount())
		require.InDelta(t, lag.Bucket(i).Seconds(), b.GetUpperBound(), 0)
	}
}

// Each figure of LMCache's notices is shown by its own name.
func TestEachFigureOfNoticesIsShown(t *testing.T) {
	got := map[string]uint64{}
	for _, c := range noticeCounters() {
		got[c.name+" "+c.result] = c.count(notices.Counts{Received: 1, Forwarded: 2, Ignored: 3, Unwanted: 4, First: 5, Woken: 6, Missed: 7})
	}
	require.Equal(t, map[string]uint64{
		"tandem_kv_notices_total taken": 1, "tandem_kv_notices_total forwarded": 2, "tandem_kv_notices_total ignored": 3, "tandem_kv_notices_total unwanted": 4,
		"tandem_kv_notice_waits_total there": 5, "tandem_kv_notice_waits_total woken": 6, "tandem_kv_notice_waits_total missed": 7,
	}, got)
	board := notices.NewWaiters(0, 0)
	r := prometheus.NewRegistry()
	RegisterNotices(r, board)
	board.ArrivedAtReplica("a")
	board.ArrivedAtReplica("b")
	shown := values(t, r)
	require.InDelta(t, 2, shown["tandem_kv_notices_held"], 0)
	require.Equal(t, []string{"tandem_kv_notices_held", "tandem_kv_notices_total forwarded"}, slices.Sorted(maps.Keys(positive(shown))))
}

func positive(of map[string]float64) map[string]float64 {
	out := maps.Clone(of)
	maps.DeleteFunc(out, func(_ string, v float64) bool { return v == 0 })
	return out
}

// What pools want and the words of their endpoints are gauges.
func TestWords(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(Words(func() map[string]roles.Advice {
		return map[string]roles.Advice{"chat": {
			WantedPrefill: 3, WantedDecode: 2, Words: map[string]roles.Word{"10.0.0.1:80": {Word: "decode"}},
		}}
	}))
	families, err := registry.Gather()
	require.NoError(t, err)
	require.Len(t, families, 2)
	require.Equal(t, "tandem_endpoint_word", families[0].GetName())
	wanted := families[1].GetMetric()
	require.Len(t, wanted, 2)
	require.InDelta(t, 2, wanted[0].GetGauge().GetValue(), 0, "decode")
	require.InDelta(t, 3, wanted[1].GetGauge().GetValue(), 0, "prefill")
}
