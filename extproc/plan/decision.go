package plan

import (
	"time"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/kvstate"
)

// Decision is what a pass of a request does next: where it goes, what becomes of its body on the way, and what has to be
// reserved and recorded for it. It is a value: nothing of it has happened.
type Decision struct {
	Leg      string // one of package envoywire's
	Pool     *kvstate.Pool
	Endpoint *kvstate.Endpoint
	Edits    openai.Edits      // of the body as it was received, or as the client sent it
	Ticket   kvtransfer.Ticket // what Reservations and the client's target are still missing in
	Path     string            // of the leg, where it is not the client's
	PerTry   time.Duration     // time limit of the hop; 0: none
	Inline   bool              // of a prefill leg: a short answer may come in a header
	Pair     *Pair             // of two legs at once; nil: one leg
	Sidecar  *SidecarHeaders   // nil: there is no sidecar

	Prefill, Decode Reservation
	Computes        *kvstate.Endpoint // whose cache will hold the prompt; nil: not known
	Affinity        Affinity
	Report          Report
	// Otherwise decides anew where Decode's buffer has no room; nil: it needs none.
	Otherwise func(why string) (*Decision, error)
}

// Reservation is what is to be reserved on an endpoint. The zero value is nothing.
type Reservation struct {
	Endpoint *kvstate.Endpoint
	Booking  kvstate.Booking
	Buffer   int64         // tokens that its receive buffer holds; 0: it has none
	Patience time.Duration // how long to wait for room in it
}

// Affinity is where a request's session is served from now on. The zero value changes nothing.
type Affinity struct {
	Session         uint64
	Prefill, Decode *kvstate.Endpoint // nil: as before
}

// Report is what observers are told of a decision.
type Report struct {
	Route, Reason   string            // label values; Route "": it is not reported
	Prefill, Decode *kvstate.Endpoint // Prefill nil: one endpoint does both
}

// Pair is what Envoy needs to send a request to both endpoints at once.
type Pair struct {
	Prefill *kvstate.Endpoint
	Mirror  string // what becomes of the prefill leg when D's is over: one of package envoywire's
	Plan    kvtransfer.PairPlan
}

// SidecarHeaders are the headers for the routing sidecar beside D: addresses, "" for none.
type SidecarHeaders struct {
	Prefill  string // where the prompt is to be computed; "": at D
	Encoders string // that may encode the request's media, joined by commas: the sidecar spreads the parts over them
	Source   string // that has most of the prompt's beginning, for a dialect that fetches prefixes
}

// Decoding is what the answer to a prompt of so many tokens is booked as.
func Decoding(tokens int64) kvstate.Booking {
	return kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: tokens}
}
