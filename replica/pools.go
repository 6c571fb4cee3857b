package replica

import (
	"context"
	"log/slog"
	"slices"
	"sync"

	"tandem/kvstate"
	"tandem/kvstate/discovery"
	"tandem/replica/config"
)

// poolSources keep the state's pools as configured, through changes of the configuration.
type poolSources struct {
	state *kvstate.State
	log   *slog.Logger
	keep  []string // pools that others keep

	mu      sync.Mutex
	ctx     context.Context // of what runs; nil before run
	current map[string]*poolSource
}

// poolSource is one pool, and the source that resolves its names.
type poolSource struct {
	config.PoolSpec
	*discovery.Static
	cancel context.CancelFunc // nil: not running
	done   chan struct{}
}

func newPoolSources(state *kvstate.State, log *slog.Logger) *poolSources {
	return &poolSources{state: state, log: log, current: map[string]*poolSource{}}
}

// set replaces the state's pools. Names are resolved before a pool changes, within a time limit. Unchanged parts of a
// pool stay.
func (s *poolSources) set(ctx context.Context, pools []config.PoolSpec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	names := slices.Clone(s.keep)
	for _, p := range pools {
		names = append(names, p.Spec.Name)
		old := s.current[p.Spec.Name]
		switch {
		case old == nil:
			s.current[p.Spec.Name] = &poolSource{PoolSpec: p, Static: discovery.NewStatic(s.state, p.Spec, p.Endpoints, s.log)}
		case old.Equal(p):
			continue
		default:
			old.stop()
			s.current[p.Spec.Name] = &poolSource{PoolSpec: p, Static: old.Replace(p.Spec, p.Endpoints)}
		}
		s.current[p.Spec.Name].Resolve(ctx)
		s.start(s.current[p.Spec.Name])
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

// start makes a source look its names up from now on, if its time has come.
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
