package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc"
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/discovery"
	"tandem/kvstate/heartbeats"
	"tandem/kvstate/kvevents"
	"tandem/kvstate/notices"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/scrape"
	"tandem/kvstate/tokenize"
	configv1 "tandem/protos/config/v1"
)

// fleet is the state and who keeps it up to date.
type fleet struct {
	state   *kvstate.State
	sources []*discovery.Static
	prober  *discovery.Prober
	peers   map[string]*kvtransfer.Peers // by pool, of dialects that need to know who engines are
	config  *configv1.Config
	log     *slog.Logger
	scraper *scrape.Scraper
	store   *redisstore.Store // nil: there is no Redis
	keys    *kvtransfer.Keys
	keeping func(context.Context) // keeps the keys in step; nil: nothing does
	board   *notices.Board        // nil: no pool takes notices
	events  *kvevents.Collector
}

// newFleet fills the state with the configured pools. Names are resolved before it returns, where they can be.
func newFleet(ctx context.Context, config *configv1.Config, log *slog.Logger) (*fleet, error) {
	f := &fleet{state: kvstate.New(kvstate.Options{}), peers: map[string]*kvtransfer.Peers{}, config: config, log: log}
	for _, p := range config.GetPools() {
		spec := kvstate.PoolSpec{Name: p.GetName(), Models: p.GetModels()}
		var eps []kvstate.EndpointSpec
		for _, e := range p.GetEndpoints() {
			role, err := kvstate.ParseRole(e.GetRole())
			if err != nil {
				return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
			}
			eps = append(eps, kvstate.EndpointSpec{
				Name: e.GetAddress(), Scheme: e.GetScheme(), Role: role, Group: p.PairsAs(e), Transfer: transferOf(e),
				EventsPort: int(e.GetKvEventsPort()), ReplayPort: int(e.GetKvReplayPort()),
			})
		}
		source := discovery.NewStatic(f.state, spec, eps, log)
		source.Resolve(ctx)
		f.sources = append(f.sources, source)
	}
	f.prober = discovery.NewProber(f.state, log)
	var err error
	if f.store, err = newStore(ctx, config.GetState().GetRedis(), f.state, log); err != nil {
		return nil, err
	}
	owns := func(*kvstate.Pool, *kvstate.Endpoint) bool { return true }
	if f.store != nil {
		owns = f.store.Owns
	}
	f.scraper = scrape.New(f.state, owns, log)
	f.events = kvevents.NewCollector(kvevents.Options{State: f.state, Log: log, Pools: eventSources(config), Owns: owns})
	if slices.ContainsFunc(config.GetPools(), (*configv1.Pool).TakesNotices) {
		f.board = notices.NewBoard(0, 0)
	}
	f.keys, f.keeping, err = ticketKeys(ctx, config, f.store, log)
	return f, err
}

// registered listens for engines that say by themselves where their KV sockets are.
func registered(peers *kvtransfer.Peers, log *slog.Logger) *heartbeats.Listener {
	return heartbeats.New(func(b heartbeats.Beat) {
		peers.Learn(b.HTTP, kvtransfer.Peer{Ranks: []kvtransfer.Rank{{Host: b.ZMQ.Addr().String(), Port: int(b.ZMQ.Port())}}})
	}, peers.Forget, log)
}

// decodeSizes are the tensor- and data-parallel sizes of a pool's decode engines, which are all the same.
func decodeSizes(p *configv1.Pool) (tp, dp int) {
	for _, e := range p.GetEndpoints() {
		if t := e.GetTransfer(); e.GetRole() != "prefill" {
			tp, dp = max(tp, int(t.GetTensorParallelSize())), max(dp, int(t.GetDataParallelSize()))
		}
	}
	return tp, dp
}

// transferOf is what is configured of an endpoint's side of KV transfer.
func transferOf(e *configv1.Endpoint) kvstate.Transfer {
	port := func(n int32) uint16 { return uint16(n) } //nolint:gosec // validated
	t, r := e.GetTransfer(), e.GetLmcache()
	return kvstate.Transfer{
		Host: t.GetHost(), Release: e.GetRelease(), TP: int(t.GetTensorParallelSize()), DP: int(t.GetDataParallelSize()),
		BootstrapPort: port(t.GetBootstrapPort()), KVPort: port(t.GetKvPort()),
		HandshakePort: port(t.GetHandshakePort()), NotifyPort: port(t.GetNotifyPort()), P2PPort: int(t.GetP2PPort()),
		LMCacheInitPort: int(r.GetInitPort()), LMCacheAllocPort: int(r.GetAllocPort()), LMCacheQueryPort: int(r.GetQueryPort()),
		BufferTokens: r.GetBufferTokens(),
	}
}

