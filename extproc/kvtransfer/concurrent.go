package kvtransfer

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"

	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Concurrent is the part of a dialect in which both legs run at once: P sends, D receives, and neither works without
// the other. Envoy sends the request to D and a copy of it to P (docs/adr/0010).
type Concurrent struct {
	DecodesAlone bool // a decode endpoint can answer a request without a P
	// CancelsPrefill decides about P's leg when nobody needs its blocks any more. true: it is cancelled, and P frees
	// them. false: it runs to its end, because D frees the blocks that it reserved only when P has sent.
	CancelsPrefill bool
	JoinsAnswers   bool // the client's answer may contain a part of P's
	OwnGenerate    bool // its engines serve POST /generate, which names no model, as an API
	// StreamsLate reports whether D answers a stream of an API with 200 only when it has the first token, and so P's
	// blocks; nil: D does so before it has done anything. release is D's, "" if it is unknown, body
	// is P's.
	StreamsLate func(api openai.API, release string, body []byte) bool
	// Unpairable returns why a request cannot use two legs at once, "" if it can. The reasons are label values.
	Unpairable func(r *openai.Request) string
	// Plan plans the difference between P's body and the client's, and returns what else the legs need. r has the
	// client's body, and p was Reset to it. At least one member is inserted, so the first of
	// the patch's edits is the insertion right after the opening brace. Plan must not block.
	// [ErrUnknownPeer] means that P's engine is not known yet.
	Plan func(r *openai.Request, p *openai.Patch, l *Legs) (PairPlan, error)
	// ReadAnswer reads P's answer with status 200. sent is [PairPlan].Decode. An error means that P will not do what
	// D's members promise, so D waits in vain. The Peer is what the answer reveals about P.
	ReadAnswer func(body, sent []byte) (Answer, Peer, error)
	Peers      *PeerSource // how Tandem learns about prefill engines; nil: it need not
}

// Legs is one attempt to answer a request with two legs at once.
type Legs struct {
	ID              [16]byte // random, and new for every attempt: rooms and transfer ids are derived from it
	RequestID       string   // the client's
	Prefill, Decode *kvstate.Endpoint
	Peer            Peer // what is known about P
}

// PairPlan is what the two legs need besides P's body.
type PairPlan struct {
	// Decode has the members that D's body has in addition to the client's, without a trailing comma. nil: the members
	// that P's body begins with.
	Decode []byte
	// RequestID is the x-request-id of both legs if the engines find each other by it; "": the client's own.
	RequestID string
	// Joined means that the client's answer contains a part of P's (Answer.Joined).
	Joined bool
	// PrefillRank and DecodeRank are the x-data-parallel-rank of the legs, "" for none.
	PrefillRank, DecodeRank string
}

// bareHost returns the host at which the other leg's engine reaches an endpoint: the configured one, or else Envoy's.
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

// host is bareHost with IPv6 in brackets.
func host(e *kvstate.Endpoint) string {
	h := bareHost(e)
	if ip, err := netip.ParseAddr(h); err == nil && ip.Is6() {
		return "[" + h + "]"
	}
	return h
}

// rankOf returns the data-parallel rank, of n, that an attempt uses.
func (l *Legs) rankOf(n int) int {
	return int(binary.LittleEndian.Uint64(l.ID[8:]) % uint64(max(n, 1)))
}

// port returns the configured port, or the engine's own default.
func port(configured, byDefault uint16) uint16 {
	if configured != 0 {
		return configured
	}
	return byDefault
}

// quote appends s as JSON text. It returns an error if s needs escapes.
func quote(dst []byte, s string) ([]byte, error) {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return dst, fmt.Errorf("%q is no plain text", s)
		}
	}
	return append(append(append(dst, '"'), s...), '"'), nil
}

// finish is why an engine has finished an answer, or a part of a batch, in the forms of all APIs.
type finish struct {
	Choices []struct {
		FinishReason json.RawMessage `json:"finish_reason"`
	} `json:"choices"`
	StopReason json.RawMessage `json:"stop_reason"` // messages
	Status     json.RawMessage `json:"status"`      // responses
	Meta       struct {
		FinishReason json.RawMessage `json:"finish_reason"` // SGLang's /generate: an object with a type
	} `json:"meta_info"`
}

// brokenOff returns why an engine did not finish its work, although it answered 200: abort (SGLang and vLLM, of a
// request that was cancelled or could not be served), error (vLLM 0.14), failed and cancelled (responses). "": it has,
// or the answer does not say.
func brokenOff(body []byte) string {
	all := make([]finish, 1)
	if json.Unmarshal(body, &all[0]) != nil && json.Unmarshal(body, &all) != nil {
		return ""
	}
	for i := range all {
		reasons := []json.RawMessage{all[i].StopReason, all[i].Status, all[i].Meta.FinishReason}
		for _, c := range all[i].Choices {
			reasons = append(reasons, c.FinishReason)
		}
		for _, raw := range reasons {
			switch why := reasonOf(raw); why {
			case "abort", "error", "failed", "cancelled":
				return why
			}
		}
	}
	return ""
}

// reasonOf reads a reason that is a word, or an object with a type.
func reasonOf(raw json.RawMessage) string {
	var word string
	var object struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(raw, &word) == nil {
		return word
	}
	_ = json.Unmarshal(raw, &object)
	return object.Type
}
