package kvstate

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"tandem/kvstate/prefixindex"
)

// Role is what an endpoint may do; a bit set.
type Role uint8

// The roles. RoleBoth serves either leg; RoleEncode makes embeddings of images, audio and video, and nothing else.
const (
	RolePrefill Role = 1 << iota
	RoleDecode
	RoleEncode
	RoleBoth = RolePrefill | RoleDecode
)

// ParseRole reads a role's name: prefill, decode, both or encode.
func ParseRole(s string) (Role, error) {
	switch s {
	case "prefill":
		return RolePrefill, nil
	case "decode":
		return RoleDecode, nil
	case "both":
		return RoleBoth, nil
	case "encode":
		return RoleEncode, nil
	}
	return 0, fmt.Errorf("%q is not a role: one of prefill, decode, both, encode", s)
}

func (r Role) String() string {
	switch r {
	case RolePrefill:
		return "prefill"
	case RoleDecode:
		return "decode"
	case RoleBoth:
		return "both"
	case RoleEncode:
		return "encode"
	}
	return "none"
}

// EndpointSpec is what is known of an endpoint before it is part of a pool.
type EndpointSpec struct {
	Name   string // as configured: host:port or ip:port
	Addr   string // ip:port, [ip]:port for IPv6: where Envoy connects
	Scheme string // http, https or h2c; "" is http
	Role   Role
	Group  string // endpoints with a group only pair within it
	Weight int    // how fast it is taken to be, in per cent of others; 0 is 100
	Zone   string // where it runs; "": not known. Transfers within a zone are taken for faster than those between two
	Node   string // the machine it runs on; "": that of its IP address. Transfers within one are taken for faster still
	Engine string // release and model revision; those of a pair are equal where both are known
	Layout string // of its KV (tensor parallelism, type, block size), if the dialect needs it equal on both sides
	LoRAs  string // adapters that it is configured to hold, comma between them; what it says itself counts beside them
	Labels string // name=value, comma between them: what requests may ask for

	Drained    bool // no new work
	EventsPort int  // where it publishes its KV events; 0: where its pool says
	ReplayPort int  // where these can be asked for again, if EventsPort is not 0; 0: nowhere
	Transfer   Transfer

	// Draining: it finishes what it has, the KV blocks it holds for others included, and gets nothing new.
	Draining bool
}

// HasLoRA reports whether the endpoint is configured to hold an adapter.
func (e *EndpointSpec) HasLoRA(name string) bool { return has(e.LoRAs, name) }

// HasLabel reports whether the endpoint bears a label, name=value.
func (e *EndpointSpec) HasLabel(label string) bool { return has(e.Labels, label) }

// has reports whether one of the parts of a comma list is name.
func has(list, name string) bool {
	for part, rest := "", list; rest != ""; {
		if part, rest, _ = strings.Cut(rest, ","); part == name {
			return true
		}
	}
	return false
}

// Transfer is what is configured of an endpoint's side of KV transfer. What is zero is as the engine has it by default,
// which the dialects know.
type Transfer struct {
	Host    string // name or IP, without brackets, by which other engines reach it; "": the host of Addr
	Release string // of the engine, as 0.12.0; "": not known
	TP, DP  int    // tensor- and data-parallel ranks; 0: one

	BootstrapPort uint16 // SGLang and Mooncake: HTTP, of an endpoint that prefills
	KVPort        uint16 // P2P-NCCL: the first of the engine's KV ports
	HandshakePort uint16 // MoRIIO
	NotifyPort    uint16 // MoRIIO
	P2PPort       int    // vLLM's P2P offload tier

	// LMCache's receiver: the ports of rank 0; rank n listens n above them.
	LMCacheInitPort, LMCacheAllocPort, LMCacheQueryPort int
	// BufferTokens is how many tokens' KV its buffer holds for prompts on their way to it; 0: not known, not minded.
	BufferTokens int64
}

// Endpoint is one engine address of a pool. Its identity is stable for as long as the endpoint stays as it is.
type Endpoint struct {
	EndpointSpec
	*live
}

// live is what is known of an address while it stays in its pool, whatever else is said about it. What every view reads stands
// first: of a thousand endpoints it comes from memory each time.
type live struct {
	failed atomic.Int64 // when it failed, Unix ns; 0: it has not
	hung   atomic.Bool  // and it took its time to
	paused atomic.Bool  // by an operator
	weight atomic.Int32 // likewise; 0: the spec's

	requests atomic.Int64           // reservations held
	tokens   atomic.Int64           // prompt tokens of those
	others   atomic.Pointer[Others] // what other replicas have booked; nil: nothing
	signals  atomic.Pointer[Signals]
	pace     atomic.Pointer[speed]     // replaced, never changed; nil: nothing observed
	steps    atomic.Pointer[speed]     // likewise, of decode steps
	moves    atomic.Pointer[transfers] // likewise
	blocks   prefixindex.Owner         // held, or thought to be, as the pool's prefix index has them
	queue    prefillQueue
	local    localWork

	loads      atomic.Pointer[LoadFaults] // nil: none
	models     atomic.Pointer[[]string]
	room       room
	load       *workload // of the pool
	stepTokens int64
	ratio      *fadingRatio // bytes per token, of the pool
}

