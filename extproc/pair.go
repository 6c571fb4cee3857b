package extproc

import (
	"tandem/extproc/kvtransfer"
)

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
