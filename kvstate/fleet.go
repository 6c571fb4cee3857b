package kvstate

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"tandem/kvstate/kvloads"
	"tandem/kvstate/kvroom"
	"tandem/kvstate/media"
	"tandem/kvstate/prefixindex"
	"tandem/kvstate/receivebuffer"
	"tandem/kvstate/residency"
	"tandem/kvstate/speed"
	"tandem/kvstate/standstill"
)

// Role is the set of legs that an endpoint may serve; a bit set.
type Role uint8

// The roles. RoleBoth serves either leg; RoleEncode only makes embeddings of images, audio and video.
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

// EndpointSpec is the configured or discovered description of an endpoint.
type EndpointSpec struct {
	Name   string // as configured: host:port or ip:port
	Addr   string // ip:port, [ip]:port for IPv6: Envoy connects there; followed by #rank if Ranks is not 0
	Scheme string // http, https or h2c; "" is http
	Group  string // endpoints with a group only pair within it
	Zone   string // where it runs; "": unknown. Transfers within a zone are assumed to be faster than between two
	Node   string // the machine it runs on; "": that of its IP address. Transfers within it are faster still
	Engine string // engine release and model revision; if both endpoints of a pair report it, they must be equal
	Labels string // name=value, comma-separated: labels that requests may ask for

	Access // what its server wants

	Events   EventPorts
	Transfer Transfer

	// Ranks is the number of data-parallel ranks behind the address, each a separate endpoint; 0: one without a
	// number. Rank is this one's number, and part of Addr (#rank), which identifies an endpoint.
	Ranks, Rank int

	Several bool // Name has several addresses: it names none of their endpoints alone

	// What follows is read by every decision: in one cache line with the state, see [endpointState].

	LoRAs   string // adapters configured for it, comma-separated; those that the engine reports count as well
	Role    Role
	Drained bool // no new work
	// Draining: it finishes its requests, serves the KV blocks that it holds for others, and gets no new requests.
	Draining bool
	Weight   int // assumed speed, in per cent of the others'; 0 is 100
}

// HostPort returns the address to connect to: Addr without the rank.
func (e *EndpointSpec) HostPort() string {
	at, _, _ := strings.Cut(e.Addr, "#")
	return at
}

// DisplayName returns the name for people: as configured, or the address if it has none of its own; with #rank if Ranks
// is not 0.
func (e *EndpointSpec) DisplayName() string {
	if e.Name == "" || e.Several {
		return e.Addr
	}
	if e.Ranks == 0 {
		return e.Name
	}
	return e.Name + "#" + strconv.Itoa(e.Rank)
}

// EventPorts are an endpoint's ports of KV events and of their replay. Port 0: the pool's two; Replay 0: none.
type EventPorts struct{ Port, Replay int }

// Access is what an engine's server wants of requests.
type Access struct {
	ServerName string // of https: SNI and Host; "": none
	KeyFile    string // has the API key for Tandem's own requests; "": none
}

// ServerNameSent returns the name that requests to the endpoint have as Host and SNI, "" for none of its own.
func (e *EndpointSpec) ServerNameSent() string {
	if e.Scheme != "https" {
		return ""
	}
	return e.ServerName
}

// RankName returns the rank in the engines' form, "" for the only endpoint of an address.
func (e *EndpointSpec) RankName() string {
	if e.Ranks == 0 {
		return ""
	}
	return strconv.Itoa(e.Rank)
}

// ByRank returns the endpoints at the address of e: one for each data-parallel rank.
func (e EndpointSpec) ByRank() []EndpointSpec {
	out := make([]EndpointSpec, 0, max(e.Ranks, 1))
	if e.Ranks == 0 {
		return append(out, e)
	}
	addr := e.Addr
	for e.Rank = range e.Ranks {
		e.Addr = addr + "#" + strconv.Itoa(e.Rank)
		out = append(out, e)
	}
	return out
}

// HasLoRA reports whether the endpoint is configured to hold an adapter.
func (e *EndpointSpec) HasLoRA(name string) bool { return has(e.LoRAs, name) }

// HasLabel reports whether the endpoint has a label, name=value.
func (e *EndpointSpec) HasLabel(label string) bool { return has(e.Labels, label) }

// has reports whether a comma-separated list contains name.
func has(list, name string) bool {
	for part, rest := "", list; rest != ""; {
		if part, rest, _ = strings.Cut(rest, ","); part == name {
			return true
		}
	}
	return false
}

