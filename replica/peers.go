package replica

import (
	"context"
	"log/slog"
	"sync"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/pass"
	"tandem/kvstate"
	"tandem/kvstate/registrations"
	configv1 "tandem/protos/config/v1"
)

// peerSources keep what is known of the engines of pools whose dialect needs that, through changes of the
// configuration.
type peerSources struct {
	state    *kvstate.State
	settings Settings
	log      *slog.Logger

	mu      sync.Mutex
	ctx     context.Context // of what runs; nil before run
	failed  chan error      // of what was there when run began
	current map[string]*peerSource
}

// peerSource is what one pool's dialect knows.
type peerSource struct {
	dialect, listen string
	peers           *kvtransfer.Peers
	cancel          context.CancelFunc // nil: not running
	running         sync.WaitGroup
}

func newPeerSources(state *kvstate.State, set Settings, log *slog.Logger) *peerSources {
	return &peerSources{
		state: state, settings: set, log: log, failed: make(chan error, 1), current: map[string]*peerSource{},
	}
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
		source := &peerSource{dialect: p.GetKvTransfer(), listen: p.GetRegistration().GetListen(), peers: peers}
		if old := s.current[p.GetName()]; old != nil && old.peers == peers && old.listen == source.listen {
			source = old
		}
		next[p.GetName()] = source
	}
	for pool, old := range s.current {
		if next[pool] != old {
			old.stop()
		}
	}
	for pool, source := range next {
		if s.current[pool] != source {
			s.start(pool, source, func(err error) { s.log.Error("registration of engines", "pool", pool, "err", err) })
		}
	}
	s.current = next
}

// run keeps what is known up to date until ctx ends. An address of the start that cannot be listened on is an error.
func (s *peerSources) run(ctx context.Context) (err error) {
	s.mu.Lock()
	s.ctx = ctx
	for pool, source := range s.current {
		s.start(pool, source, func(err error) {
			select {
			case s.failed <- err:
			default:
			}
		})
	}
	s.mu.Unlock()
	select {
	case <-ctx.Done():
	case err = <-s.failed:
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, source := range s.current {
		source.stop()
	}
	return err
}

// stop ends what start began, so that another may listen there.
func (s *peerSource) stop() {
	if s.cancel != nil {
		s.cancel()
		s.running.Wait()
	}
}

// start has a pool's engines asked, and listened to, from now on, if its time has come.
func (s *peerSources) start(pool string, source *peerSource, failed func(error)) {
	if s.ctx == nil || s.ctx.Err() != nil {
		return
	}
	var ctx context.Context
	ctx, source.cancel = context.WithCancel(s.ctx)
	source.running.Go(func() { source.peers.Run(ctx, s.state, pool) })
	if source.listen == "" {
		return
	}
	source.running.Go(func() {
		l, err := s.settings.listen(ctx, source.listen)
		if err == nil {
			err = registered(source.peers, s.log).Run(ctx, l)
		}
		if err != nil {
			failed(err)
		}
	})
}

// registered listens for engines that say by themselves where their KV sockets are.
func registered(peers *kvtransfer.Peers, log *slog.Logger) *registrations.Listener {
	return registrations.New(func(b registrations.Registration) {
		peers.Learn(b.HTTP, kvtransfer.Peer{Ranks: []kvtransfer.Rank{{Host: b.ZMQ.Addr().String(), Port: int(b.ZMQ.Port())}}})
	}, peers.Forget, log)
}
