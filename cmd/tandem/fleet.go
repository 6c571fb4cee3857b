package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/proto"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/discovery"
	"tandem/kvstate/kvevents"
	"tandem/kvstate/notices"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/scrape"
	"tandem/kvstate/tokenize"
	"tandem/picker"
	configv1 "tandem/protos/config/v1"
)

// fleet is the state and who keeps it up to date.
type fleet struct {
	state   *kvstate.State
	pools   *poolSources
	sources []source          // of pools that are discovered; they stay as they are until a restart
	synced  []<-chan struct{} // closed when a source that takes its time has written its pool
	joined  chan struct{}     // closed when all have, and what other replicas know was taken in

	discovered map[string]*configv1.Discovery
	prober     *discovery.Prober
	peers      *peerSources
	scraper    *scrape.Scraper
	store      *redisstore.Store // nil: there is no Redis
	keys       *kvtransfer.Keys
	health     *healthLog
	keeping    func(context.Context) // keeps the keys in step; nil: nothing does
	board      *notices.Waiters      // nil: no pool takes notices
	events     *kvevents.Collector

	keysChanged chan struct{} // the ticket keys, or those of other replicas
}

// newFleet fills the state with the configured pools. Names are resolved before it returns, where they can be.
func newFleet(ctx context.Context, config *configv1.Config, log *slog.Logger) (*fleet, error) {
	health := newHealthLog(log)
	f := &fleet{state: kvstate.New(kvstate.Options{HealthChanged: health.changed}), health: health,
		joined: make(chan struct{}), keysChanged: make(chan struct{}, 1), discovered: map[string]*configv1.Discovery{}}
	f.pools, f.peers = newPoolSources(f.state, log), newPeerSources(f.state, log)
	for _, p := range config.GetPools() {
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
	next, err := poolSpecs(config)
	if err != nil {
		return nil, err
	}
	f.pools.set(ctx, next)
	f.prober = discovery.NewProber(f.state, log)
	if f.store, err = newStore(config.GetState().GetRedis(), f.state, log); err != nil {
		return nil, err
	}
	owns := func(*kvstate.Pool, *kvstate.Endpoint) bool { return true }
	events := kvevents.Options{State: f.state, Log: log, Pools: eventSources(config)}
	if f.store != nil {
		owns, events.Forward = f.store.Owns, f.store
	}
	f.scraper = scrape.New(f.state, owns, log)
	f.events = kvevents.NewCollector(events)
	if len(f.synced) == 0 { // else no endpoints are known yet that blocks could be of
		f.join(ctx, log)
	}
	if slices.ContainsFunc(config.GetPools(), (*configv1.Pool).TakesNotices) {
		f.board = notices.NewWaiters(0, 0)
	}
	if f.keys, f.keeping, err = ticketKeys(ctx, config, f.store, log); err != nil {
		return nil, err
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

// dialect returns how the pool's engines transfer KV, the zero value if they do not.
func dialect(p *configv1.Pool, board *notices.Waiters) (kvtransfer.Dialect, error) {
	if p.GetKvTransfer() == "none" {
		return kvtransfer.Dialect{}, nil
	}
	o := p.DialectOptions()
	if p.TakesNotices() {
		o.Arrivals = board
	}
	return kvtransfer.New(o)
}

// eventSources says where the pools publish KV events.
func eventSources(config *configv1.Config) map[string]kvevents.Source {
	sources := map[string]kvevents.Source{}
	for _, p := range config.GetPools() {
		if e := p.GetKvEvents(); e != nil {
			sources[p.GetName()] = kvevents.Source{
				Port: int(e.GetPort()), ReplayPort: int(e.GetReplayPort()), Ranks: int(e.GetRanks()), Topic: e.GetTopic(), Listen: e.GetListen(),
			}
		}
	}
	return sources
}

// watch keeps the state up to date until ctx ends.
func (f *fleet) watch(ctx context.Context, log *slog.Logger) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { guard.Keep(ctx, "discovery", func() { f.pools.run(ctx) }); return nil })
	for _, s := range f.sources {
		group.Go(func() error { guard.Keep(ctx, "discovery", func() { s.Run(ctx) }); return nil })
	}
	group.Go(func() error { guard.Keep(ctx, "probes", func() { f.prober.Run(ctx) }); return nil })
	group.Go(func() error { return f.peers.run(ctx) })
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

// serverOptions turns the configuration into what the server is told.
func serverOptions(config *configv1.Config, f *fleet, log *slog.Logger) (extproc.Options, error) {
	live, err := f.liveSettings(config, log)
	if err != nil {
		return extproc.Options{}, err
	}
	f.peers.set(config, live.Pools)
	o := extproc.Options{
		State: f.state, Log: log, Settings: live, PathPrefixes: config.GetEnvoy().GetPathPrefixes(),
		SplitBodyBytes: int(config.GetEnvoy().GetMaxBodyBytes()),
		MaxBodyBytes:   int(4 * config.GetEnvoy().GetMaxBodyBytes()),
		MaxRedirects:   envoyconfigs.MaxRedirects,
		Tokenizer:      tokenize.New(log),
		Check:          f.prober.Check,
		TicketTTL:      configv1.Duration(config.GetTickets().GetTtl()),

		DecisionMetadata: config.GetExtProc().GetDecisionMetadata(), Operator: operatorToken(config.GetAdmin().GetTokenFile()),
	}
	if e := config.GetExtProc(); e.GetProtocol() == configv1.ProtocolEndpointPicker {
		o.Picker = &extproc.PickerOptions{
			Fallbacks: int(e.GetEndpointPicker().GetFallbacks()), WatchBody: e.GetEndpointPicker().GetResponses() == "body",
			ShedRequests: int(e.GetEndpointPicker().GetShedRequests()),
		}
	}
	return o, nil
}

// liveSettings reads what may change while the server runs. Keys change in place.
func (f *fleet) liveSettings(config *configv1.Config, log *slog.Logger) (extproc.Settings, error) {
	live := extproc.Settings{Keys: f.keys, Pools: map[string]extproc.Policy{}}
	if err := f.sameDiscovery(config); err != nil {
		return live, err
	}
	for i, p := range config.GetPools() {
		if p.TakesNotices() && f.board == nil {
			return live, fmt.Errorf("pools[%d].kvTransfer: lmcache with notices, which no pool took when tandem started: takes a restart", i)
		}
		policy, err := policyOf(p, f.board, log)
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
func (f *fleet) sameDiscovery(config *configv1.Config) error {
	found := 0
	for i, p := range config.GetPools() {
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

// keep follows the configuration in what requests do not see: who tells of peers, and where KV events come from.
func (f *fleet) keep(config *configv1.Config, policies map[string]extproc.Policy) {
	f.peers.set(config, policies)
	f.events.SetPools(eventSources(config))
}

// placement is how a pool's requests are placed.
func placement(p *configv1.Pool) picker.Policy {
	place := picker.DefaultPolicy()
	place.MinPrefillTokens = p.GetMinPrefillTokens()
	switch p.GetSplit() {
	case "always":
		place.Split = picker.SplitAlways
	case "never":
		place.Split = picker.SplitNever
	}
	if p.GetDecodeAlone() != "byCost" && place.Split == picker.SplitAuto {
		place.Split = picker.SplitAlways
	}
	return place
}

// sourceOf names where a pool's endpoints come from.
func sourceOf(p *configv1.Pool) string {
	d := p.GetDiscovery()
	switch {
	case d.GetFile() != nil:
		return "discovery.file " + d.GetFile().GetPath()
	case d.GetKubernetes() != nil:
		return fmt.Sprintf("discovery.kubernetes with the selector %q", d.GetKubernetes().GetSelector())
	case d.GetInferencePool() != nil:
		return "discovery.inferencePool " + d.GetInferencePool().GetName()
	case len(d.GetDns()) > 0:
		var names []string
		for _, n := range d.GetDns() {
			names = append(names, n.GetName())
		}
		return "discovery.dns " + strings.Join(names, ", ")
	}
	return "endpoints"
}

// policyOf is what the server is told of a pool.
func policyOf(p *configv1.Pool, board *notices.Waiters, log *slog.Logger) (policy extproc.Policy, err error) {
	policy = extproc.Policy{
		Policy: plan.Policy{
			Split:           p.GetSplit() != "never",
			RefuseLong:      p.GetLongPrompts() == "refuse",
			PrefillAttempts: int(p.GetPrefillAttempts()),
			AttemptsTime:    configv1.Duration(p.GetAttemptsTime()),
			StreamStart:     configv1.Duration(p.GetStreamStartTimeout()),
			WholeAnswer:     configv1.Duration(p.GetAnswerTimeout()),
			EncodeTimeout:   configv1.Duration(p.GetEncode().GetTimeout()),
			PrefillTimeout:  configv1.Duration(p.GetPrefillTimeout().GetBase()),
			PerToken:        configv1.Duration(p.GetPrefillTimeout().GetPerToken()),
			Place:           placement(p),
			Source:          sourceOf(p),
		},
		PrefillCached: p.GetCachedTokens() == "prefill",
		CleanupDecode: p.GetStrandedBlocks() == "cleanupDecode",
	}
	if e := p.GetKvEvents(); e != nil {
		policy.LearnTokens, policy.TokenBudget = true, configv1.Duration(e.GetTokenBudget())
		switch e.GetTokens() {
		case "tokenize":
			policy.Tokens = extproc.TokenizeTokens
		case "render":
			policy.Tokens = extproc.RenderTokens
		}
	}
	if policy.Paths, err = extproc.NewPaths(p.GetEngine(), p.GetPaths()); err != nil {
		return policy, fmt.Errorf("paths: %w", err)
	}
	policy.Session = extproc.SessionKey{Header: p.GetSession().GetHeader(), Cookie: p.GetSession().GetCookie(), Body: p.GetSession().GetBody()}
	setObjectives(&policy, p)
	switch p.GetOnPrefillFailure() {
	case "decodeAlone":
		policy.OnFailure = plan.DecodeAlone
	case "fail":
		policy.OnFailure = plan.Fail
	}
	switch p.GetDecodeAlone() {
	case "never":
		policy.Alone = plan.AloneNever
	case "fallback":
		policy.Alone = plan.AloneFallback
	}
	switch p.GetHandoff() {
	case "sidecar":
		policy.Handoff = plan.HandoffSidecar
	case "direct":
		policy.Handoff = plan.HandoffDirect
	}
	policy.Dialect, err = dialect(p, board)
	if c := policy.Dialect.Concurrent; c != nil {
		policy.Peers = c.Peers.NewPeers(log)
	}
	return policy, err
}

// said is what an engine says about itself, as shown.
type said struct {
	Running  int64   `json:"running"` // -1 here and below: it does not say
	Waiting  int64   `json:"waiting"`
	External int64   `json:"external"` // of those, load that did not come through Tandem
	KVUsage  float64 `json:"kv_usage"`
	KVTokens int64   `json:"kv_tokens"`
	Age      float64 `json:"age_seconds"`  // of the oldest of these
	News     float64 `json:"news_seconds"` // of the newest, which may have come with an answer
	Trust    float64 `json:"trust"`
}

func engineSaid(g *kvstate.Signals) *said {
	if g == nil {
		return nil
	}
	now := time.Now()
	return &said{g.Running, g.Waiting, g.External, g.KVUsage, g.KVTokens, g.Age(now).Seconds(), now.Sub(g.At).Seconds(), g.Trust(now)}
}

// writeState shows pools and endpoints as JSON, for people and tests.
func writeState(w http.ResponseWriter, state *kvstate.State) {
	type endpoint struct {
		Name     string `json:"name"`
		Address  string `json:"address"`
		Role     string `json:"role"`
		Group    string `json:"group,omitempty"`
		Zone     string `json:"zone,omitempty"`
		Node     string `json:"node,omitempty"`
		LoRAs    string `json:"loras,omitempty"`
		Labels   string `json:"labels,omitempty"`
		Failed   bool   `json:"failed"`
		Paused   bool   `json:"paused"`
		Draining bool   `json:"draining,omitempty"` // its pod is on its way out
		Weight   int    `json:"weight"`
		Requests int64  `json:"requests"`
		Tokens   int64  `json:"prompt_tokens"`
		Others   int64  `json:"remote_requests,omitempty"` // booked by other replicas
		Engine   *said  `json:"engine,omitempty"`

		// What KV loads it is left out of because they failed: as prefill by these decode endpoints, or this part of every pair.
		UnloadableBy []string `json:"unloadable_by,omitempty"`
		NoPairs      string   `json:"no_pairs,omitempty"`
	}
	type pool struct {
		Name      string     `json:"name"`
		Models    []string   `json:"models"`
		Blocks    int        `json:"blocks"` // in the prefix index
		Paused    bool       `json:"paused"`
		Endpoints []endpoint `json:"endpoints"`
	}
	out := struct {
		Reservations int    `json:"reservations"`
		Pools        []pool `json:"pools"`
	}{Reservations: state.Reservations()}
	for _, p := range state.Pools() {
		shown := pool{Name: p.Spec.Name, Models: state.Models(p), Paused: p.Paused(), Blocks: p.Blocks()}
		for _, e := range p.Endpoints() {
			requests, tokens := e.Load()
			others := e.RemoteLoad().Requests
			one := endpoint{
				e.Name, e.Addr, e.Role.String(), e.Group, e.Zone, e.Node, e.LoRAs, e.Labels, e.Failed(), e.Paused(), e.Draining, e.Weight(), requests, tokens, others, engineSaid(e.Signals()),
				nil, "",
			}
			if f := e.LoadFaults(); f != nil {
				if one.UnloadableBy = f.Decodes; f.Parts != 0 {
					one.NoPairs = f.Parts.String()
				}
			}
			shown.Endpoints = append(shown.Endpoints, one)
		}
		out.Pools = append(out.Pools, shown)
	}
	writeJSON(w, out)
}
