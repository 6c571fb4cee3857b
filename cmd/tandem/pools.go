package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"tandem/kvstate"
	"tandem/kvstate/discovery"
	configv1 "tandem/protos/config/v1"
)

// poolSpec is a pool as configured.
type poolSpec struct {
	spec      kvstate.PoolSpec
	endpoints []kvstate.EndpointSpec
}

func (p poolSpec) equal(o poolSpec) bool {
	return p.spec.Name == o.spec.Name && slices.Equal(p.spec.Models, o.spec.Models) && slices.Equal(p.endpoints, o.endpoints)
}

// poolSpecs reads the pools of a configuration whose endpoints are in it.
func poolSpecs(config *configv1.Config) (out []poolSpec, err error) {
	for _, p := range config.GetPools() {
		if p.GetDiscovery() != nil {
			continue
		}
		next := poolSpec{spec: kvstate.PoolSpec{Name: p.GetName(), Models: p.GetModels()}}
		for _, e := range p.GetEndpoints() {
			role, err := kvstate.ParseRole(e.GetRole())
			if err != nil {
				return nil, fmt.Errorf("pool %s: %w", p.GetName(), err)
			}
			next.endpoints = append(next.endpoints, kvstate.EndpointSpec{
				Name: e.GetAddress(), Scheme: e.GetScheme(), Role: role, Group: p.PairsAs(e), Transfer: configv1.TransferOf(e),
				EventsPort: int(e.GetKvEventsPort()), ReplayPort: int(e.GetKvReplayPort()),
				Weight: int(e.GetWeight()), Drained: e.GetWeight() == 0, Zone: e.GetZone(), Node: e.GetNode(), LoRAs: listed(e.GetLoras()), Labels: listed(e.GetLabels()),
			})
		}
		out = append(out, next)
	}
	return out, nil
}

// poolSources keep the state's pools as configured, through changes of the configuration.
type poolSources struct {
	state *kvstate.State
	log   *slog.Logger
	keep  []string // pools that others keep

	mu      sync.Mutex
	ctx     context.Context // of what runs; nil before run
	current map[string]*poolSource
}

// poolSource is one pool and who looks its names up.
type poolSource struct {
	poolSpec
	*discovery.Static
	cancel context.CancelFunc // nil: not running
	done   chan struct{}
}

func newPoolSources(state *kvstate.State, log *slog.Logger) *poolSources {
	return &poolSources{state: state, log: log, current: map[string]*poolSource{}}
}

// set makes the state's pools those given. Names are resolved before a pool changes, within a time limit. What is the
// same in a pool stays as it is.
func (s *poolSources) set(ctx context.Context, pools []poolSpec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := slices.Clone(s.keep)
	for _, p := range pools {
		names = append(names, p.spec.Name)
		old := s.current[p.spec.Name]
		switch {
		case old == nil:
			s.current[p.spec.Name] = &poolSource{poolSpec: p, Static: discovery.NewStatic(s.state, p.spec, p.endpoints, s.log)}
		case old.equal(p):
			continue
		default:
			old.stop()
			s.current[p.spec.Name] = &poolSource{poolSpec: p, Static: old.Replace(p.spec, p.endpoints)}
		}
		s.current[p.spec.Name].Resolve(ctx)
		s.start(s.current[p.spec.Name])
	}
	for name, source := range s.current {
		if !slices.Contains(names, name) {
			source.stop()
			delete(s.current, name)
		}
	}
	s.state.RetainPools(names)
}

// run looks names up again and again until ctx ends.
func (s *poolSources) run(ctx context.Context) {
	s.mu.Lock()
	s.ctx = ctx
	for _, source := range s.current {
		s.start(source)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, source := range s.current {
		source.stop()
	}
}

// start has a source look its names up from now on, if its time has come.
func (s *poolSources) start(source *poolSource) {
	if s.ctx == nil || s.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan struct{})
	source.cancel, source.done = cancel, done
	go func() { source.Run(ctx); close(done) }()
}

func (s *poolSource) stop() {
	if s.cancel != nil {
		s.cancel()
		<-s.done
		s.cancel = nil
	}
}
