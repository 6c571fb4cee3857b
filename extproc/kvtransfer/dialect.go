// Package kvtransfer implements the ways in which engines hand the KV cache of a prompt from a prefill endpoint to a
// decode endpoint, and the state that a request carries between the two hops.
//
// A [Dialect] is a value that describes one engine's way: how the prefill leg's body differs from the client's, which
// parts of P's answer to read, and which members D's body has in addition to the client's. Each dialect is one file
// (nixl.go, lmcache.go, ...) and one line of makers (dialect.go), and every member that it writes or reads cites the
// engine release it was read from. Bodies are never modelled: a dialect plans edits of bytes ([openai.Patch]) and
// passes P's object on verbatim ([Answer]).
//
// [Concurrent] is the part for engines that need both legs at once (sglang.go, mooncake.go, nixlpush.go, moriio.go,
// trtllmfirst.go). [Peers] learns the facts about an engine that such a dialect needs beforehand.
//
// A [Ticket] is the state of one request between its passes through Envoy. It travels with the request, in a header,
// sealed under [Keys] that all replicas share: so any replica serves any pass, and none remembers requests. Package
// packed makes the long lists of block ids in it small enough for a header.
//
// A mistake here may not only fail a request but answer it with another client's text: an engine reads KV blocks by
// number and never checks whose they are. So all outside input is checked completely before it is passed on,
// parameters that are not perfectly understood are not sent at all (D then computes the prompt itself, which is always
// right), and a ticket is good for one request id, until one moment, once (the caller consumes [Ticket].ID).
package kvtransfer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
	"tandem/kvstate/standstill"
)

// Dialect is one engine's way to hand a prompt's KV cache from P to D. All that Tandem knows of it is here: a nil part
// means that the dialect does not do that. The zero value is the dialect of engines that prefill and decode by
// themselves. A Dialect is immutable, and its functions are safe for concurrent use.
type Dialect struct {
	Name string // in the configuration (kvTransfer)
	// the engine whose paths clients may use, unless the configuration overrides it: one of the Engine constants
	Engine  string
	Engines Engines

	// Two hops, one after the other. APIs lists the APIs whose requests can be split; nil: all.
	APIs []openai.API
	// Prefill plans the difference between the prefill leg's body and the client's. p was Reset to r. nil: the legs
	// never follow each other.
	Prefill func(r *openai.Request, p *openai.Patch, pair *Pair)
	// ReadAnswer reads P's answer with status 200. An error means that P's answer is not understood, and nothing of it
	// may be sent to D. The error wraps [ErrParams] if the answer is JSON.
	ReadAnswer func(body []byte, pair *Pair) (Answer, error)
	// DecodeMember appends to dst the members that D's body has in addition to the client's, without a trailing comma.
	// They are inserted right after the opening brace. params is Answer.Params, not nil.
	DecodeMember func(dst, params []byte) []byte
	// Completion plans D's body of a completion in place of DecodeMember, where that changes the client's prompt. p was
	// Reset to the client's request; params is Answer.Params, not nil.
	Completion func(p *openai.Patch, params []byte) error
	Hold
	TokenIDs []openai.API // APIs for which Prefill already asks P for the prompt's token ids

	Push *Push // P writes into the memory of a D that is named in its request
	// Pull plans the body of a request with a single hop, so that the engine fetches the prompt's beginning from
	// pair.Source, which is not nil. p was Reset to the request.
	Pull func(p *openai.Patch, pair *Pair)
	// Continue plans D's body if D continues after P's first token. It always goes over /v1/completions, whatever the
	// client's API: D's answer is then the rest of the client's. p was Reset to r, the client's request; params is
	// Answer.Params. [ReadContinuation] reads the result when D's answer is rewritten.
	Continue func(r *openai.Request, p *openai.Patch, params []byte) (answer []byte, err error)

	Concurrent *Concurrent // both legs run at once; Prefill, if not nil, is for a P that is not known yet

	// For the configuration.
	Ports    []Port   // ports that an endpoint configures for the dialect
	RankRule RankRule // which tensor-parallel sizes of P and D fit each other
	Reports  Reports
	// Validate returns the faults of a pool, beyond the rules for every pool.
	Validate func(endpoints []Member) []Problem
}