// Transfer is the configuration of an endpoint's side of KV transfers. Zero values mean the engine's default, which
// the dialects know.
type Transfer struct {
	Host    string // name or IP, without brackets, that other engines connect to; "": the host of Addr
	Release string // of the engine, as 0.12.0; "": unknown
	TP, DP  int    // tensor- and data-parallel ranks; 0: one

	BootstrapPort uint16 // SGLang and Mooncake: HTTP port of a prefill endpoint
	HandshakePort uint16 // MoRIIO
	NotifyPort    uint16 // MoRIIO
	P2PPort       int    // vLLM's P2P offload tier

	// LMCache's receiver: the ports of rank 0; rank n listens n above them.
	LMCacheInitPort, LMCacheAllocPort, LMCacheQueryPort int
	// BufferTokens is the capacity of its receive buffer, in tokens; 0: unknown, no limit.
	BufferTokens int64
}

// Endpoint is one engine address of a pool. The pointer stays the same until its spec changes.
type Endpoint struct {
	EndpointSpec
	state *endpointState
}

// endpointState is the state of an address while it stays in its pool, even if its spec changes. The fields that every
// view reads come first: with a thousand endpoints each of them is a cache miss.
type endpointState struct {
	condition    condition
	instructions instructions

	requests     atomic.Int64 // reservations held
	tokens       atomic.Int64 // prompt tokens of those
	memory       memory
	remoteLoad   atomic.Pointer[RemoteLoad] // reservations of other replicas; nil: none
	signals      atomic.Pointer[Signals]
	pace         atomic.Pointer[speed.Learned] // of prefill; replaced, never modified; nil: nothing observed
	steps        atomic.Pointer[speed.Learned] // how much slower than the others, in decode steps
	transferTime atomic.Pointer[transferRatio] // how much slower than the others, in KV transfers
	loads        atomic.Pointer[LoadFaults]    // nil: none
	models       atomic.Pointer[reportedModels]
	said         atomic.Pointer[Report] // by its engine; nil: nothing
	report       atomic.Pointer[Report] // of that, what the pool compares; nil: nothing
	reportDue    atomic.Int64           // until when it is not paired without one, Unix ns; 0: it is
	reports      bool                   // engines of its pool are asked for one
	blocks       prefixindex.Owner      // blocks that it holds according to the pool's prefix index
	queue        prefillQueue
	local        localWork

	load       *workload // the pool's
	stepTokens int64
	ratio      *fadingRatio // bytes per token; the pool's
	residents  *residency.Table
}

// condition is whether an endpoint works, and takes requests.
type condition struct {
	failed atomic.Int64            // when it failed, Unix ns; 0: healthy
	gone   atomic.Bool             // nothing has listened there since
	how    atomic.Pointer[failure] // how it failed last; nil: it never did
	// until when it gets no request because it was full, Unix ns; refused is the refusal, nil: there was none
	fullUntil atomic.Int64
	refused   atomic.Pointer[Refusal]
	// until when it is not asked to continue another one's answer, Unix ns; see [Endpoint.Continues]
	beginsAnew atomic.Int64
	progress   standstill.Tracker
}

// memory accounts for an engine's KV memory.
type memory struct {
	room   kvroom.Room      // of the KV cache, for hand-overs
	holds  residency.Engine // conversations
	buffer receivebuffer.Buffer
}

// instructions are what an operator or a rule sets for an endpoint.
type instructions struct {
	paused atomic.Bool
	weight atomic.Int32  // 0: the spec's weight
	word   atomic.Uint32 // a Role: what it is used for now; 0: all that it may serve
}

// learnPrefill records that the endpoint was busy for some time with jobs for which the cost model predicts modelled.
func (l *endpointState) learnPrefill(busy, modelled time.Duration, now int64) {
	if modelled <= 0 || l.load == nil {
		return
	}
	l.load.mu.Lock()
	defer l.load.mu.Unlock()
	var next speed.Learned
	if old := l.pace.Load(); old != nil {
		next = *old
	}
	l.load.speed = l.load.speed.Doubted(1, now, speed.DoubtPool)
	fleet := l.load.speed.Ratio(1, now)
	next = next.Doubted(fleet, now-int64(busy), speed.DoubtEndpoint) // it was at work since then
	next.Add(busy, modelled, fleet, now)
	l.pace.Store(&next)
	l.load.speed.Add(busy, modelled, 1, now)
}

