package extproc

import (
	"encoding/base64"

	"tandem/extproc/kvtransfer"
)

// A short answer of P's is carried: where pass 1 says so (headerCarry), Envoy makes the redirect of it by itself, with the answer
// in a header, and pass 2 reads it there. That saves a request the prefill leg's stream and the sealing of a second ticket. What
// is longer than the configuration's limit, and whatever is not a 200, passes the leg's filter (leg.go).

// carries reports whether P's answer may come by itself: not where somebody has to wait for the KV or P may have the last word,
// where a hand-over whose client left has to be cleaned up, and not of a traced request, whose hop has a span of its own.
func (x firstPass) carries(policy *Policy) bool {
	return mayCarry(policy) && !policy.CleanupDecode && !x.Recording()
}

// mayCarry is what has to hold of the pool's dialect, in pass 1 and in pass 2.
func mayCarry(policy *Policy) bool { return policy.Dialect.Inline }

// carried makes of P's answer, which came with pass 1's ticket, what the leg's filter makes of a longer one. The hand-over's
// name is made of the ticket's: it is good for one pass 2.
func (x nextPass) carried(t *kvtransfer.Ticket) *kvtransfer.Ticket {
	x.prefilled.observe(t)
	policy, _ := x.s.policy(t.Pool)
	answer := x.msg.Headers.Prefilled
	n, err := base64.StdEncoding.Decode(answer, answer)                                        // in place: what is written lies before what is read next
	next, _ := x.prefilled.settlePrefill(t, 200, answer[:n], err != nil || !mayCarry(&policy)) // the configuration may have changed since pass 1
	next.ID = carriedID(t.ID)
	return next
}

// carriedID is the name of a hand-over that is carried, by the prefill leg's ticket. It differs from the name of one that a leg's filter
// makes, so that whether it is spent says that pass 2 began with a carried one.
func carriedID(id [16]byte) [16]byte {
	id[0] ^= 0x40
	return id
}
