// Package kvtransfer knows how engines hand the KV cache of a prompt from a prefill endpoint to a decode endpoint, and
// keeps what a request needs to go on between the two hops.
//
// A [Dialect] is one engine's way of saying it: what the prefill leg's body differs in from the client's, what to read of
// P's answer, and what D is told beside the client's own body. Each is one file (nixl.go), and every member it writes or
// reads cites the engine release it was read from. Bodies are never modelled: a dialect plans edits of bytes
// ([openai.Patch]) and hands P's object on verbatim ([Answer]).
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
	"errors"
	"fmt"

	"tandem/extproc/openai"
)

// Dialect is one engine's way of handing a prompt's KV cache over from P to D in two hops, one after the other.
// Implementations are immutable and safe for concurrent use.
type Dialect interface {
	// Name is what the configuration calls it (kvTransfer).
	Name() string
	// Prefill plans what the prefill leg's body differs in from the client's. p was Reset to r. At least one member is put
	// in, so the first of the patch's edits is the insertion right after the opening brace.
	Prefill(r *openai.Request, p *openai.Patch)
	// ReadAnswer reads P's answer with status 200. prefillAddr is the ip:port that P was reached at, for objects that name
	// P by an address which is only good on its own machine. An error means that P cannot be understood: nothing of the
	// answer may be sent to D. It wraps [ErrParams] if the answer is JSON.
	ReadAnswer(body []byte, prefillAddr string) (Answer, error)
	// DecodeMember appends to dst what D is told beside the client's body: members to stand right after the opening brace,
	// without the comma behind. params is Answer.Params, not nil.
	DecodeMember(dst []byte, params []byte) []byte
}

// Answer is what P's answer is good for.
type Answer struct {
	// Params is the object for D, checked, P's own bytes but for a repaired address; nil: P holds nothing for D, which
	// computes the prompt itself. It may share memory with the answer's body.
	Params       []byte
	PromptTokens int64 // -1: P did not say
	CachedTokens int64 // of the prompt, found in P's prefix cache; -1: P did not say
	// PromptIDs are the prompt's token ids, a JSON array as it stands in P's answer; nil: P did not say.
	PromptIDs []byte
}

// ErrParams is wrapped by every error about KV parameters that are there and cannot be used.
var ErrParams = errors.New("unusable KV parameters")

// New makes the dialect that the configuration names. "none" has no dialect and is refused like any unknown name.
func New(name string) (Dialect, error) {
	switch name {
	case "nixl":
		return newNIXL(), nil
	default:
		return nil, fmt.Errorf("KV transfer %q is not known: it is one of nixl", name)
	}
}
