// Package kvtransfer knows how engines hand the KV cache of a prompt from a prefill endpoint to a decode endpoint, and
// keeps what a request needs to go on between the two hops.
//
// A [Dialect] is a value that holds all of one engine's way to do that: how the prefill leg's body differs from the
// client's, what to read of P's answer, and which members D's body has beside the client's own. Each is one file (nixl.go,
// lmcache.go, ...) and one line of makers (dialect.go), and every member it writes or reads cites the engine release it was
// read from. Bodies are never modelled: a dialect plans edits of bytes ([openai.Patch]) and hands P's object on verbatim
// ([Answer]).
//
// [Concurrent] is the part for engines that need both legs at once (sglang.go, mooncake.go, nixlpush.go, moriio.go,
// p2pnccl.go); what such a dialect must know of an engine beforehand, [Peers] learn.
//
// A [Turn] is what a D has kept of an answer, for the P of the conversation's next (turn.go).
//
// A [Ticket] is the state of one request between its passes through Envoy. It travels with the request, in a header,
// sealed under [Keys] that all replicas share: so any replica serves any pass, and none remembers requests. pack.go makes
// the long lists of block ids in it small enough for a header.
//
// What can go wrong here is not only an error but another client's text: an engine reads KV blocks by number and never
// asks whose they are. So everything that comes from outside is checked completely before it is passed on, parameters
// that are not perfectly understood are not sent at all (D then computes the prompt itself, which is always right), and a
// ticket is good for one request id, until one moment, once (the caller spends [Ticket].ID).
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
)

// Dialect is how one engine hands a prompt's KV cache over from P to D. All that Tandem knows of it stands here: a nil
// part means that the dialect does not do that, and the zero value is the dialect of engines that prefill and decode by
// themselves. A Dialect is immutable, and its functions are safe for concurrent use.
type Dialect struct {
	Name   string // in the configuration (kvTransfer)
	Engine string // whose paths clients may ask for, unless the configuration says otherwise: one of the Engine constants
	VLLM   bool   // its engines are vLLM, so the shapes of their answers are known

	// Two hops, one after the other. APIs are the ones whose requests can be split; nil: all.
	APIs []openai.API
	// Prefill plans how the prefill leg's body differs from the client's. p was Reset to r. nil: the legs never follow each other.
	Prefill func(r *openai.Request, p *openai.Patch, pair *Pair)
	// ReadAnswer reads P's answer with status 200. An error means that P cannot be understood: nothing of the answer may be
	// sent to D. It wraps [ErrParams] if the answer is JSON.
	ReadAnswer func(body []byte, pair *Pair) (Answer, error)
	// DecodeMember appends to dst the members that D's body has beside the client's own: they stand right after the opening
	// brace, and the last one is without its comma. params is Answer.Params, not nil.
	DecodeMember func(dst, params []byte) []byte
	Inline       bool         // P's answer can travel in a header: it is never the client's, and nobody waits for the KV
	TokenIDs     []openai.API // for which Prefill itself asks P for the prompt's token ids

	Push  *Push  // P writes into the memory of the D that it was told of
	Turns *Turns // D keeps an answer's blocks for the conversation's next turn
	// Pull plans how the only hop's body differs from the client's, so that the engine fetches the prompt's beginning from
	// pair.Source, which is not nil. p was Reset to the request.
	Pull func(p *openai.Patch, pair *Pair)
	// Continue plans how D's body differs from the client's where D goes on behind P's first token, over /v1/completions
	// whatever the client's API is: D's answer is then the rest of the client's. p was Reset to r, the client's request;
	// params is Answer.Params. [ReadContinuation] reads the result where D's answer is rewritten.
	Continue func(r *openai.Request, p *openai.Patch, params []byte) (answer []byte, err error)

	Concurrent *Concurrent // both legs run at once; Prefill, if not nil, is for a P that is not known yet

	// What the configuration has to know.
	Ports       []Port // that an endpoint says of itself
	RankToRank  bool   // tensor-parallel rank n of P sends to rank n of D: only endpoints with as many ranks are a pair
	DataRanks   bool   // a request can name the data-parallel rank that it is for, of several behind one port
	SameRelease bool   // engines of different releases refuse each other's KV, or read it wrongly
	Reports     Reports
	// Validate returns what cannot work, beyond what holds of every pool.
	Validate func(f *Fleet) []Problem
}