// Engines has what is true of all engines of a dialect.
type Engines struct {
	VLLM      bool // they are vLLM, so the shapes of their answers are known
	DataRanks bool // a request can select a data-parallel rank, of several behind one port
	// They serve either leg of any request, so that an endpoint's role is only the router's word: vLLM's NIXL connector
	// with kv_role kv_both (0.32.0: one engine computes prompts for others beside its own answers, and fetches from
	// those that fetch from it), and the stores that every engine both reads and writes.
	EitherLeg bool
	// They may also have KV from a store, which keeps what their own memory has evicted.
	Store bool
	// No real engine has run with it here: the simulator is made from their source (docs/protocols.md).
	Experimental bool
}

// Hold says how long P keeps blocks for D, and how D learns of them.
type Hold struct {
	// P's answer can travel in a header: it never goes to the client, and nothing waits for the KV
	Inline bool
	// Lease is how long P keeps blocks that D has not fetched. A D that comes later reads whatever they hold by then.
	// 0: a D that comes late finds nothing, or cannot come.
	Lease time.Duration
	// Final: nothing renews the lease, so a D that is busy for long comes late too.
	Final bool
	// Expiry writes into the parameters for D when their lease ends, and D declines what has expired; nil: it cannot.
	Expiry *Expiry
}

// RankRule says which tensor-parallel sizes of P and D fit each other.
type RankRule uint8

// The rules.
const (
	AnyRanks      RankRule = iota
	RankToRank             // rank n of P sends to rank n of D: only endpoints with equally many ranks pair
	RankMultiples          // one size is a multiple of the other: the engine asserts it at the handshake
)

// Reports lists the facts that engines must report for them to fit the pool.
type Reports struct {
	Connectors []string // names of vLLM's kv_connector; nil: unknown, or another engine
	Stores     []string // with Connectors nil: connectors of other dialects that can use a store, too
	// Alike are the facts in which P and D must agree: otherwise one refuses the other's KV, or takes it for what it is
	// not. [Dialect.Alike] has these, and what the rules of ranks and releases add.
	Alike   kvstate.FactSet
	Release bool // engines of different releases refuse each other's KV, or misread it
	Ranks   bool // each leg's request names the other side's ranks: transfer.tensorParallelSize has to be right
}

// vllmAlike returns the facts in which the engines of a pair must agree with any connector of vLLM. Each fact but the
// release changes what a block contains, or what its number means. docs/protocols.md#which-engines-fit-each-other says
// which of them engines check themselves.
func vllmAlike() kvstate.FactSet {
	return kvstate.FactsOf(kvstate.FactModel, kvstate.FactRevision, kvstate.FactQuantization, kvstate.FactDtype,
		kvstate.FactKVDtype, kvstate.FactBlockSize, kvstate.FactKVLayout, kvstate.FactAttention,
		kvstate.FactSlidingWindow, kvstate.FactHybrid, kvstate.FactSpeculation)
}

// storeAlike is vllmAlike of engines that find blocks by their hashes.
func storeAlike() kvstate.FactSet { return vllmAlike() | kvstate.FactsOf(kvstate.FactHashing) }

// ranks returns the fact that holds a rule of tensor-parallel sizes; none for AnyRanks.
func (r RankRule) ranks() kvstate.FactSet {
	switch r {
	case RankToRank:
		return kvstate.FactsOf(kvstate.FactRanks)
	case RankMultiples:
		return kvstate.FactsOf(kvstate.FactRankMultiples)
	}
	return 0
}

// Alike returns the facts in which the engines of a pair must agree.
func (d *Dialect) Alike() kvstate.FactSet {
	if d.Prefill == nil && d.Concurrent == nil {
		return 0
	}
	alike := d.Reports.Alike | d.RankRule.ranks()
	if d.Reports.Release {
		alike |= kvstate.FactsOf(kvstate.FactRelease)
	}
	return alike
}

// The engines that a dialect belongs to.
const (
	EngineAny    = "any"
	EngineVLLM   = "vllm"
	EngineSGLang = "sglang"
	EngineTRTLLM = "trtllm"
)

