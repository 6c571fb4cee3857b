package extproc

import (
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Live is what may change while the server runs. A change is one step: every use reads one Live or the next, and none a
// mixture.
type Live struct {
	Keys  *kvtransfer.Keys
	Pools map[string]Policy // by pool name; pools that are on their way into the state, or out of it, have one too
}

// inForce is Live, and what follows from it.
type inForce struct {
	Live
	names []string // headers that name sessions
}

// Apply puts other keys and policies in force, for requests under way as well.
func (s *Server) Apply(l Live) {
	pools := make(map[string]Policy, len(l.Pools))
	for name, p := range l.Pools {
		p.Session = p.Session.lower()
		pools[name] = p.withDefaults()
	}
	s.live.Store(&inForce{Live: Live{Keys: l.Keys, Pools: pools}, names: sessionHeaders(pools)})
}

// Live is what is in force. Do not modify.
func (s *Server) Live() Live { return s.live.Load().Live }

func (s *Server) keys() *kvtransfer.Keys { return s.live.Load().Keys }

func (s *Server) policy(pool string) (Policy, bool) {
	p, ok := s.live.Load().Pools[pool]
	return p, ok
}

// closed is what a new request to a paused pool is told, nil where the pool is open.
func closed(p *kvstate.Pool) error {
	if !p.Paused() {
		return nil
	}
	return openai.Unavailable("pool_paused", "pool "+p.Spec.Name+" takes no requests now, by order of its operator", 5*time.Second)
}
