package extproc

import (
	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// This file is what some dialects want beyond bodies: both sides of a pair, room in D's buffer, word that KV has arrived,
// and whoever has the prompt's beginning.

// sideOf is what a dialect is told of an endpoint.
func sideOf(e *kvstate.Endpoint) kvtransfer.Side {
	return kvtransfer.Side{Addr: e.Addr, Transfer: e.Transfer}
}

// awaitKV waits until what P has sent is with D, where P is one that sends. D goes on without it in the end: it computes
// what it lacks.
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

// pullBlocks is from how many blocks of difference on (of blockBytes each, some 1,000 tokens in all) a prefix is fetched
// from another endpoint.
const pullBlocks = 8

// pairOf is what a dialect is told of an attempt.
func pairOf(requestID string, attempt [16]byte, prefill, decode kvtransfer.Side) kvtransfer.Pair {
	return kvtransfer.Pair{RequestID: requestID, Attempt: attempt, Prefill: prefill, Decode: decode}
}
