package extproc

import (
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
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
	names []string // headers that name sessions, or labels
}

// Apply puts other keys and policies in force, for requests under way as well.
func (s *Server) Apply(l Live) {
	pools := make(map[string]Policy, len(l.Pools))
	for name, p := range l.Pools {
		p.Session = p.Session.lower()
		p.LabelHeader = strings.ToLower(p.LabelHeader)
		p.room = s.roomFor(name, &p)
		pools[name] = p.withDefaults()
	}
	s.live.Store(&inForce{Live: Live{Keys: l.Keys, Pools: pools}, names: sessionHeaders(pools)})
}

// roomFor is where the pool's requests wait; nil: they do not. Those who wait stay where they are.
func (s *Server) roomFor(pool string, p *Policy) *waitingRoom {
	if !p.waits() {
		return nil
	}
	var room *waitingRoom
	if now := s.live.Load(); now != nil {
		room = now.Pools[pool].room
	}
	if room == nil {
		room = newWaitingRoom(s, pool)
	}
	room.set(p)
	return room
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

// waits reports whether the pool's requests may have to wait.
func (p *Policy) waits() bool { return p.Place.Late || p.Objectives.Miss == picker.MissWait }