// Reports is what engines must report of themselves to fit the pool.
type Reports struct {
	Connectors []string // as vLLM's kv_connector names them; nil: not known, or another engine
	Alike      []Fact   // what P and D must have in common: otherwise one refuses the other's KV at the handshake
	Ranks      bool     // the legs are told the other side's ranks: transfer.tensorParallelSize has to be right
}

// Fact is something that an engine reports of itself, in words for people.
type Fact string

// The facts that engines must have in common.
const (
	FactModel     Fact = "model"
	FactRevision  Fact = "model revision"
	FactDtype     Fact = "dtype"
	FactKVDtype   Fact = "KV cache dtype"
	FactBlockSize Fact = "block size"
	FactBackend   Fact = "transfer backend"
)

// nixlAlike is what vLLM's NIXL connectors put into the hash that a handshake compares, as far as engines report it
// (0.32.0, v1/nixl/metadata.py, compute_nixl_compatibility_hash), and the revision, of which that hash knows nothing:
// other weights give the wrong text.
func nixlAlike() []Fact { return []Fact{FactModel, FactRevision, FactDtype, FactKVDtype} }

// The engines that a dialect belongs to.
const (
	EngineAny    = "any"
	EngineVLLM   = "vllm"
	EngineSGLang = "sglang"
	EngineTRTLLM = "trtllm"
)

// Push is how P writes into the memory of the D that it was told of. Pass 2 goes to the D of pass 1, and P may have
// answered before its KV is there.
type Push struct {
	// Await waits until the KV of an answered prefill leg is with D, and is false if it is not known to be: D then
	// computes what it lacks. It returns at once when ctx ends.
	Await    func(ctx context.Context, pair *Pair) bool
	Patience time.Duration // the longest that Await takes
}

// Port is one that an endpoint says of itself for the dialect.
type Port struct {
	Name    string       // of the setting, below the endpoint's
	Default uint16       // the engine's own; 0: none
	Roles   kvstate.Role // of the endpoints that have it
	Ranks   bool         // tensor-parallel rank n has the port n above it
	Open    bool         // it accepts TCP connections as soon as the engine runs
}

// PortsOf returns the ports of an endpoint with the role. Where decode cannot work alone, an engine with both roles was
// started for neither leg and has none.
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

// PairsOnly reports whether an engine that was started for one leg cannot answer a request without the other.
func (d *Dialect) PairsOnly() bool { return d.Concurrent != nil && !d.Concurrent.DecodesAlone }

// Registers reports whether the engines announce themselves.
func (d *Dialect) Registers() bool {
	return d.Concurrent != nil && d.Concurrent.Peers != nil && d.Concurrent.Peers.Registers
}

// Speaks reports whether requests to an API can be split into two hops, one after the other.
func (d *Dialect) Speaks(api openai.API) bool {
	return d.Prefill != nil && (d.APIs == nil || slices.Contains(d.APIs, api))
}

// Fleet is what a dialect may judge of a pool as it is configured.
type Fleet struct {
	Discovered bool // the endpoints are discovered, so none is known yet
	Registered bool // the engines register
	Endpoints  []Member
}

// Member is a configured endpoint.
type Member struct {
	Role     string
	Pairs    string // only endpoints with the same text are a pair
	Transfer kvstate.Transfer
}

// Problem is a fault of the configuration.
type Problem struct{ Path, Text string } // Path is below the pool's

