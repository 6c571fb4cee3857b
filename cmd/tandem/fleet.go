package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc"
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/discovery"
	"tandem/kvstate/redisstore"
	"tandem/kvstate/scrape"
	configv1 "tandem/protos/config/v1"
)

// fleet is the state and who keeps it up to date.
type fleet struct {
	state   *kvstate.State
	sources []*discovery.Static
	prober  *discovery.Prober
	scraper *scrape.Scraper
	store   *redisstore.Store // nil: there is no Redis
	keys    *kvtransfer.Keys
	keeping func(context.Context) // keeps the keys in step; nil: nothing does
}

// newFleet fills the state with the configured pools. Names are resolved before it returns, where they can be.
func newFleet(ctx context.Context, config *configv1.Config, log *slog.Logger) (*fleet, error) {
	f := &fleet{state: kvstate.New(kvstate.Options{})}
	for _, p := range config.GetPools() {
		spec := kvstate.PoolSpec{Name: p.GetName(), Models: p.GetModels()}
		var eps []kvstate.EndpointSpec
		for _, e := range p.GetEndpoints() {
			role, err := kvstate.ParseRole(e.GetRole())
			if err != nil {
				return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
			}
			eps = append(eps, kvstate.EndpointSpec{Name: e.GetAddress(), Scheme: e.GetScheme(), Role: role, Group: e.GetGroup()})
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
	f.keys, f.keeping, err = ticketKeys(ctx, config, f.store, log)
	return f, err
}

// watch keeps the state up to date until ctx ends.
func (f *fleet) watch(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range f.sources {
		group.Go(func() error { s.Run(ctx); return nil })
	}
	group.Go(func() error { f.prober.Run(ctx); return nil })
	group.Go(func() error { f.scraper.Run(ctx); return nil })
	if f.store != nil {
		group.Go(func() error { f.store.Run(ctx); return nil })
	}
	if f.keeping != nil {
		group.Go(func() error { f.keeping(ctx); return nil })
	}
	return group.Wait()
}

// serverOptions turns the configuration into what the server is told.
func serverOptions(config *configv1.Config, f *fleet, log *slog.Logger) (extproc.Options, error) {
	o := extproc.Options{
		State: f.state, Keys: f.keys, Log: log, Pools: map[string]extproc.Policy{},
		SplitBodyBytes: int(config.GetEnvoy().GetMaxBodyBytes()),
		MaxBodyBytes:   int(4 * config.GetEnvoy().GetMaxBodyBytes()),
		MaxRedirects:   envoyconfigs.MaxRedirects,
		TicketTTL:      configv1.Duration(config.GetTickets().GetTtl()),
	}
	for _, p := range config.GetPools() {
		policy := extproc.Policy{
			Split:           p.GetSplit() != "never",
			RefuseLong:      p.GetLongPrompts() == "refuse",
			PrefillAttempts: int(p.GetPrefillAttempts()),
			PrefillTimeout:  configv1.Duration(p.GetPrefillTimeout().GetBase()),
			PerToken:        configv1.Duration(p.GetPrefillTimeout().GetPerToken()),
		}
		policy.Session = extproc.SessionKey{Header: p.GetSession().GetHeader(), Cookie: p.GetSession().GetCookie(), Body: p.GetSession().GetBody()}
		switch p.GetOnPrefillFailure() {
		case "decodeAlone":
			policy.OnFailure = extproc.DecodeAlone
		case "fail":
			policy.OnFailure = extproc.Fail
		}
		if name := p.GetKvTransfer(); name != "none" {
			var err error
			if policy.Dialect, err = kvtransfer.New(name); err != nil {
				return o, fmt.Errorf("pool %s: %w", p.GetName(), err)
			}
		}
		o.Pools[p.GetName()] = policy
	}
	return o, nil
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
