package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/discovery"
	"tandem/kvstate/kvevents"
	"tandem/kvstate/notices"
	"tandem/kvstate/operator"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/scrape"
	configv1 "tandem/protos/config/v1"
	"tandem/replica/config"
	"tandem/replica/config/diff"
	"tandem/replica/fleetmetrics"
	"tandem/status"
)

// fleet is the state and who keeps it up to date.
type fleet struct {
	state   *kvstate.State
	pools   *poolSources
	sources []source          // of pools that are discovered; they stay as they are until a restart
	synced  []<-chan struct{} // closed when a source that takes its time has written its pool
	config  atomic.Pointer[status.File]
	joined  chan struct{} // closed when all have, and the knowledge of the other replicas has been loaded

	discovered map[string]*configv1.Discovery
	prober     *discovery.Prober
	peers      *peerSources
	scraper    *scrape.Scraper
	store      *redisstore.Store  // nil: there is no Redis
	operator   *operator.Operator // of orders and questions that are for all replicas; nil: there is no Redis
	keys       *kvtransfer.Keys
	health     *fleetmetrics.HealthLog
	signs      bool                  // with a key file: nothing that others wrote to Redis counts
	noSlot     atomic.Bool           // envoy.replicas: redis names other replicas to Envoys, and not this one
	configured int                   // replicas that the configuration names; 0: it does not tell
	keeping    func(context.Context) // keeps the keys in step; nil: nothing does
	board      *notices.Waiters      // nil: no pool takes notices
	events     *kvevents.Collector

	keysChanged chan struct{} // the ticket keys, or those of other replicas
}

// newFleet fills the state with the configured pools. Names are resolved before it returns, where they can be.
func newFleet(
	ctx context.Context, cfg *configv1.Config, set Settings, log *slog.Logger,
) (*fleet, error) {
	health := fleetmetrics.NewHealthLog(log)
	f := &fleet{
		state: kvstate.New(kvstate.Options{HealthChanged: health.Changed, Allows: set.Engines}), health: health,
		configured: configuredReplicas(cfg), joined: make(chan struct{}), keysChanged: make(chan struct{}, 1),
		discovered: map[string]*configv1.Discovery{},
	}
	f.pools, f.peers = newPoolSources(f.state, log), newPeerSources(f.state)
	for _, p := range cfg.GetPools() {
		if p.GetDiscovery() == nil {
			continue
		}
		source, err := f.newSource(ctx, p, log)
		if err != nil {
			return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
		}
		f.sources = append(f.sources, source)
		f.discovered[p.GetName()] = p.GetDiscovery()
		f.pools.keep = append(f.pools.keep, p.GetName())
	}
	next, err := config.PoolSpecs(cfg)
	if err != nil {
		return nil, err
	}
	f.pools.set(ctx, next)
	f.config.Store(&status.File{Fingerprint: diff.Fingerprint(cfg)})
	f.prober = discovery.NewProber(f.state, log)
	if f.store, err = newStore(cfg, f.state, set.Release, log); err != nil {
		return nil, err
	}
	if f.keys, f.keeping, err = ticketKeys(ctx, cfg, f.store, log); err != nil {
		return nil, err
	}
	if f.signs = f.store != nil && cfg.GetTickets().GetKeyFile() != ""; f.signs {
		f.store.SignWith(f.keys)
	}
	owns := func(*kvstate.Pool, *kvstate.Endpoint) bool { return true }
	events := kvevents.Options{State: f.state, Log: log, Pools: config.EventSources(cfg)}
	if f.store != nil {
		owns, events.Forward = f.store.Owns, f.store
		f.operator = operator.New(f.store, f.state, log)
	}
	f.scraper = scrape.New(f.state, owns, f.prober.Check, log)
	f.events = kvevents.NewCollector(events)
	if len(f.synced) == 0 { // else no endpoints are known yet
		f.join(ctx, log)
	}
	if slices.ContainsFunc(cfg.GetPools(), config.TakesNotices) {
		f.board = notices.NewWaiters(config.Duration(cfg.GetNotices().GetKeep()), 0)
	}
	if f.store != nil {
		f.store.CompareKeys(f.keys.Fingerprints, func() {
			select {
			case f.keysChanged <- struct{}{}:
			default:
			}
		})
	}
	return f, nil
}

// watch keeps the state up to date until ctx ends.
func (f *fleet) watch(ctx context.Context, log *slog.Logger) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { guard.Keep(ctx, "discovery", func() { f.pools.run(ctx) }); return nil })
	for _, s := range f.sources {
		group.Go(func() error { guard.Keep(ctx, "discovery", func() { s.Run(ctx) }); return nil })
	}
	group.Go(func() error { guard.Keep(ctx, "probes", func() { f.prober.Run(ctx) }); return nil })
	group.Go(func() error { f.peers.run(ctx); return nil })
	group.Go(func() error { guard.Keep(ctx, "engine metrics", func() { f.scraper.Run(ctx) }); return nil })
	group.Go(func() error { f.share(ctx, log); return nil })
	if f.keeping != nil {
		group.Go(func() error { f.keeping(ctx); return nil })
	}
	if f.board != nil {
		group.Go(func() error { guard.Keep(ctx, "notices", func() { f.board.Run(ctx) }); return nil })
	}
	group.Go(func() error { return f.events.Run(ctx) })
	return group.Wait()
}

// liveSettings reads what may change while the server runs. Keys change in place.
func (f *fleet) liveSettings(cfg *configv1.Config, log *slog.Logger) (pass.Settings, error) {
	live := pass.Settings{Keys: f.keys, Pools: map[string]pass.Policy{}}
	if err := f.sameDiscovery(cfg); err != nil {
		return live, err
	}
	for i, p := range cfg.GetPools() {
		if config.TakesNotices(p) && f.board == nil {
			return live, fmt.Errorf("pools[%d].kvTransfer: lmcache with notices, which no pool took when tandem started: takes a restart", i)
		}
		policy, err := config.Policy(cfg, p, f.arrivals(), log)
		if err != nil {
			return live, fmt.Errorf("pool %s: %w", p.GetName(), err)
		}
		if policy.Peers != nil {
			policy.Peers = f.peers.known(p, policy.Peers)
		}
		live.Pools[p.GetName()] = policy
	}
	return live, nil
}

// sameDiscovery refuses another discovery of endpoints than the one tandem started with.
func (f *fleet) sameDiscovery(cfg *configv1.Config) error {
	found := 0
	for i, p := range cfg.GetPools() {
		started := f.discovered[p.GetName()]
		if !proto.Equal(started, p.GetDiscovery()) {
			return fmt.Errorf("pools[%d].discovery: is not what tandem started with: takes a restart", i)
		}
		if started != nil {
			found++
		}
	}
	if found < len(f.discovered) {
		return errors.New("pools: one whose endpoints are discovered is gone: takes a restart")
	}
	return nil
}

// keep follows what requests do not see of the configuration: the sources of peers, and of KV events.
func (f *fleet) keep(cfg *configv1.Config, policies map[string]pass.Policy) {
	f.note(func(now *status.File) { now.Fingerprint = diff.Fingerprint(cfg) })
	f.peers.set(cfg, policies)
	f.events.SetPools(config.EventSources(cfg))
}

// note changes what is shown of the configuration file. Only the reloader calls it.
func (f *fleet) note(change func(*status.File)) {
	next := *f.config.Load()
	change(&next)
	f.config.Store(&next)
}

// arrivals has the notifications that pools wait for; nil without a board.
func (f *fleet) arrivals() kvtransfer.Arrivals {
	if f.board == nil {
		return nil
	}
	return f.board
}
