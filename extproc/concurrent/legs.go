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
	"sync"
	"time"

	"tandem/extproc/kvtransfer"
)

// Pairs connects the two legs of one attempt when they run concurrently. Each leg is a stream of its own and must
// learn how the other ends. If another replica serves the other leg, Envoy's access log, which all replicas
// receive, reports its end.
type Pairs struct {
	mu   sync.Mutex
	live map[kvtransfer.ID]*Pair
	idle []idlePair // pairs without a stream, oldest first
}

// Pair is one attempt, by its ticket's id.
type Pair struct {
	streams int

	Ended   chan struct{} // closed when P's leg has ended; then Verdict is set
	Verdict Outcome

	Over    chan struct{} // closed when nobody waits for P's leg any more
	givenUp bool
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

type idlePair struct {
	id    kvtransfer.ID
	since time.Time
}

// How long, and how many, pairs without streams are remembered: the end of one leg may be reported before the other
// leg has begun, and reports of other replicas' pairs arrive too.
const (
	idlePairTime = 10 * time.Second
	maxIdlePairs = 1 << 16
)

// NewPairs returns an empty registry.
func NewPairs() *Pairs { return &Pairs{live: map[kvtransfer.ID]*Pair{}} }

// Enter is called by a stream that serves a leg; Leave must follow.
func (ps *Pairs) Enter(id kvtransfer.ID) *Pair {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at(id)
	p.streams++
	return p
}

// Leave ends what [Pairs.Enter] began.
func (ps *Pairs) Leave(id kvtransfer.ID) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.live[id]; p != nil {
		if p.streams--; p.streams == 0 {
			ps.expire(id)
		}
	}
}

// Report sets the verdict on P's leg. The first one counts.
func (ps *Pairs) Report(id kvtransfer.ID, v Outcome) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at(id)
	select {
	case <-p.Ended:
		return
	default:
	}
	p.Verdict = v
	close(p.Ended)
	if p.streams == 0 {
		ps.expire(id)
	}
}

// GiveUp records that nobody waits for P's leg any more, which may not have begun.
func (ps *Pairs) GiveUp(id kvtransfer.ID) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at(id)
	if p.givenUp {
		return
	}
	p.givenUp = true
	close(p.Over)
	if p.streams == 0 {
		ps.expire(id)
	}
}

// at finds a pair, or creates it. The caller holds the lock.
func (ps *Pairs) at(id kvtransfer.ID) *Pair {
	p := ps.live[id]
	if p == nil {
		p = &Pair{Ended: make(chan struct{}), Over: make(chan struct{})}
		ps.live[id] = p
	}
	return p
}

// expire records that no stream uses a pair now, and forgets pairs without streams for long. The caller holds the
// lock.
func (ps *Pairs) expire(id kvtransfer.ID) {
	now := time.Now()
	ps.idle = append(ps.idle, idlePair{id, now})
	done := 0
	for done < len(ps.idle) && (now.Sub(ps.idle[done].since) > idlePairTime || len(ps.idle)-done > maxIdlePairs) {
		if p := ps.live[ps.idle[done].id]; p != nil && p.streams == 0 {
			delete(ps.live, ps.idle[done].id)
		}
		done++
	}
	if ps.idle = ps.idle[done:]; len(ps.idle) == 0 {
		ps.idle = nil
	}
}