// dialect is what the pool's engines speak; nil if they do both by themselves.
func dialect(p *configv1.Pool, board *notices.Board) (kvtransfer.Dialect, error) {
	if p.GetKvTransfer() == "none" {
		return nil, nil //nolint:nilnil // Policy.Dialect says what nil means
	}
	o := kvtransfer.Options{
		Name: p.GetKvTransfer(), Members: p.GetMembers(), ReuseTokenIDs: p.GetNixl().GetReuseTokenIds(),
		Key: p.GetOrchestrated().GetKey(), Params: p.GetOrchestrated().GetHandOver() == "params",
		NoticeTimeout: configv1.Duration(p.GetLmcache().GetNoticeTimeout()),
	}
	if p.TakesNotices() {
		o.Arrivals = board
	}
	d, err := kvtransfer.New(o)
	if err != nil {
		return nil, err
	}
	return d, nil
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
func (f *fleet) watch(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range f.sources {
		group.Go(func() error { s.Run(ctx); return nil })
	}
	group.Go(func() error { f.prober.Run(ctx); return nil })
	for pool, peers := range f.peers {
		group.Go(func() error { peers.Run(ctx, f.state, pool); return nil })
	}
	for _, p := range f.config.GetPools() {
		if addr, peers := p.GetRegistration().GetListen(), f.peers[p.GetName()]; addr != "" && peers != nil {
			group.Go(func() error { return registered(peers, f.log).Run(ctx, addr) })
		}
	}
	group.Go(func() error { f.scraper.Run(ctx); return nil })
	if f.store != nil {
		group.Go(func() error { f.store.Run(ctx); return nil })
	}
	if f.keeping != nil {
		group.Go(func() error { f.keeping(ctx); return nil })
	}
	if f.board != nil {
		group.Go(func() error { f.board.Run(ctx); return nil })
	}
	group.Go(func() error { return f.events.Run(ctx) })
	return group.Wait()
}

// serverOptions turns the configuration into what the server is told.
func serverOptions(config *configv1.Config, f *fleet, log *slog.Logger) (extproc.Options, error) {
	o := extproc.Options{
		State: f.state, Keys: f.keys, Log: log, Pools: map[string]extproc.Policy{},
		SplitBodyBytes: int(config.GetEnvoy().GetMaxBodyBytes()),
		MaxBodyBytes:   int(4 * config.GetEnvoy().GetMaxBodyBytes()),
		MaxRedirects:   envoyconfigs.MaxRedirects,
		Tokenizer:      tokenize.New(log),
		TicketTTL:      configv1.Duration(config.GetTickets().GetTtl()),
	}
	for _, p := range config.GetPools() {
		policy, err := policyOf(p, f.board, log)
		if err != nil {
			return o, fmt.Errorf("pool %s: %w", p.GetName(), err)
		}
		if policy.Peers != nil {
			f.peers[p.GetName()] = policy.Peers
		}
		o.Pools[p.GetName()] = policy
	}
	return o, nil
}

// policyOf is what the server is told of a pool.
func policyOf(p *configv1.Pool, board *notices.Board, log *slog.Logger) (policy extproc.Policy, err error) {
	policy = extproc.Policy{
		Split:           p.GetSplit() != "never",
		RefuseLong:      p.GetLongPrompts() == "refuse",
		PrefillAttempts: int(p.GetPrefillAttempts()),
		CleanupDecode:   p.GetStrandedBlocks() == "cleanupDecode",
		AttemptsTime:    configv1.Duration(p.GetAttemptsTime()),
		StreamStart:     configv1.Duration(p.GetStreamStartTimeout()),
		PrefillTimeout:  configv1.Duration(p.GetPrefillTimeout().GetBase()),
		PerToken:        configv1.Duration(p.GetPrefillTimeout().GetPerToken()),
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
	switch p.GetOnPrefillFailure() {
	case "decodeAlone":
		policy.OnFailure = extproc.DecodeAlone
	case "fail":
		policy.OnFailure = extproc.Fail
	}
	name := p.GetKvTransfer()
	policy.Concurrent, policy.Peers = kvtransfer.NewConcurrent(name), kvtransfer.NewPeers(name, log)
	switch {
	case name == "nixl-push": // one leg after the other where the engine is not known yet
		policy.Dialect, err = kvtransfer.New(kvtransfer.Options{Name: "nixl"})
	case name == "moriio-read":
		policy.Dialect = kvtransfer.NewMoRIIORead(decodeSizes(p))
	case policy.Concurrent == nil:
		policy.Dialect, err = dialect(p, board)
	}
	return policy, err
}

// said is what an engine says about itself, as shown.
type said struct {
	Running  int64   `json:"running"` // -1 here and below: it does not say
	Waiting  int64   `json:"waiting"`
	KVUsage  float64 `json:"kv_usage"`
	KVTokens int64   `json:"kv_tokens"`
	Age      float64 `json:"age_seconds"`
	Trust    float64 `json:"trust"`
}

func engineSaid(g *kvstate.Signals) *said {
	if g == nil {
		return nil
	}
	now := time.Now()
	return &said{g.Running, g.Waiting, g.KVUsage, g.KVTokens, now.Sub(g.At).Seconds(), g.Trust(now)}
}

// writeState shows pools and endpoints as JSON, for people and tests.
func writeState(w http.ResponseWriter, state *kvstate.State) {
	type endpoint struct {
		Name     string `json:"name"`
		Address  string `json:"address"`
		Role     string `json:"role"`
		Group    string `json:"group,omitempty"`
		Failed   bool   `json:"failed"`
		Requests int64  `json:"requests"`
		Tokens   int64  `json:"prompt_tokens"`
		Others   int64  `json:"others_requests,omitempty"` // booked by other replicas
		Engine   *said  `json:"engine,omitempty"`
	}
	type pool struct {
		Name      string     `json:"name"`
		Models    []string   `json:"models"`
		Blocks    int        `json:"blocks"` // in the prefix index
		Endpoints []endpoint `json:"endpoints"`
	}
	out := struct {
		Reservations int    `json:"reservations"`
		Pools        []pool `json:"pools"`
	}{Reservations: state.Reservations()}
	for _, p := range state.Pools() {
		shown := pool{Name: p.Spec.Name, Models: state.Models(p), Blocks: p.Blocks()}
		for _, e := range p.Endpoints() {
			requests, tokens := e.Load()
			others, _ := e.Others()
			shown.Endpoints = append(shown.Endpoints, endpoint{
				e.Name, e.Addr, e.Role.String(), e.Group, e.Failed(), requests, tokens, others, engineSaid(e.Signals()),
			})
		}
		out.Pools = append(out.Pools, shown)
	}
	writeJSON(w, out)
}
