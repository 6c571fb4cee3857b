package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"

	"golang.org/x/sync/errgroup"

	envoyconfigs "tandem/envoy-configs"
	"tandem/extproc"
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
	"tandem/kvstate/discovery"
	configv1 "tandem/protos/config/v1"
)

// fleet is the state and who keeps it up to date.
type fleet struct {
	state   *kvstate.State
	sources []source
	synced  []<-chan struct{} // closed when a source that takes its time has written its pool
	prober  *discovery.Prober
}

// newFleet fills the state with the configured pools. Names are resolved before it returns, where they can be.
func newFleet(ctx context.Context, config *configv1.Config, log *slog.Logger) (*fleet, error) {
	f := &fleet{state: kvstate.New(kvstate.Options{})}
	for _, p := range config.GetPools() {
		source, err := f.newSource(ctx, p, log)
		if err != nil {
			return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
		}
		f.sources = append(f.sources, source)
	}
	f.prober = discovery.NewProber(f.state, log)
	return f, nil
}

// watch keeps the state up to date until ctx ends.
func (f *fleet) watch(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, s := range f.sources {
		group.Go(func() error { s.Run(ctx); return nil })
	}
	group.Go(func() error { f.prober.Run(ctx); return nil })
	return group.Wait()
}

// serverOptions turns the configuration into what the server is told.
func serverOptions(config *configv1.Config, f *fleet, log *slog.Logger) (extproc.Options, error) {
	keys, err := ticketKeys(config, log)
	if err != nil {
		return extproc.Options{}, err
	}
	o := extproc.Options{
		State: f.state, Keys: keys, Log: log, Pools: map[string]extproc.Policy{},
		SplitBodyBytes: int(config.GetEnvoy().GetMaxBodyBytes()),
		MaxBodyBytes:   int(4 * config.GetEnvoy().GetMaxBodyBytes()),
		MaxRedirects:   envoyconfigs.MaxRedirects,
		TicketTTL:      configv1.Duration(config.GetTickets().GetTtl()),
	}
	if e := config.GetExtProc(); e.GetProtocol() == configv1.ProtocolEndpointPicker {
		o.Picker = &extproc.PickerOptions{
			Fallbacks: int(e.GetEndpointPicker().GetFallbacks()), WatchBody: e.GetEndpointPicker().GetResponses() == "body",
			ShedRequests: int(e.GetEndpointPicker().GetShedRequests()),
		}
	}
	for _, p := range config.GetPools() {
		policy := extproc.Policy{
			Split:           p.GetSplit() != "never",
			RefuseLong:      p.GetLongPrompts() == "refuse",
			PrefillAttempts: int(p.GetPrefillAttempts()),
			CleanupDecode:   p.GetStrandedBlocks() == "cleanupDecode",
			AttemptsTime:    configv1.Duration(p.GetAttemptsTime()),
			StreamStart:     configv1.Duration(p.GetStreamStartTimeout()),
			PrefillTimeout:  configv1.Duration(p.GetPrefillTimeout().GetBase()),
			PerToken:        configv1.Duration(p.GetPrefillTimeout().GetPerToken()),
		}
		switch p.GetOnPrefillFailure() {
		case "decodeAlone":
			policy.OnFailure = extproc.DecodeAlone
		case "fail":
			policy.OnFailure = extproc.Fail
		}
		switch p.GetHandoff() {
		case "sidecar":
			policy.Handoff = extproc.HandoffSidecar
		case "direct":
			policy.Handoff = extproc.HandoffDirect
		}
		if name := p.GetKvTransfer(); name != "none" {
			if policy.Dialect, err = kvtransfer.New(name); err != nil {
				return o, fmt.Errorf("pool %s: %w", p.GetName(), err)
			}
		}
		o.Pools[p.GetName()] = policy
	}
	return o, nil
}

func ticketKeys(config *configv1.Config, log *slog.Logger) (*kvtransfer.Keys, error) {
	file := config.GetTickets().GetKeyFile()
	if file == "" {
		return kvtransfer.GenerateKeys()
	}
	keys, warnings, err := kvtransfer.ReadKeyFile(file)
	for _, w := range warnings {
		log.Warn(w)
	}
	return keys, err
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
	}
	type pool struct {
		Name      string     `json:"name"`
		Models    []string   `json:"models"`
		Endpoints []endpoint `json:"endpoints"`
	}
	out := struct {
		Reservations int    `json:"reservations"`
		Pools        []pool `json:"pools"`
	}{Reservations: state.Reservations()}
	for _, p := range state.Pools() {
		shown := pool{Name: p.Spec.Name, Models: state.Models(p)}
		for _, e := range p.Endpoints() {
			requests, tokens := e.Load()
			shown.Endpoints = append(shown.Endpoints, endpoint{e.Name, e.Addr, e.Role.String(), e.Group, e.Failed(), requests, tokens})
		}
		out.Pools = append(out.Pools, shown)
	}
	writeJSON(w, out)
}