// learn notes that the endpoint was at work for so long on jobs that the model has at so much.
func (l *live) learn(busy, modelled time.Duration, now int64) {
	if modelled <= 0 || l.load == nil {
		return
	}
	l.load.mu.Lock()
	defer l.load.mu.Unlock()
	var next speed
	if old := l.pace.Load(); old != nil {
		next = *old
	}
	next.add(busy, modelled, l.load.speed.ratio(1, now), now)
	l.pace.Store(&next)
	l.load.speed.add(busy, modelled, 1, now)
}

// speedAt is the endpoint's learned speed: a factor on the cost model's times.
func (l *live) speedAt(now int64) float64 {
	if l.load == nil {
		return 1
	}
	fleet, _, _ := l.load.fleetSpeeds(now)
	return l.speedWithin(fleet, now)
}

func (l *live) speedWithin(fleet float64, now int64) float64 {
	if pace := l.pace.Load(); pace != nil {
		return pace.within(fleet, now)
	}
	return fleet
}

// Models are the names that the endpoint told it serves, adapters included; none if it was not asked yet. Do not modify.
func (e *Endpoint) Models() []string {
	if e.live == nil {
		return nil
	}
	if ids := e.models.Load(); ids != nil {
		return *ids
	}
	return nil
}

// Failed reports whether the endpoint is left out for now.
func (e *Endpoint) Failed() bool { return e.failed.Load() != 0 }

// Load is what this replica has booked on the endpoint: requests and their prompt tokens.
func (e *Endpoint) Load() (requests, tokens int64) { return e.requests.Load(), e.tokens.Load() }

// PoolSpec describes a pool.
type PoolSpec struct {
	Name   string
	Models []string // "*": any
	// StepTokens is how many prompt tokens an engine computes in one step (vLLM: max_num_batched_tokens); 0: 8192.
	StepTokens int64
}

// defaultStepTokens is vLLM's own default for online serving on large GPUs (0.32: max_num_batched_tokens).
const defaultStepTokens = 8192

// Pool is a set of endpoints that serve the same models. It is immutable but for its counters: another set of endpoints
// is another Pool of the same name.
type Pool struct {
	Spec      PoolSpec
	endpoints []*Endpoint
	index     *prefixindex.Index
	ratio     *fadingRatio
	pace      *fadingRatio
	tokens    *prefixindex.TokenMemory
	uses      *prefixindex.Uses // of prompts that were sent to endpoints which prefill
	load      *workload
	waits     *waitBoard
	loads     *loadPairs
	paused    *atomic.Bool // by an operator
	groups    []int32      // as [View.Groups]
	uniform   bool         // as [View.Uniform]

	neighbours [][]int32 // as [View.Neighbours]
}

// Endpoints are the pool's endpoints, in the order configured but that those of a group stand together. Do not modify.
func (p *Pool) Endpoints() []*Endpoint { return p.endpoints }

// Endpoint finds an endpoint by address; nil if the pool has none there.
func (p *Pool) Endpoint(addr string) *Endpoint {
	for _, e := range p.endpoints {
		if e.Addr == addr {
			return e
		}
	}
	return nil
}

func (p *Pool) serves(model string) (named, wildcard bool) {
	return slices.Contains(p.Spec.Models, model), slices.Contains(p.Spec.Models, "*")
}

