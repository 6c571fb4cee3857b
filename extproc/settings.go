package extproc

import (
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/picker"
)

// Settings may change while the server runs. A change is atomic: every reader sees the old settings or the new
// ones.
type Settings struct {
	Keys  *kvtransfer.Keys
	Pools map[string]Policy // by pool name; pools that are being added to the state, or removed, have one too
}

// activeSettings are the current settings, and what is derived from them.
type activeSettings struct {
	Settings
	policies map[string]*Policy // of Pools
	names    []string           // headers with session names or labels
}

// Apply replaces the settings, for requests in progress as well.
func (s *Server) Apply(l Settings) {
	pools, policies := make(map[string]Policy, len(l.Pools)), make(map[string]*Policy, len(l.Pools))
	for name, p := range l.Pools {
		p.Session = p.Session.lower()
		p.LabelHeader = strings.ToLower(p.LabelHeader)
		p.queue = s.queueFor(name, &p)
		p = p.withDefaults()
		pools[name], policies[name] = p, &p
	}
	s.settings.Store(&activeSettings{Settings: Settings{Keys: l.Keys, Pools: pools}, policies: policies, names: sessionHeaders(pools)})
}

// queueFor returns the admission queue of a pool; nil: its requests do not wait. Waiting requests stay in it.
func (s *Server) queueFor(pool string, p *Policy) *latebinding.Queue {
	if !p.waits() {
		return nil
	}
	var queue *latebinding.Queue
	if now := s.settings.Load(); now != nil {
		queue = now.Pools[pool].queue
	}
	if queue == nil {
		queue = latebinding.New(&s.waiting, pool)
	}
	queue.Apply(&p.Policy, p.Waiting)
	return queue
}

// Settings returns the current settings. Do not modify.
func (s *Server) Settings() Settings { return s.settings.Load().Settings }

func (s *Server) keys() *kvtransfer.Keys { return s.settings.Load().Keys }

// policy returns the policy of a pool, which must not be changed; ok is false, and the policy empty, if it has none.
func (s *Server) policy(pool string) (p *Policy, ok bool) {
	if p, ok = s.settings.Load().policies[pool]; !ok {
		p = &Policy{}
	}
	return p, ok
}

// closed returns the error for a new request to a paused pool; nil if it is not paused.
func closed(p *kvstate.Pool) error {
	if !p.Paused() {
		return nil
	}
	return openai.Unavailable("pool_paused", "pool "+p.Spec.Name+" takes no requests now, by order of its operator", 5*time.Second)
}

// waits reports whether the pool's requests may have to wait.
func (p *Policy) waits() bool { return p.Place.Late || p.Objectives.Miss == picker.MissWait }
