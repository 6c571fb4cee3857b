package extproc

import (
	"encoding/base64"

	"tandem/extproc/kvtransfer"
)

// A short answer of P's travels inline: if pass 1 allows it (HeaderCarry), Envoy makes the redirect by itself, with
// the answer in a header, and pass 2 reads it there. That saves the prefill leg's stream and the sealing of a
// second ticket. An answer longer than the configured limit, and any answer but a 200, passes the leg's filter
// (prefillleg.go).

// inlineAnswer makes the ticket of pass 2 from P's answer, which came with pass 1's ticket, as the leg's filter
// does from a longer one. The hand-over's id is derived from the ticket's: it is good for one pass 2.
func (x nextPass) inlineAnswer(t *kvtransfer.Ticket) *kvtransfer.Ticket {
	x.prefilled.observe(t)
	policy, _ := x.s.policy(t.Pool)
	answer := x.msg.Headers.Prefilled
	// in place: the write position stays behind the read position
	n, err := base64.StdEncoding.Decode(answer, answer)
	// the configuration may have changed since pass 1
	next, _ := x.prefilled.settlePrefill(t, 200, answer[:n], err != nil || !policy.Dialect.Inline)
	next.ID = inlineID(t.ID)
	return next
}

// inlineID derives the id of an inline hand-over from that of the prefill leg's ticket. It differs from the id that
// the leg's filter would use: if it is consumed, pass 2 began with an inline answer.
func inlineID(id [16]byte) [16]byte {
	id[0] ^= 0x40
	return id
}
