package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tandem/extproc/kvtransfer"
	"tandem/internal/config"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/redisstore/lag"
	configv1 "tandem/protos/config/v1"
	"tandem/status"
)

// joinTime is how long a replica that starts waits to hear what the others know.
const joinTime = 2 * time.Second

// connectTime is the time that it waits for the connections to publishers of KV events, before joining.
const connectTime = 500 * time.Millisecond

// feedTime is how long it waits, while it serves requests, for feeds that did not come within joinTime.
const feedTime = 10 * time.Second

// newStore connects the state with other replicas, if the configuration names a Redis; else it is nil.
func newStore(r *configv1.Redis, state *kvstate.State, log *slog.Logger) (*redisstore.Store, error) {
	if r == nil {
		return nil, nil
	}
	o := config.RedisOptions(r, log)
	if r.GetTls() != nil {
		var err error
		if o.TLS, err = redisTLS(r.GetTls()); err != nil {
			return nil, fmt.Errorf("state.redis.tls: %w", err)
		}
	}
	redisstore.LogTo(log)
	store, err := redisstore.New(o, state)
	if err != nil {
		return nil, fmt.Errorf("state.redis: %w", err)
	}
	state.Connect(store)
	return store, nil
}

// join waits until this replica knows what the others know, but not for long: without Redis it starts all the same.
func (f *fleet) join(ctx context.Context, log *slog.Logger) {
	if f.store == nil {
		return
	}
	f.store.Follow(f.events)
	f.events.Look(ctx)
	connecting, cancel := context.WithTimeout(ctx, connectTime)
	f.events.AwaitConnected(connecting) // so that what is published after the feeds that others write is received
	cancel()
	began := time.Now()
	if err := f.store.Join(ctx, joinTime); err != nil {
		log.Warn("starting without redis", "err", err)
	}
	if err := f.operator.Sync(ctx); err != nil {
		log.Warn("starting without the orders of other replicas", "err", err)
	}
	late := time.Duration(0)
	if time.Since(began) >= joinTime {
		late = feedTime
	}
	f.events.Joined(late)
}

// replicaName is what people know this replica by: its host (a pod's name) and the port that operators use.
func replicaName(cfg *configv1.Config) string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	_, port, _ := net.SplitHostPort(cfg.GetAdmin().GetListen())
	return net.JoinHostPort(host, port)
}

// configuredReplicas returns how many replicas envoy.extProcs names; 0 if there may be more: behind a name, in Redis.
func configuredReplicas(cfg *configv1.Config) int {
	if replicasFromRedis(cfg) {
		return 0
	}
	all := cfg.GetEnvoy().GetExtProcs()
	for _, addr := range all {
		if host, _, err := net.SplitHostPort(addr); err != nil || net.ParseIP(host) == nil {
			return 0
		}
	}
	return len(all)
}

// keepReady says that requests are welcome, unless this replica's ticket keys differ from those of the others and it is the one to
// yield: what one replica seals the other could not open, and every request that comes by both would fail.
func (f *fleet) keepReady(ctx context.Context, set func(ready bool), log *slog.Logger) {
	select {
	case <-f.joined:
	case <-ctx.Done():
		return
	}
	differ := 0
	for ctx.Err() == nil {
		check := f.keyCheck()
		if n := len(check.Differ); n > differ {
			log.Error("ticket keys differ from those of other replicas: requests that come by both fail", "replicas", n, "takes_requests", !check.Yields)
		} else if n == 0 && differ > 0 {
			log.Info("ticket keys are those of all replicas again")
		}
		differ = len(check.Differ)
		set(!check.Yields)
		select {
		case <-ctx.Done():
		case <-f.keysChanged:
		}
	}
}

// sharing is how this replica stands with the others.
func (f *fleet) sharing() status.Sharing {
	if f.store == nil {
		return status.Sharing{Replicas: f.configured, Configured: f.configured}
	}
	_, up := f.store.Status()
	return status.Sharing{
		Redis: true, Up: up, Replicas: f.store.Replicas(), Configured: f.configured,
		KeysDiffer: len(f.store.KeyCheck().Differ), NoSlot: f.noSlot.Load(),
	}
}

// keyCheck compares the ticket keys with those of the other replicas; without Redis there is nobody to compare with.
func (f *fleet) keyCheck() redisstore.KeyCheck {
	if f.store == nil {
		return redisstore.KeyCheck{}
	}
	return f.store.KeyCheck()
}

// share joins the other replicas once the endpoints are known, if that is still to be done, and keeps in step with them until ctx
// ends.
func (f *fleet) share(ctx context.Context, log *slog.Logger) {
	if !f.waitSynced(ctx) {
		return
	}
	if len(f.synced) > 0 {
		f.join(ctx, log)
	}
	close(f.joined)
	if f.store != nil {
		var running sync.WaitGroup
		running.Go(func() { f.operator.Run(ctx) })
		guard.Keep(ctx, "Redis", func() { f.store.Run(ctx) })
		running.Wait()
	}
}