// speedAt returns the endpoint's learned speed: a factor on the cost model's times.
func (l *endpointState) speedAt(now int64) float64 {
	if l.load == nil {
		return 1
	}
	fleet, _, _ := l.load.fleetSpeeds(now)
	return l.speedWithin(fleet, now)
}

func (l *endpointState) speedWithin(fleet float64, now int64) float64 {
	if pace := l.pace.Load(); pace != nil {
		return pace.Within(fleet, now)
	}
	return fleet
}

// Models returns the model names that the endpoint reported, adapters included; none before the first report. Do
// not modify.
func (e *Endpoint) Models() []string {
	if e.state != nil {
		if m := e.state.models.Load(); m != nil {
			return m.ids
		}
	}
	return nil
}

// Failed reports whether the endpoint is marked as failed.
func (e *Endpoint) Failed() bool { return e.state != nil && e.state.condition.failed.Load() != 0 }

// Load returns this replica's reservations on the endpoint: requests and their prompt tokens.
func (e *Endpoint) Load() (requests, tokens int64) {
	return e.state.requests.Load(), e.state.tokens.Load()
}

// PoolSpec describes a pool.
type PoolSpec struct {
	Name    string
	Models  []string // "*": any
	KeyFile string   // of its endpoints that have none
	// StepTokens is how many prompt tokens an engine computes in one step (vLLM: max_num_batched_tokens); 0: 8192.
	StepTokens int64
	HandOver   standstill.HandOver
	// Store: its engines may have KV from a store, which keeps what their own memory has evicted.
	Store bool
	// Facts are those that matter for pairs. The engines of a pair must not be known to differ in the facts that are
	// also in Alike; in the others the operator lets them differ.
	Facts, Alike FactSet
}

// defaultStepTokens is vLLM's own default for online serving on large GPUs (0.32: max_num_batched_tokens).
const defaultStepTokens = 8192

// Pool is a set of endpoints that serve the same models. Only its counters change: a new set of endpoints is a new
// Pool of the same name.
type Pool struct {
	Spec      PoolSpec
	endpoints []*Endpoint
	index     *prefixindex.Index
	ratio     *fadingRatio
	density   *kvroom.Density
	forgot    *atomic.Int64 // when what was learned of prompts' sizes was doubted last, Unix ns
	media     *media.Tokens
	pace      *fadingRatio
	tokens    *prefixindex.TokenMemory
	uses      *prefixindex.Uses // of prompts that were sent to prefill endpoints
	load      *workload
	queue     *poolQueue
	loads     *kvloads.Pairs
	residents *residency.Table // conversations, and what endpoints hold of them
	paused    *atomic.Bool     // by an operator
	unlike    *atomic.Bool     // not all of its endpoints' engines have reported the same
	groups    []int32          // as [View.Groups]
	uniform   bool             // as [View.Uniform]

	sameNode [][]int32 // as [View.Neighbours]
}

// Endpoints returns the pool's endpoints in the configured order, except that endpoints of a group are adjacent. Do
// not modify.
func (p *Pool) Endpoints() []*Endpoint { return p.endpoints }

// Endpoint finds an endpoint by address; nil if the pool has none with it.
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