// Push describes a P that writes into the memory of a D named in its request. Pass 2 goes to the D of pass 1, and P
// may answer before its KV has arrived.
type Push struct {
	// Await waits until the KV of an answered prefill leg has arrived at D. It returns false if that is not known: D
	// then computes what it lacks. It returns at once when ctx ends.
	Await    func(ctx context.Context, pair *Pair) bool
	Patience time.Duration // the maximum time of Await
	// ChunkTokens is the size of a chunk in D's buffer. D takes a chunk if its own cache lacks a part of it; other
	// chunks stay in the buffer. 0: D takes everything.
	ChunkTokens int64
}

// LeavesAll reports whether D would leave all that P pushes of a prompt in its buffer, because its own cache holds the
// prompt except for a part of a chunk. All are in tokens.
func (p *Push) LeavesAll(prompt, held int64) bool {
	return p.ChunkTokens > 0 && held >= min(p.ChunkTokens, prompt) && prompt-held < p.ChunkTokens
}

// Port is a port that an endpoint configures for the dialect.
type Port struct {
	Name    string       // of the setting, below the endpoint's
	Default uint16       // the engine's default; 0: none
	Roles   kvstate.Role // of the endpoints that have it
	Ranks   bool         // tensor-parallel rank n uses the port n above it
	Open    bool         // it accepts TCP connections as soon as the engine runs
}

// PortsOf returns the ports of an endpoint with the role. If decode cannot work alone, an endpoint with both roles has
// none: such an engine is not started for either leg.
func (d *Dialect) PortsOf(role kvstate.Role) (ports []Port) {
	if role == kvstate.RoleBoth && d.PairsOnly() {
		return nil
	}
	for _, p := range d.Ports {
		if p.Roles&role != 0 {
			ports = append(ports, p)
		}
	}
	return ports
}

// PairsOnly reports whether engines cannot answer a request without the other leg.
func (d *Dialect) PairsOnly() bool { return d.Concurrent != nil && !d.Concurrent.DecodesAlone }

// LateAfter returns how long D may take to begin an answer. One that begins later is checked: D may have stood still
// until the lease was over. 0: there is no such limit.
func (d *Dialect) LateAfter() time.Duration {
	if d.Expiry != nil {
		return 0
	}
	if d.Final {
		return standstill.LatestFetch(d.Lease)
	}
	return d.Lease / 10
}

// HandOverTTL returns for how long after P's answer its parameters may go to D: ttl, and a third of the lease at most.
// So D still has at least half of the lease when it gets them, and it may stand still for that long before it is
// noticed (docs/adr/0050).
func (d *Dialect) HandOverTTL(ttl time.Duration) time.Duration {
	if d.Lease > 0 {
		return min(ttl, d.Lease/3)
	}
	return ttl
}

// Speaks reports whether requests to an API can be split into two hops, one after the other.
func (d *Dialect) Speaks(api openai.API) bool {
	return d.Prefill != nil && (d.APIs == nil || slices.Contains(d.APIs, api))
}

// Member is a configured endpoint, as far as a dialect validates it. A pool whose endpoints are discovered has none.
type Member struct {
	Role     string
	Pairs    string // only endpoints with the same text pair
	Transfer kvstate.Transfer
}

// Problem is a fault of the configuration.
type Problem struct{ Path, Text string } // Path is below the pool's

// Pair is one attempt at a prefill leg: its endpoints and its names.
type Pair struct {
	RequestID       string   // x-request-id, the same on both legs and in every attempt
	Attempt         [16]byte // random; new for every attempt
	Prefill, Decode Side
	// an endpoint that holds more of the prompt's beginning than the engine that computes it; nil: none
	Source *Side
}

// Side is one side of a pair.
type Side struct {
	Addr     string // ip:port where its API is reached
	Transfer kvstate.Transfer
	// Unsure: another engine may have answered in its place, so the answer must name its engine, if the dialect's
	// answers do.
	Unsure bool
}

