package kvtransfer

import "slices"

// Causes of a failed hop (Ticket.Cause), also label values of metrics.
const (
	CausePrefill = "prefill" // the prefill leg failed, or its answer could not be used
	CauseRouter  = "router"  // a replica failed while it decided a pass, which is repeated
	CauseEncode  = "encode"  // the encode leg failed: prefill encodes by itself
	CauseDecode  = "decode"  // the decode leg failed before it answered: its KV parameters count as consumed
	// CauseOutdated: the decode endpoint stood still until its KV parameters may have been outdated, and no other one
	// can serve the request. It is waited for, and computes the prompt itself.
	CauseOutdated = "outdated"
	CauseStream   = "stream" // the decode leg failed in the middle of its stream, which is continued
	CauseMoved    = "moved"  // another endpoint continues the stream, by order or because its own is silent
	// CauseRefused: P refused the body that Tandem had changed. Decode alone decides, and no endpoint is at fault.
	CauseRefused = "refused"
	// CauseModel: an endpoint answered 404, so it does not serve the model, or not any more.
	CauseModel = "model"
	// CauseExpired and CauseSpent: the hand-over came too late, or was consumed already.
	CauseExpired = "hand_over_expired"
	CauseSpent   = "hand_over_spent"
	// CausePoolGone: the pool was removed, or its dialect changed, between the hops. No endpoint is at fault.
	CausePoolGone = "pool_gone"
)

// Cause describes a cause for operators.
type Cause struct {
	Name  string
	At    func(*Ticket) string // the endpoint that failed; nil: none did
	Words string
	Lost  bool // P's work is lost, so the pool's policy for failed prefills decides what follows
	// DecodeFailed: the decode leg failed before its answer began. Another D is tried while there is time for it, and
	// the pair is avoided if D had KV to load.
	DecodeFailed bool
}

// Causes returns all causes.
func Causes() []Cause {
	prefill := func(t *Ticket) string { return t.Prefill }
	decode := func(t *Ticket) string { return t.Decode } // also the endpoint of an encode leg
	last := func(t *Ticket) string { return t.Excluded[len(t.Excluded)-1] }
	return []Cause{
		{Name: CausePrefill, At: prefill, Words: "prefill", Lost: true},
		{Name: CauseRefused, At: prefill, Words: "prefill, which refused what it was sent"},
		{Name: CauseModel, At: last, Words: "an endpoint that does not serve the model"},
		{Name: CauseDecode, At: decode, Words: "decode", DecodeFailed: true},
		{
			Name: CauseOutdated, At: decode, DecodeFailed: true,
			Words: "decode, which stood still beyond the lease of the KV and was waited for",
		},
		{Name: CauseStream, At: decode, Words: "decode, within a stream that was continued"},
		{Name: CauseMoved, At: decode, Words: "decode, whose stream was moved"},
		{Name: CauseEncode, At: decode, Words: "encode", Lost: true},
		{Name: CauseRouter, Words: "the replica of Tandem that decided", Lost: true},
		{Name: CauseExpired, Words: "the hand-over from prefill to decode was too old", Lost: true},
		{Name: CauseSpent, Words: "the hand-over from prefill to decode was consumed already", Lost: true},
		{Name: CausePoolGone, Words: "the pool was removed or changed between the hops"},
	}
}

// CauseOf returns a cause by its name; false: there is none.
func CauseOf(name string) (Cause, bool) {
	all := Causes()
	i := slices.IndexFunc(all, func(c Cause) bool { return c.Name == name })
	if i < 0 {
		return Cause{}, false
	}
	return all[i], true
}
