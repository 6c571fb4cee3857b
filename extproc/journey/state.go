package journey

import "tandem/extproc/kvtransfer"

// State is where a request is on its way. Inside Envoy the filter has it in memory; beside Envoy a ticket says it
// ([StateOf]), and Envoy itself knows the rest.
type State int

// The states. A request begins with Reading, ends with Over, and may come back to Waiting from any state between as
// long as the client has nothing of an answer.
const (
	Reading    State = iota // its body comes
	Waiting                 // a pass decides, or waits until it is the request's turn
	Prefilling              // P works for it, or an endpoint that encodes; D was not asked
	BothLegs                // P and D work for it at once
	Decoding                // D was asked, alone or after P. If it fails, the request is planned again
	Checking                // D's answer has a head, and waits for its first byte: it may be another prompt's
	Answering               // the client gets what the endpoint sends
	Continuing              // the client has a part of the answer, and another engine is to go on with it
	Answered                // the answer is Tandem's own, P's in D's place, or another filter's
	Handed                  // another filter begins it again
	Over
)

// IsSent reports whether an endpoint that decodes has the request.
func (s State) IsSent() bool {
	switch s {
	case BothLegs, Decoding, Checking, Answering:
		return true
	default:
		return false
	}
}

// MayFail reports whether the request is planned again if the endpoint that decodes fails.
func (s State) MayFail() bool { return s.IsSent() && s != Answering }

// IsAnswered reports whether nothing more can be decided for the request.
func (s State) IsAnswered() bool { return s >= Answered }

// StateOf returns the state of a ticket's request.
func StateOf(t *kvtransfer.Ticket) State {
	switch t.Stage {
	case kvtransfer.PrefillLeg, kvtransfer.EncodeLeg:
		return Prefilling
	case kvtransfer.PairLegs:
		return BothLegs
	case kvtransfer.DecodeLeg:
		return Decoding
	default:
		return Waiting
	}
}
