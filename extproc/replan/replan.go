// Package replan is what the replan port makes of a ticket, on values: Envoy sends a hop there that failed outright,
// and a pass that no replica decided (docs/adr/0028, 0053). Package extproc has the port.
//
// Nothing comes of a request without a genuine ticket, and each ticket is taken once: engines see the tickets of their
// own legs, and may reach the port.
package replan

import (
	"io"
	"net/http"
	"strconv"

	"tandem/extproc/envoywire"
	"tandem/extproc/kvtransfer"
	"tandem/extproc/openai"
	"tandem/extproc/plan"
)

// Takes reports whether a ticket is one of a hop that may have failed.
func Takes(t *kvtransfer.Ticket) bool {
	switch t.Stage {
	case kvtransfer.PrefillLeg, kvtransfer.DecodeLeg, kvtransfer.PairLegs, kvtransfer.EncodeLeg:
		return true
	default:
		return false
	}
}

// TakesPass reports whether a pass may have begun with a ticket; inline: with P's answer beside it.
func TakesPass(t *kvtransfer.Ticket, inline bool) bool {
	return t.Stage == kvtransfer.Undecided || t.Stage.Redirects() || inline && t.Stage == kvtransfer.PrefillLeg
}

// ID is the name under which the port consumes a ticket. It differs from the hand-over's, which has the ticket's id.
func ID(t *kvtransfer.Ticket) [16]byte {
	id := t.ID
	id[1] ^= 0x80 | byte(t.Stage)
	return id
}

// Failed returns the ticket of the pass after a failed hop, and which hop and address failed. pairsPrefill: of two
// concurrent legs it was P's.
func Failed(t *kvtransfer.Ticket, pairsPrefill bool) (next kvtransfer.Ticket, hop, failed string) {
	next = *t
	next.Stage, next.Params = kvtransfer.Failed, nil
	if t.Stage != kvtransfer.PairLegs { // the id of an attempt names the leg that may still be running
		next.ID = plan.NewID()
	}
	next.Redirects++
	hop, failed, next.Cause = "decode", t.Decode, kvtransfer.CauseDecode
	switch {
	case t.Stage == kvtransfer.PrefillLeg || pairsPrefill:
		hop, failed, next.Cause = "prefill", t.Prefill, kvtransfer.CausePrefill
	case t.Stage == kvtransfer.EncodeLeg:
		hop, next.Cause = "encode", kvtransfer.CauseEncode
	}
	return next, hop, failed
}

// Pass returns the ticket with which another replica repeats a pass, whose body has this length.
func Pass(t *kvtransfer.Ticket, body int) kvtransfer.Ticket {
	next := *t
	next.Cause = kvtransfer.CauseRouter
	next.Redirects++
	if t.Stage == kvtransfer.Undecided { // pass 1
		next.Stage, next.BodyBytes = kvtransfer.Failed, body
	}
	return next
}

// Discard reads the rest of a body, at most limit bytes, and returns its length: Envoy follows a redirect only once the
// request was sent completely.
func Discard(body io.Reader, limit int) int {
	n, _ := io.CopyN(io.Discard, body, int64(limit))
	return int(n)
}

// Refuse answers with an error.
func Refuse(w http.ResponseWriter, e *openai.Error) {
	w.Header().Set("content-type", envoywire.ContentTypeJSON)
	if e.RetryAfter > 0 {
		w.Header().Set(envoywire.HeaderRetryAfter, strconv.Itoa(int(e.RetryAfter.Seconds())))
	}
	w.WriteHeader(e.Status)
	_, _ = w.Write(e.JSON())
}