func redisTLS(t *configv1.RedisTls) (*tls.Config, error) {
	c := &tls.Config{MinVersion: tls.VersionTLS12, ServerName: t.GetServerName()}
	if file := t.GetCaFile(); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("caFile: no certificate in it")
		}
	}
	if t.GetCertFile() != "" {
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { // for every new connection: files change
			pair, err := tls.LoadX509KeyPair(t.GetCertFile(), t.GetKeyFile())
			return &pair, err
		}
		if _, err := c.GetClientCertificate(nil); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// ticketKeys are the keys of tickets: from a file, or made here. What keeps them in step with those of other replicas is run,
// which is nil where nothing does.
func ticketKeys(ctx context.Context, cfg *configv1.Config, store *redisstore.Store, log *slog.Logger) (keys *kvtransfer.Keys, run func(context.Context), err error) {
	if file := cfg.GetTickets().GetKeyFile(); file != "" {
		keys, warnings, err := kvtransfer.ReadKeyFile(file)
		for _, w := range warnings {
			log.Warn(w)
		}
		return keys, nil, err
	}
	keys, err = kvtransfer.GenerateKeys()
	if err != nil || store == nil {
		return keys, nil, err
	}
	secrets, err := store.Secrets(ctx, keys.Change)
	if err != nil {
		return nil, nil, fmt.Errorf("the keys of tickets: %w", err)
	}
	return keys, secrets.Run, nil
}

// registerStore shows what passes between this replica and Redis, and whether it has no slot among the replicas.
func registerStore(r prometheus.Registerer, store *redisstore.Store, noSlot *atomic.Bool) {
	gauge := func(name, help string, value func() float64) {
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, value))
	}
	gauge("tandem_redis_up", "Whether Redis accepted this replica's last write (1) or not (0).", func() float64 {
		_, up := store.Status()
		return oneIf(up)
	})
	gauge("tandem_replica_without_slot", "Whether Envoys have so many replicas that they skip this one (1).",
		func() float64 { return oneIf(noSlot.Load()) })
	gauge("tandem_ticket_keys_differ", "Other replicas whose ticket keys differ from this one's: requests that both serve fail.",
		func() float64 { return float64(len(store.KeyCheck().Differ)) })
	gauge("tandem_replicas", "Replicas known to be alive, this one included.", func() float64 { return float64(store.Replicas()) })
	r.MustRegister(lagCollector{store, prometheus.NewDesc("tandem_redis_lag_seconds", "Time until a prompt that another replica routed was known here.", nil, nil)})
	for _, c := range storeCounters() {
		r.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Name: c.name, Help: c.help}, func() float64 { return float64(c.value(store.Stats())) }))
	}
}

// storeCounter is a counter of redisstore's.
type storeCounter struct {
	name, help string
	value      func(redisstore.Stats) int64
}

func storeCounters() []storeCounter {
	return []storeCounter{
		{"tandem_redis_commands_total", "Commands sent to Redis.", func(s redisstore.Stats) int64 { return s.Commands }},
		{"tandem_redis_errors_total", "Of the commands, those that failed or came too late.", func(s redisstore.Stats) int64 { return s.Errors }},
		{"tandem_redis_sent_bytes_total", "Bytes sent to Redis.", func(s redisstore.Stats) int64 { return s.BytesSent }},
		{"tandem_redis_received_bytes_total", "Bytes received from Redis.", func(s redisstore.Stats) int64 { return s.BytesRead }},
		{"tandem_redis_batches_sent_total", "Batches published to other replicas.", func(s redisstore.Stats) int64 { return s.BatchesSent }},
		{"tandem_redis_batches_received_total", "Batches received from other replicas.", func(s redisstore.Stats) int64 { return s.BatchesRead }},
		{"tandem_redis_gaps_total", "Times that batches of another replica were missed, so that a snapshot was requested.", func(s redisstore.Stats) int64 { return s.Gaps }},
		{"tandem_redis_kv_events_dropped_total", "Batches of KV events that were not forwarded to the other replicas.", func(s redisstore.Stats) int64 { return s.EventsDropped }},
		{"tandem_redis_notices_dropped_total", "LMCache's notices that were not published: Redis did not take them, or too many waited.", func(s redisstore.Stats) int64 { return s.NoticesDropped }},
		{"tandem_redis_dropped_total", "Routed prompts dropped while Redis did not answer; a snapshot publishes them later.", func(s redisstore.Stats) int64 { return s.Dropped }},
		{"tandem_redis_unknown_endpoints_total", "Endpoints in other replicas' batches that this replica does not have, each time.", func(s redisstore.Stats) int64 { return s.Unknown }},
		{"tandem_redis_snapshots_total", "Snapshots and feeds of KV events written for other replicas.", func(s redisstore.Stats) int64 { return s.Snapshots }},
		{"tandem_tickets_consumed_locally_total", "Tickets consumed in this replica's own memory: Redis did not answer in time, or had just failed to.",
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
