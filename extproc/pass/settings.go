package pass

import (
	"slices"
	"strings"
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/latebinding"
	"tandem/extproc/migration"
	"tandem/extproc/openai"
	"tandem/extproc/paths"
	"tandem/extproc/plan"
	"tandem/kvstate"
	"tandem/picker"
)

// Policy is the configuration of a pool's requests.
type Policy struct {
	plan.Policy

	Peers      *kvtransfer.Peers // the known prefill engines; nil: the dialect does not need them
	Session    SessionKey
	Tokens     TokenSources       // where to ask for the prompt's token ids, in addition to prefill
	Waiting    latebinding.Limits // with Place.Late, or if objectives make requests wait
	Objectives Objectives
	// what clients may use in addition to the APIs; default: the client paths of all engines
	Paths       *paths.Paths
	Streams     migration.Policy // which streamed answers outlive their engine, inside Envoy
	LabelHeader string           // the request header with the labels that its endpoints must have; "": none

	queue *latebinding.Queue // nil: requests do not wait
}

// WithDefaults returns the policy with defaults for zero values.
func (p Policy) WithDefaults() Policy {
	if p.Paths == nil {
		p.Paths, _ = paths.New("any", nil) // no paths to refuse
	}
	p.Policy = p.Policy.WithDefaults()
	return p
}

// Queue returns the pool's admission queue; nil: its requests do not wait.
func (p *Policy) Queue() *latebinding.Queue { return p.queue }

// waits reports whether the pool's requests may have to wait.
func (p *Policy) waits() bool { return p.Place.Late || p.Objectives.Miss == picker.MissWait }

// LearnEngine records what a prefill engine reported about itself.
func (p *Policy) LearnEngine(addr string, said kvtransfer.Peer) {
	if p.Peers != nil {
		p.Peers.Learn(addr, said)
	}
}

// Settings may change while the server runs. A change is atomic: every reader sees the old settings or the new
// ones.
type Settings struct {
	Keys  *kvtransfer.Keys
	Pools map[string]Policy // by pool name; pools that are being added to the state, or removed, have one too
}

// activeSettings are the current settings, and what is derived from them.
type activeSettings struct {
	current  Settings
	policies map[string]*Policy // of Pools
	names    []string           // headers that settings name: of sessions, labels, tenants, streams that go on ...
	lenient  []string           // ... and others that are read, which may have several values
	asks     bool               // a pass may ask an engine or Redis for something, and wait for it
}

// Apply replaces the settings, for requests in progress as well.
func (s *Shared) Apply(l Settings) {
	pools, policies := make(map[string]Policy, len(l.Pools)), make(map[string]*Policy, len(l.Pools))
	asks := false
	for name, p := range l.Pools {
		p.Session = p.Session.lower()
		p.LabelHeader = strings.ToLower(p.LabelHeader)
		p.queue = s.queueFor(name, &p)
		p = p.WithDefaults()
		pools[name], policies[name] = p, &p
		asks = asks || asksOthers(&p)
	}
	headers := sessionHeaders(pools)
	if tenant := s.tenantHeader(); tenant != "" {
		headers = append(headers, tenant)
	}
	lenient := slices.DeleteFunc(lenientHeaders(), func(name string) bool { return slices.Contains(headers, name) })
	s.settings.Store(&activeSettings{
		Settings{Keys: l.Keys, Pools: pools}, policies, slices.Clip(headers), lenient, asks,
	})
}

// asksOthers reports whether a pass of a pool may ask an engine or Redis for something, and wait for the answer.
func asksOthers(p *Policy) bool {
	d := &p.Dialect
	return p.CleanupDecode || d.Concurrent != nil || d.Push != nil || d.Expiry != nil ||
		p.Handoff != plan.HandoffEnvoy || p.Tokens.From != LearnedTokens
}

// Asks reports whether a pass may have to wait for the answer of an engine or of Redis, in any pool. If not, it waits
// at most for its turn, which [latebinding.AtOnce] avoids.
func (s *Shared) Asks() bool { return s.settings.Load().asks }

// queueFor returns the admission queue of a pool; nil: its requests do not wait. Waiting requests stay in it.
func (s *Shared) queueFor(pool string, p *Policy) *latebinding.Queue {
	if !p.waits() {
		return nil
	}
	var queue *latebinding.Queue
	if now := s.settings.Load(); now != nil {
		queue = now.current.Pools[pool].queue
	}
	if queue == nil {
		queue = latebinding.New(&s.Waiting, pool)
	}
	limits := p.Waiting
	if s.Gateway != nil { // it waits for its picker, for an unknown time
		limits.Memory = limits.MaxTime
	}
	queue.Apply(&p.Policy, limits)
	return queue
}

// Settings returns the current settings. Do not modify.
func (s *Shared) Settings() Settings { return s.settings.Load().current }

// Headers returns the names of the headers that settings name: of sessions, labels, tenants and streams that go on.
func (s *Shared) Headers() []string { return s.settings.Load().names }

// Lenient returns the names of other headers to read, of which the first value counts.
func (s *Shared) Lenient() []string { return s.settings.Load().lenient }

// Keys returns the keys of tickets.
func (s *Shared) Keys() *kvtransfer.Keys { return s.settings.Load().current.Keys }

// Policy returns the policy of a pool, which must not be changed; ok is false, and the policy empty, if it has none.
func (s *Shared) Policy(pool string) (p *Policy, ok bool) {
	if p, ok = s.settings.Load().policies[pool]; !ok {
		p = &Policy{}
	}
	return p, ok
}

// Serves reports whether any pool serves a path.
func (s *Shared) Serves(method, path string) bool {
	for _, policy := range s.settings.Load().policies {
		if policy.Paths.Allow(method, path) {
			return true
		}
	}
	return false
}

// closed returns the error for a new request to a paused pool; nil if it is not paused.
func closed(p *kvstate.Pool) error {
	if !p.Paused() {
		return nil
	}
	message := "pool " + p.Spec.Name + " takes no requests now, by order of its operator"
	return openai.Unavailable("pool_paused", message, 5*time.Second)
}
