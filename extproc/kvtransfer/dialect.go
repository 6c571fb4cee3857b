// Package kvtransfer knows how engines hand the KV cache of a prompt from a prefill endpoint to a decode endpoint, and
// keeps what a request needs to go on between the two hops.
//
// A [Dialect] is one engine's way of saying it: what the prefill leg's body differs in from the client's, what to read of
// P's answer, and what D is told beside the client's own body. Each is one file (nixl.go, lmcache.go, ...), and every member it writes or
// reads cites the engine release it was read from. Bodies are never modelled: a dialect plans edits of bytes
// ([openai.Patch]) and hands P's object on verbatim ([Answer]).
//
// A [Concurrent] is the same for engines that need both legs at once (sglang.go, mooncake.go, nixlpush.go, moriio.go,
// p2pnccl.go); what such a dialect has to know of an engine beforehand, [Peers] learn.
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
	"strings"
	"time"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Dialect is one engine's way of handing a prompt's KV cache over from P to D in two hops, one after the other.
// Implementations are immutable and safe for concurrent use. What only some dialects need is an interface of its
// own: [Pusher], [PrefixPuller], [TokenAsker], [Continuer], [TurnKeeper].
type Dialect interface {
	// Name is what the configuration calls it (kvTransfer).
	Name() string
	// Speaks reports whether requests to an API can be split in this dialect.
	Speaks(api openai.API) bool
	// Prefill plans what the prefill leg's body differs in from the client's. p was Reset to r.
	Prefill(r *openai.Request, p *openai.Patch, pair *Pair)
	// ReadAnswer reads P's answer with status 200. An error means that P cannot be understood: nothing of the answer may be
	// sent to D. It wraps [ErrParams] if the answer is JSON.
	ReadAnswer(body []byte, pair *Pair) (Answer, error)
	// DecodeMember appends to dst what D is told beside the client's body: members to stand right after the opening brace,
	// without the comma behind. params is Answer.Params, not nil.
	DecodeMember(dst []byte, params []byte) []byte
}

// Pusher is a dialect whose P writes into the memory of the D that it was told of. So pass 2 goes to the D of pass 1, and
// P may have answered before its KV is there.
type Pusher interface {
	// Await waits until the KV of an answered prefill leg is with D, and is false where it is not known to be: D then
	// computes what it lacks. It returns at once when ctx ends.
	Await(ctx context.Context, pair *Pair) bool
	// Patience is the longest that Await takes.
	Patience() time.Duration
}

// Carrier is a dialect whose P's answer is nothing but what ReadAnswer reads of it: it is never the client's, and nobody waits for the KV.
type Carrier interface {
	// Carries marks it.
	Carries()
}

// PrefixPuller is a dialect whose engines fetch a prompt's beginning from whoever has it.
type PrefixPuller interface {
	// Pull plans what the only hop's body differs in from the client's, to fetch from pair.Source, which is not nil. p was
	// Reset to the request.
	Pull(p *openai.Patch, pair *Pair)
}

// TokenAsker is a dialect that may ask P for the prompt's token ids by itself.
type TokenAsker interface {
	// AsksTokenIDs reports whether it does, of requests to that API.
	AsksTokenIDs(a openai.API) bool
}

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
}

// Names are the dialects there are.
func Names() []string {
	return []string{"lmcache", "mooncake-0.13", "moriio-read", "multi", "nixl", "offload", "orchestrated", "shared", "trtllm"}
}

// OfVLLM reports whether a dialect is one of vLLM's, so that the shapes of the answers are known.
func OfVLLM(name string) bool {
	switch name {
	case "lmcache", "mooncake-0.13", "moriio-read", "multi", "nixl", "offload", "mooncake", "nixl-push", "moriio", "p2p-nccl":
		return true
	}
	return false
}

// New makes the dialect that the configuration names. "none" has no dialect and is refused like any unknown name.
func New(o Options) (Dialect, error) {
	switch o.Name {
	case "lmcache":
		d := newLMCache(o.Arrivals, o.NoticeTimeout)
		if o.RetFirstToken {
			return lmcacheFirst{d}, nil
		}
		return d, nil
	case "multi":
		return newMulti(o.Members)
	case "nixl":
		if o.Bidirectional {
			return newNIXLTurns(o.ReuseTokenIDs, o.TurnTTL), nil
		}
		return newNIXL(o.ReuseTokenIDs), nil
	case "mooncake-0.13":
		return mooncakePull{newNIXL(false)}, nil
	case "moriio-read":
		return NewMoRIIORead(1, 1), nil
	case "offload":
		return newOffload(), nil
	case "orchestrated":
		return newOrchestrated(o.Key, o.Params), nil
	case "shared":
		return newShared(), nil
	case "trtllm":
		return newTRTLLM(), nil
	default:
		return nil, fmt.Errorf("KV transfer %.40q is not known: it is one of %s", o.Name, strings.Join(Names(), ", "))
	}
}
