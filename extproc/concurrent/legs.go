// Package concurrent is about requests whose two legs run concurrently: P sends its KV while D receives it, so each
// needs the other. Envoy sends such a request to D through the listener decode-leg, and a copy of it to P through the
// listener prefill-mirror (docs/adr/0010). The body that leaves pass 1 is P's.
//
//   - [Pairs] is where the two legs of an attempt meet: each learns how the other ends (legs.go).
//   - [SetHeaders] and [DecodeEdits] are what Envoy needs for the legs, and D's body (wire.go).
//
// Package plan decides for both legs ([plan.BothLegs]); package extproc has the handlers of their filters.
package concurrent

import (
	"time"

	"tandem/extproc/attempts"
	"tandem/extproc/kvtransfer"
)

// Pairs connects the two legs of one attempt when they run concurrently. Each leg is a stream of its own and must
// learn how the other ends. If another replica serves the other leg, Envoy's access log, which all replicas
// receive, reports its end.
type Pairs struct{ attempts attempts.Table[Pair] }

// Pair is one attempt.
type Pair struct {
	Verdict *attempts.First[Outcome]  // how P's leg has ended
	Over    *attempts.First[struct{}] // nobody waits for P's leg any more
}

func newPair() *Pair {
	return &Pair{Verdict: attempts.NewFirst[Outcome](), Over: attempts.NewFirst[struct{}]()}
}

// Outcome is how a prefill leg ended.
type Outcome struct {
	Status     int           // of P's answer; 0: none
	RetryAfter time.Duration // of that
	Unreached  bool          // there was no connection to P
	OK         bool          // D has its blocks
	Answer     []byte        // if the status is the client's fault: P's message
}

// VerdictWait is how long a failed D waits for the verdict on P: when P dies, D often fails first. Other replicas
// learn the verdict from Envoy's access log, which is sent every 0.2 s.
const VerdictWait = 500 * time.Millisecond

// Enter is called by a stream that serves a leg; Leave must follow.
func (ps *Pairs) Enter(id kvtransfer.ID) *Pair { return ps.attempts.Enter(id, newPair) }

// Leave ends what [Pairs.Enter] began.
func (ps *Pairs) Leave(id kvtransfer.ID) { ps.attempts.Leave(id) }

// Report sets the verdict on P's leg. The first one counts.
func (ps *Pairs) Report(id kvtransfer.ID, v Outcome) {
	ps.attempts.Update(id, newPair, func(p *Pair) { p.Verdict.Set(v) })
}

// GiveUp records that nobody waits for P's leg any more, which may not have begun.
func (ps *Pairs) GiveUp(id kvtransfer.ID) {
	ps.attempts.Update(id, newPair, func(p *Pair) { p.Over.Set(struct{}{}) })
}