// host returns the address at which other engines reach the peer, IPv6 without brackets.
func (p *Side) host() string {
	if p.Transfer.Host != "" {
		return p.Transfer.Host
	}
	if reached, err := netip.ParseAddrPort(p.Addr); err == nil {
		return reached.Addr().Unmap().String()
	}
	host, _, _ := net.SplitHostPort(p.Addr)
	return host
}

// Answer is the useful part of P's answer.
type Answer struct {
	// Params are the checked parameters for D, the input of DecodeMember, in P's own bytes where P wrote them. nil: D
	// gets none. It may share memory with the answer's body.
	Params []byte
	// Unused is the reason, for the log, why P's parameters are not passed on although P is well: D computes the
	// prompt.
	Unused string
	// Final, if not nil, is a complete answer for the client: there is no decode leg.
	Final        []byte
	PromptTokens int64 // -1: unknown
	CachedTokens int64 // of the prompt, found in P's prefix cache; -1: unknown
	// WrittenTokens is the number of prompt tokens that P wrote to its prefix cache, plus one; 0: unknown.
	WrittenTokens int64
	// Joined is the part of P's answer that the client's answer needs, from [openai.ReadInputLogprobs]; nil: none.
	Joined []byte
	// PromptIDs are the prompt's token ids, a JSON array as it stands in P's answer; nil: unknown.
	PromptIDs []byte
}

// ErrParams is wrapped by every error about KV parameters that are present but unusable.
var ErrParams = errors.New("unusable KV parameters")

// Options are the settings of a pool's dialect.
type Options struct {
	Name    string   // kvTransfer
	Members []string // of multi

	ReuseTokenIDs bool          // of nixl: D receives P's token ids (vLLM 0.32 and newer)
	Lease         time.Duration // of nixl and moriio-read; 0: the engine's default
	Clocks        Clocks        // of nixl: D declines KV whose lease is over (vLLM 0.26 and newer); nil: it does not

	Arrivals      Arrivals      // of lmcache; nil: its engines send no notifications
	NoticeTimeout time.Duration // of lmcache; 0: DefaultNoticeTimeout
	ChunkTokens   int64         // of lmcache; 0: 256
	RetFirstToken bool          // of lmcache: the client gets P's first token, and D continues after it

	Key    string // of orchestrated; "": DefaultOrchestratedKey
	Params bool   // of orchestrated: pass on P's kv_transfer_params, not the whole answer

	DecodeTP, DecodeDP int // of moriio-read: ranks of the decode endpoints; 0: one
}

// makers returns the constructors of all dialects, one for each file.
func makers() []func(*Options) (Dialect, error) {
	return []func(*Options) (Dialect, error){
		lmcacheDialect, mooncakeDialect, moriioDialect, moriioReadDialect, multiDialect,
		nixlDialect, nixlPushDialect,
		offloadDialect, orchestratedDialect, sglangDialect, sharedDialect, trtllmDialect, trtllmFirstDialect,
	}
}

// All returns the dialects without settings, in the order of their names.
func All() []Dialect {
	var all []Dialect
	for _, dialect := range makers() {
		d, _ := dialect(&Options{}) // multi without its members is an error, but its static fields are set
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b Dialect) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// Names returns the names of all dialects, in order.
func Names() (names []string) {
	for _, d := range All() {
		names = append(names, d.Name)
	}
	return names
}

// EitherLegNames returns the names of the dialects with EitherLeg, in order.
func EitherLegNames() (names []string) {
	for _, d := range All() {
		if d.Engines.EitherLeg {
			names = append(names, d.Name)
		}
	}
	return names
}

// Named returns the dialect of that name without settings; the zero value if there is none.
func Named(name string) Dialect {
	for _, d := range All() {
		if d.Name == name {
			return d
		}
	}
	return Dialect{}
}

// New returns the configured dialect. "none" is not a dialect, and refused like any unknown name.
func New(o Options) (Dialect, error) {
	for _, dialect := range makers() {
		if d, err := dialect(&o); d.Name == o.Name {
			return d, err
		}
	}
	return Dialect{}, fmt.Errorf("KV transfer %.40q is not known: it is one of %s", o.Name, strings.Join(Names(), ", "))
}
