package plan

import (
	"slices"
	"strings"
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

// bookingAfter is Decoding for a prompt that prefill computes or has computed; nil: no other endpoint did.
func bookingAfter(prefill *kvstate.Endpoint, tokens, answer int64) kvstate.Booking {
	b := Decoding(tokens)
	b.From, b.Need = prefill, tokens+answer
	return b
}

// Decoding returns the booking of the answer to a prompt of so many tokens.
func Decoding(tokens int64) kvstate.Booking {
	return kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: tokens}
}

// Attempt is what is known about a request before one of its passes is planned.
type Attempt struct {
	Redirects int // that Envoy has followed so far
	Prefills  int // prefill legs tried so far
	Started   time.Time
	Clock     func() time.Time // of the fleet; nil: time.Now
	Excluded  []string         // addresses that failed it
	Encoded   []byte           // members with the encoded media for prefill; nil: none
	Alone     bool             // do not split, whatever the policy
	Why       string           // the reason for Alone

	PairFailed         [2]string // addresses of the pair that failed last, if it is unknown which of the two did
	DecodeFailed       bool      // the last failed hop was to decode
	ConversationFailed bool      // it was a prefill leg that should have fetched the conversation's last answer
}

// Next returns the attempt of a request from the ticket that came back, whichever hop of it failed.
func Next(t *kvtransfer.Ticket) Attempt {
	a := Attempt{
		Redirects: t.Redirects, Prefills: t.Prefills, Started: t.Started, Excluded: t.Excluded,
		DecodeFailed: t.Cause == kvtransfer.CauseDecode, ConversationFailed: t.Cause == kvtransfer.CauseTurn,
	}
	if a.DecodeFailed && t.Loads {
		a.PairFailed = [2]string{t.Prefill, t.Decode}
	}
	return a
}

// Failed applies the pool's onPrefillFailure to an attempt whose ticket says that the prefill failed. An error is the
// client's answer.
func (a *Attempt) Failed(p *Policy, pool *kvstate.Pool, t *kvtransfer.Ticket) error {
	switch t.Cause {
	case kvtransfer.CauseDecode, kvtransfer.CauseTurn, kvtransfer.CausePoolGone:
		return nil
	}
	if !t.Split {
		return nil
	}
	switch p.OnFailure {
	case DecodeAlone:
		a.decodeAlone("prefill_failed")
	case Fail:
		if err := full(pool, kvstate.RolePrefill); err != nil {
			return err
		}
		return openai.Unavailable("prefill_failed", "the prefill of this request failed", time.Second)
	case OtherPrefill:
	}
	return nil
}

// avoided returns the addresses that pass 2 must not choose as D when prefill computes the prompt: those that
// failed the request, and the P of a pair that failed it, which may be dead, if this pass chose another.
func (a *Attempt) avoided(prefill string) []string {
	if p := a.PairFailed[0]; p != "" && p != prefill && !slices.Contains(a.Excluded, p) {
		return append(slices.Clone(a.Excluded), p)
	}
	return a.Excluded
}

func (a *Attempt) decodeAlone(why string) { a.Alone, a.Why = true, why }

// Late reports whether the time for further attempts is over. The first decode after a failed prefill is not
// another attempt, so it is always allowed.
func (a *Attempt) Late(p *Policy) bool { return a.Age() > p.AttemptsTime }

// Age returns the time since the request arrived.
func (a *Attempt) Age() time.Duration { return a.now().Sub(a.Started) }

func (a *Attempt) now() time.Time {
	if a.Clock == nil {
		return time.Now()
	}
	return a.Clock()
}

// Exhausted returns why a request must not go to one more decode endpoint; nil if it may.
func (a *Attempt) Exhausted(p *Policy, decode string) error {
	failedTwice := func(e string) bool { return a.failures(e) >= maxTries }
	why := ""
	switch {
	case a.DecodeFailed && a.Late(p):
		why = "no endpoint answered this request in the time there is for it"
	case a.failures(decode) > 0 && slices.ContainsFunc(a.Excluded, failedTwice):
		why = "every endpoint that could answer this request has failed it" + a.failed()
	default:
		return nil
	}
	return openai.Unavailable("endpoint_failed", why, time.Second)
}

// maxTries is how often one endpoint may fail a request. If every endpoint has failed it, one of them is tried a
// second time, since it may have recovered; the others would only fail it again.
const maxTries = 2

// failures returns how often an endpoint has failed the request.
func (a *Attempt) failures(addr string) (times int) {
	for _, e := range a.Excluded {
		if e == addr {
			times++
		}
	}
	return times
}

// failed names the endpoints that failed the request, for its client: ": 10.0.2.1:8000 (twice)".
func (a *Attempt) failed() string {
	var said []string
	for i, addr := range a.Excluded {
		if slices.Contains(a.Excluded[:i], addr) {
			continue
		}
		if a.failures(addr) >= maxTries {
			addr += " (twice)"
		}
		said = append(said, addr)
	}
	if len(said) == 0 {
		return ""
	}
	return ": " + strings.Join(said, ", ")
}

// Retries returns the endpoints that stay excluded even if no other is left: those that failed the request maxTries
// times.
func (a *Attempt) Retries() []string {
	if len(a.Excluded) == 0 {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(a.Excluded), func(addr string) bool { return a.failures(addr) < maxTries })
}
