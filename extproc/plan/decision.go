package plan

import (
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// The legs of a request: each is a route of Envoy's. "Redirects" are those that Envoy follows by itself.
const (
	LegPrefill = "prefill" // prefill-leg listener first, replan port second; redirects are followed
	LegDecode  = "decode"  // the endpoint first, replan port second; redirects are followed
	LegPass    = "pass"    // the endpoint, whose answer goes to the client
	LegOther   = "other"   // as pass; but after a 404, or if it cannot be reached, replan port second
	LegAnswer  = "answer"  // as decode, through the answer-leg listener, where the answer is rewritten
	LegEncode  = "encode"  // encode-leg listener first, replan port second; redirects are followed
	LegPair    = "pair"    // both legs at once: decode-leg listener, and a copy to the prefill-mirror listener
)

// Decision is what a pass of a request does next: where it goes, how its body is edited, and what must be reserved
// and recorded. It is a value: none of it has happened yet.
type Decision struct {
	Leg      string // one of the leg constants
	Pool     *kvstate.Pool
	Endpoint *kvstate.Endpoint
	Edits    openai.Edits      // of the body as received, or as the client sent it
	Ticket   kvtransfer.Ticket // without Reservations and the client's target, which are added later
	Path     string            // of the leg, if it is not the client's
	PerTry   time.Duration     // time limit of the hop; 0: none
	Inline   bool              // of a prefill leg: a short answer may travel in a header
	Pair     *Pair             // for concurrent legs; nil: one leg
	Sidecar  *SidecarHeaders   // nil: no sidecar

	Prefill, Decode Reservation
	Computes        *kvstate.Endpoint // the endpoint whose cache will hold the prompt; nil: unknown
	Affinity        Affinity
	Report          Report
	Direct          bool     // the prefill call is to be made before the hop: its answer completes Edits
	Gateway         *Gateway // of a gateway's request, which has no ticket; nil: it has one
	// Lost is why D has to compute the prompt, although its KV is there; nil: it does not.
	Lost error
}

// Reservation is a reservation to make on an endpoint. The zero value is none.
type Reservation struct {
	Endpoint *kvstate.Endpoint
	Booking  kvstate.Booking
	// capacity of its receive buffer, tokens; 0: it has none. If there is no space in time, the request goes Alone
	Buffer   int64
	Patience time.Duration // how long to wait for space in it
}

// Affinity is the new session affinity of a request. The zero value changes nothing.
type Affinity struct {
	Session         uint64
	Prefill, Decode *kvstate.Endpoint // nil: unchanged
}

// Report is what observers learn of a decision.
type Report struct {
	Route, Reason   string            // label values; an empty Route is not reported
	Prefill, Decode *kvstate.Endpoint // Prefill nil: one endpoint does both
}

// Pair is what Envoy needs to send a request to both endpoints concurrently.
type Pair struct {
	Prefill *kvstate.Endpoint
	Cancel  bool // cut the prefill leg when nobody waits for its blocks any more
	Plan    kvtransfer.PairPlan
}

// SidecarHeaders are the headers for the routing sidecar at D: addresses, "" for none.
type SidecarHeaders struct {
	Prefill  string // which endpoint computes the prompt; "": D
	Encoders string // endpoints that may encode the request's media, comma-separated; the sidecar distributes the parts
	Source   string // endpoint with the longest prefix of the prompt, for a dialect that fetches prefixes
}

// bookingAfter is Decoding for a prompt of which the endpoint prefill computes the KV; nil: no other endpoint does.
func bookingAfter(prefill *kvstate.Endpoint, tokens, answer int64) kvstate.Booking {
	b := Decoding(tokens)
	b.From, b.Need = prefill, tokens+answer
	return b
}

// Decoding returns the booking of the answer to a prompt with that many tokens.
func Decoding(tokens int64) kvstate.Booking {
	return kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: tokens}
}