// SetPool adds a pool, or gives the pool of that name other endpoints. Endpoints that stay (same address) keep what is
// booked on them, their health and their blocks; those that go are forgotten, and reservations on them still release. Of
// two with one address, which two names may resolve to, the first counts.
func (s *State) SetPool(spec PoolSpec, eps []EndpointSpec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pools := slices.Clone(s.Pools())
	i := slices.IndexFunc(pools, func(p *Pool) bool { return p.Spec.Name == spec.Name })
	next := &Pool{Spec: spec}
	leaving := map[string]*Endpoint{}
	if i >= 0 {
		next.uses = pools[i].uses
		next.index, next.ratio, next.pace, next.tokens, next.load = pools[i].index, pools[i].ratio, pools[i].pace, pools[i].tokens, pools[i].load
		next.paused, next.waits, next.loads = pools[i].paused, pools[i].waits, pools[i].loads
		for _, e := range pools[i].endpoints {
			leaving[e.Addr] = e
		}
		pools[i] = next
	} else {
		next.uses = prefixindex.NewUses(s.o.Now())
		next.index, next.ratio = prefixindex.New(s.o.indexLimits()), newTokenRatio()
		next.pace, next.tokens = &fadingRatio{}, prefixindex.NewTokenMemory(s.o.MaxTokenBytes)
		next.load, next.paused, next.waits = newWorkload(), &atomic.Bool{}, newWaitBoard()
		next.loads = newLoadPairs()
		pools = append(pools, next)
	}
	seen := make(map[string]bool, len(eps))
	for _, ep := range eps {
		if !seen[ep.Addr] {
			seen[ep.Addr] = true
			e := next.endpoint(ep, leaving[ep.Addr])
			e.obey(s.orderOf(spec.Name, e))
			next.endpoints = append(next.endpoints, e)
			delete(leaving, ep.Addr)
		}
	}
	slices.SortStableFunc(next.endpoints, func(a, b *Endpoint) int { return strings.Compare(a.Group, b.Group) })
	for i, e := range next.endpoints {
		if i+1 == len(next.endpoints) || next.endpoints[i+1].Group != e.Group {
			next.groups = append(next.groups, int32(i+1))
		}
	}
	next.uniform = !slices.ContainsFunc(next.endpoints, func(e *Endpoint) bool { return e.Engine+e.Layout+e.Zone != "" })
	next.neighbours = neighbours(next.endpoints)
	next.load.setZones(next.endpoints)
	for addr, e := range leaving {
		next.loads.forget(addr)
		e.blocks.Leave()
	}
	next.index.Resize()
	s.pools.Store(&pools)
}

// endpoint is the endpoint of ep in the pool: old, the one that was there with the same address, if nothing about it
// changed; else a new one, which goes on with what is known of old.
func (p *Pool) endpoint(ep EndpointSpec, old *Endpoint) *Endpoint {
	switch {
	case old == nil:
		l := &live{load: p.load, stepTokens: p.Spec.StepTokens, ratio: p.ratio}
		setDefault(&l.stepTokens, defaultStepTokens)
		p.index.Join(&l.blocks)
		return &Endpoint{ep, l}
	case old.EndpointSpec == ep:
		return old
	}
	return &Endpoint{ep, old.live}
}

// RemovePool forgets a pool.
func (s *State) RemovePool(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pools := slices.DeleteFunc(slices.Clone(s.Pools()), func(p *Pool) bool { return p.Spec.Name == name })
	for key := range s.orders {
		if key.pool == name {
			delete(s.orders, key)
		}
	}
	s.pools.Store(&pools)
}

// Pools are all pools, in the order they were added. Do not modify.
func (s *State) Pools() []*Pool { return *s.pools.Load() }

// Pool finds a pool by name, nil if there is none.
func (s *State) Pool(name string) *Pool { return s.pool(name) }

func (s *State) pool(name string) *Pool {
	for _, p := range s.Pools() {
		if p.Spec.Name == name {
			return p
		}
	}
	return nil
}

// PoolFor finds the pool that serves a model: one that names it before one that takes any, and of several that take any
// one whose endpoints told that they serve it before the first. No model means the first pool. It is nil where nobody
// serves it.
func (s *State) PoolFor(model string) *Pool {
	pools := s.Pools()
	if model == "" && len(pools) > 0 {
		return pools[0]
	}
	var takesAny, told *Pool
	for _, p := range pools {
		named, wildcard := p.serves(model)
		if named {
			return p
		}
		if wildcard && takesAny == nil {
			takesAny = p
		}
		if wildcard && told == nil && p.told(model) {
			told = p
		}
	}
	if told != nil {
		return told
	}
	return takesAny
}

// told reports whether an endpoint of the pool said that it serves the model.
func (p *Pool) told(model string) bool {
	for _, e := range p.endpoints {
		if ids := e.models.Load(); ids != nil && slices.Contains(*ids, model) {
			return true
		}
	}
	return false
}

// SetModels notes what an endpoint says it serves.
func (s *State) SetModels(e *Endpoint, ids []string) { e.models.Store(&ids) }

// Models are the names that a pool serves: those configured and, where it takes any, those its endpoints told.
func (s *State) Models(p *Pool) []string {
	var out []string
	for _, m := range p.Spec.Models {
		if m != "*" {
			out = append(out, m)
		}
	}
	if _, wildcard := p.serves("*"); wildcard {
		for _, e := range p.endpoints {
			if ids := e.models.Load(); ids != nil {
				out = append(out, *ids...)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
