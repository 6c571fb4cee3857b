package extproc

import (
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// What some dialects need in addition to bodies: both sides of a pair, the notification that KV has arrived, and
// the endpoint that holds the prompt's prefix.

// sideOf returns what a dialect needs to know of an endpoint.
func sideOf(e *kvstate.Endpoint) kvtransfer.Side {
	return kvtransfer.Side{Addr: e.HostPort(), Transfer: e.Transfer}
}

// awaitKV waits until P's KV has arrived at D, if P pushes it. After a timeout D continues without it and computes
// what is missing.
func (x *prefillAnswer) awaitKV(t *kvtransfer.Ticket) {
	policy, _ := x.s.policy(t.Pool)
	push := policy.Dialect.Push
	if push == nil {
		return
	}
	if !push.Await(x.stream.Context(), &x.pair) && x.stream.Context().Err() == nil {
		x.s.Log.Warn("no word that the KV is with decode: it computes what it lacks", "request_id", x.requestID, "prefill", t.Prefill, "decode", t.Decode)
	}
}

// pullBlocks is the least difference in blocks (of blockBytes each, some 1,000 tokens in all) for which a prefix is
// fetched from another endpoint.
const pullBlocks = 8

// pairOf returns what a dialect needs to know of an attempt.
func pairOf(requestID string, attempt [16]byte, prefill, decode kvtransfer.Side) kvtransfer.Pair {
	return kvtransfer.Pair{RequestID: requestID, Attempt: attempt, Prefill: prefill, Decode: decode}
}
