package faults

import (
	"cmp"
	"net/http"

	"tandem/extproc/kvtransfer"
	"tandem/extproc/plan"
)

// Leg is which leg of a request has failed.
type Leg int

// The legs. Prefill and Decode are the same legs whether one follows the other or both run at once.
const (
	Prefill Leg = iota
	Decode
	Encode
)

// Facts are what else decides about the meaning of a failed leg.
type Facts struct {
	Last bool // there can be no further pass
	Code int  // of the answer that the client would get, which may be Envoy's own; 0: the engine's
	// DecodeDecides: the answer may be about what P was sent in place of the client's body
	// ([plan.Policy.DecodeDecides]).
	DecodeDecides bool
	Gone          bool // the pool, or its dialect, is gone: nobody can judge P's answer
	Waits         bool // D only stood still until its KV may have been outdated, and no other endpoint can serve
}

// Meaning is what follows from a failed leg, for the request and for the endpoint.
type Meaning struct {
	Client   bool   // the request itself is at fault, and the client gets the answer. No other field is set
	Cause    string // of the next pass
	Excludes bool   // the request does not go to this endpoint again
	Blames   bool   // the endpoint is at fault: it is full, or checked, or has failed
	Loads    bool   // the KV that D was to load may be what failed, if it was to load any ...
	Suspects bool   // ... and D has said so, if others say it, too
}

// Means returns what a failed leg means. No other code decides that; [Faults.Blame] records it.
func Means(leg Leg, f *Failure, x Facts) Meaning {
	switch leg {
	case Decode:
		return decodeMeans(f, &x)
	case Encode: // P encodes by itself, and an endpoint that encodes decodes nothing
		code := cmp.Or(x.Code, f.Status)
		return Meaning{Cause: kvtransfer.CauseEncode, Blames: !plan.ClientsFault(code) && code != http.StatusOK}
	default:
		return prefillMeans(f, &x)
	}
}

func prefillMeans(f *Failure, x *Facts) Meaning {
	code := cmp.Or(x.Code, f.Status)
	another := !x.Last && (code == http.StatusNotFound || x.DecodeDecides)
	switch {
	case plan.ClientsFault(code) && !another:
		return Meaning{Client: true}
	case x.DecodeDecides && f.Status != 0:
		return Meaning{Cause: kvtransfer.CauseRefused}
	case x.Gone:
		return Meaning{Cause: kvtransfer.CausePoolGone}
	case f.NotFound(): // another one may serve the model
		return Meaning{Cause: kvtransfer.CauseModel, Excludes: true}
	}
	return Meaning{Cause: kvtransfer.CausePrefill, Excludes: !f.Full(), Blames: true, Loads: !f.Full()}
}

func decodeMeans(f *Failure, x *Facts) Meaning {
	switch {
	case x.Waits:
		return Meaning{Cause: kvtransfer.CauseOutdated, Blames: true}
	case f.NotFound():
		return Meaning{Cause: kvtransfer.CauseModel, Excludes: true}
	case f.Overdue:
		return Meaning{Cause: kvtransfer.CauseDecode, Excludes: true, Blames: true}
	}
	answered := f.Status != 0 && !f.Full() && !Redirects(f.Status) // a redirect does not come from the engine itself
	return Meaning{
		Cause: kvtransfer.CauseDecode, Excludes: !f.Full(), Blames: true,
		Loads: answered || f.Unknown, Suspects: answered,
	}
}
