package replica

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/redisstore"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/status"
)

// joinTime is how long a replica that starts waits for the knowledge of the others.
const joinTime = 2 * time.Second

// connectTime is the time that it waits for the connections to publishers of KV events, before joining.
const connectTime = 500 * time.Millisecond

// feedTime is how long it waits, while it serves requests, for feeds that did not come within joinTime.
const feedTime = 10 * time.Second

// newStore connects the state with other replicas, if the configuration names a Redis; else it is nil.
func newStore(
	cfg *configv1.Config, state *kvstate.State, release string, log *slog.Logger,
) (*redisstore.Store, error) {
	r := cfg.GetState().GetRedis()
	if r == nil {
		return nil, nil
	}
	o := config.RedisOptions(r, log)
	o.Name, o.Release = replicaName(cfg), release
	var err error
	if o.TLS, err = config.RedisTLS(r.GetTls()); err != nil {
		return nil, err
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
	if config.ReplicasFromRedis(cfg) {
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

// keepReady keeps the replica ready, unless this replica's ticket keys differ from those of the others and it is the
// one to yield: what one replica seals the other could not open, and every request that comes by both would fail.
func (f *fleet) keepReady(ctx context.Context, set func(ready bool), log *slog.Logger) {
	select {
	case <-f.joined:
	case <-ctx.Done():
		return
	}
	// engines share no requests before they have reported what they are
	for f.state.AwaitsReports() && ctx.Err() == nil {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
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

// sharing returns the state of this replica's connection to the others.
func (f *fleet) sharing() status.Sharing {
	if f.store == nil {
		return status.Sharing{Replicas: f.configured, Configured: f.configured}
	}
	text, up := f.store.Status()
	return status.Sharing{
		Redis: true, Up: up, Replicas: f.store.Replicas(), Configured: f.configured,
		KeysDiffer: len(f.store.KeyCheck().Differ), NoSlot: f.noSlot.Load(), ClockAhead: f.state.Clock.Ahead(),
		Text: text, Refused: f.store.Refused(),
	}
}

// keyCheck compares the ticket keys with those of the other replicas; without Redis there is nobody to compare with.
func (f *fleet) keyCheck() redisstore.KeyCheck {
	if f.store == nil {
		return redisstore.KeyCheck{}
	}
	return f.store.KeyCheck()
}

// share joins the other replicas once the endpoints are known, if that is still to be done, and keeps in step with them
// until ctx ends.
func (f *fleet) share(ctx context.Context, log *slog.Logger) {
	if !f.waitSynced(ctx) {
		return
	}
	if len(f.synced) > 0 {
		f.join(ctx, log)
	}
	if f.store == nil {
		close(f.joined)
		return
	}
	var running sync.WaitGroup
	close(f.joined)
	running.Go(func() { f.operator.Run(ctx) })
	guard.Keep(ctx, "Redis", func() { f.store.Run(ctx) })
	running.Wait()
}

// ticketKeys are the keys of tickets: from a file, or made here. run keeps them in step with those of other replicas;
// it is nil if nothing does.
func ticketKeys(
	ctx context.Context, cfg *configv1.Config, store *redisstore.Store, log *slog.Logger,
) (keys *kvtransfer.Keys, run func(context.Context), err error) {
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