// Pair is one attempt at a prefill leg: who takes part in it, and what it is called.
type Pair struct {
	RequestID       string   // x-request-id, the same on both legs and in every attempt
	Attempt         [16]byte // random; new for every attempt
	Prefill, Decode Side
	Source          *Side  // has more of the prompt's beginning than the engine that is to compute it; nil: nobody has
	Turn            *Turn  // what the conversation's last answer left, with which the prompt begins; nil: nothing that could be used
	TurnIDs         []byte // with Turn, the prompt's token ids, a JSON array; nil: the body has them
}

// Side is one side of a pair.
type Side struct {
	Addr     string // ip:port where its API is reached
	Transfer kvstate.Transfer
}

// host is where other engines reach the peer: an address, IPv6 without brackets.
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

// Answer is what P's answer is good for.
type Answer struct {
	// Params are for D, checked, P's own bytes as far as they are P's: what DecodeMember takes. nil: there is nothing to
	// tell D. It may share memory with the answer's body.
	Params []byte
	// Unused says, for the log, why parameters of P's are not handed on although P is well: D computes the prompt.
	Unused string
	// Final, if not nil, is a complete answer for the client: D is not asked.
	Final        []byte
	PromptTokens int64 // -1: P did not say
	CachedTokens int64 // of the prompt, found in P's prefix cache; -1: P did not say
	// WrittenTokens are those of the prompt that P put into its prefix cache, plus one; 0: P did not say.
	WrittenTokens int64
	// Joined is what D's answer lacks for the client, as [openai.ReadInputLogprobs] gives it; nil: nothing.
	Joined []byte
	// PromptIDs are the prompt's token ids, a JSON array as it stands in P's answer; nil: P did not say.
	PromptIDs []byte
}

// ErrParams is wrapped by every error about KV parameters that are there and cannot be used.
var ErrParams = errors.New("unusable KV parameters")

// Options are what a pool's configuration says about its dialect.
type Options struct {
	Name    string   // kvTransfer
	Members []string // of multi

	ReuseTokenIDs bool          // of nixl: D is sent P's token ids (vLLM 0.32 and newer)
	Bidirectional bool          // of nixl: D keeps answers for the next turn, and P fetches them (vLLM 0.21 and newer)
	TurnTTL       time.Duration // with Bidirectional; 0: DefaultTurnTTL

	Arrivals      Arrivals      // of lmcache; nil: its engines send no notices
	NoticeTimeout time.Duration // of lmcache; 0: DefaultNoticeTimeout
	RetFirstToken bool          // of lmcache: P's first token is delivered, and D goes on behind it

	Key    string // of orchestrated; "": DefaultOrchestratedKey
	Params bool   // of orchestrated: hand on P's kv_transfer_params, not the whole answer

	DecodeTP, DecodeDP int // of moriio-read: ranks of the decode endpoints; 0: one
}

// makers are all dialects there are, one for each file.
func makers() []func(*Options) (Dialect, error) {
	return []func(*Options) (Dialect, error){
		lmcacheDialect, mooncakeDialect, mooncakePullDialect, moriioDialect, moriioReadDialect, multiDialect, nixlDialect, nixlPushDialect,
		offloadDialect, orchestratedDialect, p2pNCCLDialect, sglangDialect, sharedDialect, trtllmDialect, trtllmFirstDialect,
	}
}

// All returns the dialects without settings, in the order of their names.
func All() []Dialect {
	var all []Dialect
	for _, dialect := range makers() {
		d, _ := dialect(&Options{}) // multi asks for members, which change nothing of what is static
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

// Named returns a dialect without settings, the zero value if there is none of that name.
func Named(name string) Dialect {
	for _, d := range All() {
		if d.Name == name {
			return d
		}
	}
	return Dialect{}
}

// New returns the dialect that the configuration names. "none" is no dialect, and refused like any unknown name.
func New(o Options) (Dialect, error) {
	for _, dialect := range makers() {
		if d, err := dialect(&o); d.Name == o.Name {
			return d, err
		}
	}
	return Dialect{}, fmt.Errorf("KV transfer %.40q is not known: it is one of %s", o.Name, strings.Join(Names(), ", "))
}
