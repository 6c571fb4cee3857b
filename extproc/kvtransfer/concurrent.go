package kvtransfer

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Concurrent is the part of a dialect in which both legs run at once: P sends, D receives, and each needs the other. Envoy
// sends the request to D and a copy of it to P (docs/adr/0010).
type Concurrent struct {
	DecodesAlone bool // an endpoint that decodes can answer a request without a P
	// CancelsPrefill says what becomes of P's leg when nobody waits for its blocks any more: true, it is cut, and P frees
	// them; false, it runs to its end, because D frees what it reserved only when P has sent.
	CancelsPrefill bool
	PrefillFirst   bool // D's leg is held back until P has answered: D would only wait, at the expense of others
	JoinsAnswers   bool // a part of P's answer may belong into the client's
	OwnGenerate    bool // POST /generate, which names no model, is an API of its engines
	// Unpairable says why a request cannot go over two legs, "" if it can. The reasons are label values.
	Unpairable func(r *openai.Request) string
	// Plan plans how P's body differs from the client's, which is r's and p was Reset to, and returns what else the legs
	// need. Unless D is sent the client's own body at least one member is put in, so the first of the patch's edits is the
	// insertion right after the opening brace. It may not wait. [ErrUnknownPeer] means that P's engine is not known yet.
	Plan func(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error)
	// ReadAnswer reads P's answer with status 200. told is [PairPlan].Decode. An error means that P does not do what D was told
	// it would, so that D waits in vain. The Peer is what P said of itself.
	ReadAnswer func(body, told []byte) (Answer, Peer, error)
	Peers      *PeerSource // how prefill engines become known; nil: they need not be
}

// Legs is one attempt to answer a request with two legs at once.
type Legs struct {
	ID              [16]byte // random, and new for every attempt: rooms and transfer ids are made of it
	RequestID       string   // the client's
	Prefill, Decode *kvstate.Endpoint
	Peer            Peer // what was learnt of P
	DecodePeer      Peer // and of D, where engines register
}

// PairPlan is what the two legs are sent beside P's body.
type PairPlan struct {
	// Decode are the members that D's body has beside the client's own, without a comma behind. nil: those that P's body
	// begins with; empty: none, D's body is the client's own.
	Decode []byte
	// RequestID is the x-request-id of both legs where the engines find each other by it; "": the client's own.
	RequestID string
	// Joined says that a part of P's answer belongs into the client's (Answer.Joined).
	Joined bool
	// PrefillRank and DecodeRank are the x-data-parallel-rank of the legs, "" for none.
	PrefillRank, DecodeRank string
}

// bareHost is where the other leg's engine reaches an endpoint: as configured, or where Envoy reaches it.
func bareHost(e *kvstate.Endpoint) string {
	if e.Transfer.Host != "" {
		return e.Transfer.Host
	}
	addr, err := netip.ParseAddrPort(e.HostPort())
	if err != nil {
		return ""
	}
	return addr.Addr().Unmap().String()
}

// host is bareHost, IPv6 in brackets.
func host(e *kvstate.Endpoint) string {
	h := bareHost(e)
	if ip, err := netip.ParseAddr(h); err == nil && ip.Is6() {
		return "[" + h + "]"
	}
	return h
}

// rankOf is the data-parallel rank of n that an attempt uses.
func (l *Legs) rankOf(n int) int {
	return int(binary.LittleEndian.Uint64(l.ID[8:]) % uint64(max(n, 1)))
}

// port is the configured port, or the engine's own default.
func port(configured, theirs uint16) uint16 {
	if configured != 0 {
		return configured
	}
	return theirs
}

// quote writes a string that needs no escapes as JSON text; anything else is refused.
func quote(dst []byte, s string) ([]byte, error) {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return dst, fmt.Errorf("%q is no plain text", s)
		}
	}
	return append(append(append(dst, '"'), s...), '"'), nil
}