// SetPool adds a pool, or replaces the endpoints of the pool of that name. Endpoints that remain (same address)
// keep their reservations, health and blocks. Endpoints that leave are forgotten, but reservations on them can
// still be released. If two endpoints resolve to one address, the first counts.
func (s *State) SetPool(spec PoolSpec, eps []EndpointSpec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pools := slices.Clone(s.Pools())
	i := slices.IndexFunc(pools, func(p *Pool) bool { return p.Spec.Name == spec.Name })
	next := &Pool{Spec: spec}
	leaving := map[string]*Endpoint{}
	if i >= 0 {
		next.density, next.media = pools[i].density, pools[i].media
		next.uses, next.forgot = pools[i].uses, pools[i].forgot
		old := pools[i]
		next.index, next.ratio, next.pace, next.tokens, next.load = old.index, old.ratio, old.pace, old.tokens, old.load
		next.paused, next.queue, next.loads = pools[i].paused, pools[i].queue, pools[i].loads
		next.unlike, next.residents = pools[i].unlike, pools[i].residents
		for _, e := range pools[i].endpoints {
			leaving[e.Addr] = e
		}
		pools[i] = next
	} else {
		next.uses = prefixindex.NewUses(s.o.Now())
		next.index, next.ratio = prefixindex.New(s.o.indexLimits()), newTokenRatio()
		next.density, next.media, next.forgot = &kvroom.Density{}, &media.Tokens{}, &atomic.Int64{}
		next.pace, next.tokens = &fadingRatio{}, prefixindex.NewTokenMemory(s.o.MaxTokenBytes)
		next.load, next.paused, next.queue = newWorkload(), &atomic.Bool{}, newPoolQueue()
		next.loads, next.unlike, next.residents = kvloads.New(), &atomic.Bool{}, residency.New()
		next.paused.Store(s.overrides[overrideKey{pool: spec.Name}].Paused) // set earlier by another replica's operator
		pools = append(pools, next)
	}
	seen := make(map[string]bool, len(eps))
	for _, ep := range eps {
		ep.KeyFile = cmp.Or(ep.KeyFile, spec.KeyFile)
		if !seen[ep.Addr] && (s.o.Allows == nil || s.o.Allows(spec.Name, ep.Addr)) {
			seen[ep.Addr] = true
			e := next.endpoint(ep, leaving[ep.Addr], s.o.Now())
			e.state.condition.progress.Configure(spec.HandOver)
			e.state.applyOverride(s.overrideOf(spec.Name, e))
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
	next.uniform = !slices.ContainsFunc(next.endpoints, func(e *Endpoint) bool {
		return e.Engine+e.Zone != ""
	})
	for _, e := range next.endpoints { // what is compared may have changed, and who is there
		if said := e.state.said.Load(); said != nil {
			next.setReport(e, said)
		}
	}
	next.sameNode = sameNodePairs(next.endpoints)
	next.load.setZones(next.endpoints)
	for addr, e := range leaving {
		next.loads.Forget(addr)
		next.residents.Empty(&e.state.memory.holds, true)
		e.state.blocks.Leave()
	}
	next.index.Resize()
	s.pools.Store(&pools)
}

// endpoint returns the pool's endpoint for a spec: old, the one with the same address, if the spec is unchanged;
// else a new one with the state of old.
func (p *Pool) endpoint(ep EndpointSpec, old *Endpoint, now time.Time) *Endpoint {
	switch {
	case old == nil:
		l := &endpointState{load: p.load, stepTokens: cmp.Or(p.Spec.StepTokens, defaultStepTokens), ratio: p.ratio,
			residents: p.residents, reports: p.Spec.Facts != 0}
		l.awaitReport(now)
		p.index.Join(&l.blocks)
		return &Endpoint{ep, l}
	case old.EndpointSpec == ep:
		return old
	}
	return &Endpoint{ep, old.state}
}

// Pools returns all pools in the order in which they were added. Do not modify.
func (s *State) Pools() []*Pool { return *s.pools.Load() }

// Pool finds a pool by name; nil if there is none.
func (s *State) Pool(name string) *Pool { return s.pool(name) }

func (s *State) pool(name string) *Pool {
	for _, p := range s.Pools() {
		if p.Spec.Name == name {
			return p
		}
	}
	return nil
}

// PoolFor finds the pool that serves a model. A pool that names the model comes first, then one with an endpoint that
// is configured with it as an adapter. Among pools that accept any model, one whose endpoints report the model comes
// before others. An adapter that only endpoints of other pools report belongs to those pools. An empty model means the
// first pool. nil: no pool serves it.
func (s *State) PoolFor(model string) *Pool {
	pools := s.Pools()
	if model == "" && len(pools) > 0 {
		return pools[0]
	}
	var takesAny, told, holds, adapts *Pool
	for _, p := range pools {
		named, wildcard := p.serves(model)
		if named {
			return p
		}
		if wildcard && takesAny == nil {
			takesAny = p
		}
		if holds == nil && slices.ContainsFunc(p.endpoints, func(e *Endpoint) bool { return e.HasLoRA(model) }) {
			holds = p
		}
		switch card := p.reported(model); {
		case card == nil:
		case wildcard && told == nil:
			told = p
		case !wildcard && adapts == nil && card.Parent != "":
			adapts = p
		}
	}
	return cmp.Or(holds, told, adapts, takesAny)
}
