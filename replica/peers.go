package replica

import (
	"context"
	"sync"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/kvstate"
	configv1 "tandem/protos/config/v1"
)

// peerSources keep what is known of the engines of pools whose dialect needs that, through changes of the
// configuration.
type peerSources struct {
	state *kvstate.State

	mu      sync.Mutex
	ctx     context.Context // of what runs; nil before run
	current map[string]*peerSource
	running sync.WaitGroup
}

// peerSource is what one pool's dialect knows.
type peerSource struct {
	dialect string
	peers   *kvtransfer.Peers
	stop    context.CancelFunc // nil: not running
}

func newPeerSources(state *kvstate.State) *peerSources {
	return &peerSources{state: state, current: map[string]*peerSource{}}
}

// known returns what is known for the pool already, if its dialect is the same as before; else made.
func (s *peerSources) known(p *configv1.Pool, made *kvtransfer.Peers) *kvtransfer.Peers {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.current[p.GetName()]; old != nil && old.dialect == p.GetKvTransfer() {
		return old.peers
	}
	return made
}

// set follows the configuration. What does not change for a pool goes on.
func (s *peerSources) set(cfg *configv1.Config, policies map[string]pass.Policy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := map[string]*peerSource{}
	for _, p := range cfg.GetPools() {
		peers := policies[p.GetName()].Peers
		if peers == nil {
			continue
		}
		source := &peerSource{dialect: p.GetKvTransfer(), peers: peers}
		if old := s.current[p.GetName()]; old != nil && old.peers == peers {
			source = old
		}
		next[p.GetName()] = source
	}
	for pool, old := range s.current {
		if next[pool] != old && old.stop != nil {
			old.stop()
		}
	}
	for pool, source := range next {
		if s.current[pool] != source {
			s.start(pool, source)
		}
	}
	s.current = next
}

// run keeps what is known up to date until ctx ends.
func (s *peerSources) run(ctx context.Context) {
	s.mu.Lock()
	s.ctx = ctx
	for pool, source := range s.current {
		s.start(pool, source)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock() // nothing starts from now on
	defer s.mu.Unlock()
	s.running.Wait()
}

// start has a pool's engines asked from now on, if their time has come. The lock is held.
func (s *peerSources) start(pool string, source *peerSource) {
	if s.ctx == nil || s.ctx.Err() != nil {
		return
	}
	var ctx context.Context
	ctx, source.stop = context.WithCancel(s.ctx)
	s.running.Go(func() { source.peers.Run(ctx, s.state, pool) })
}
