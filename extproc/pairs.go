package extproc

import (
	"context"
	"sync"
	"time"
)

// pairs connects the two legs of one attempt when they run concurrently. Each leg is a stream of its own and must
// learn how the other ends. If another replica serves the other leg, Envoy's access log, which all replicas
// receive, reports its end.
type pairs struct {
	mu   sync.Mutex
	live map[[16]byte]*pair
	idle []idlePair // pairs without a stream, oldest first
}

// pair is one attempt, by its ticket's id.
type pair struct {
	streams int

	ended   chan struct{} // closed when P's leg has ended; then verdict is set
	verdict outcome

	over    chan struct{} // closed when nobody waits for P's leg any more
	givenUp bool
}

// outcome is how a prefill leg ended.
type outcome struct {
	status int    // of the answer; 0: none
	ok     bool   // D has its blocks
	answer []byte // if the status is the client's fault: P's message
}

// verdictWait is how long a failed D waits for the verdict on P: when P dies, D often fails first. Other replicas
// learn the verdict from Envoy's access log, which is sent every 0.2 s.
const verdictWait = 500 * time.Millisecond

// prefillFailed reports whether P has failed, or fails within verdictWait.
func (p *pair) prefillFailed(ctx context.Context) bool {
	wait := time.NewTimer(verdictWait)
	defer wait.Stop()
	select {
	case <-p.ended:
		return !p.verdict.ok
	case <-wait.C:
	case <-ctx.Done():
	}
	return false
}

type idlePair struct {
	id    [16]byte
	since time.Time
}

// How long, and how many, pairs without streams are remembered: the end of one leg may be reported before the other
// leg has begun, and reports of other replicas' pairs arrive too.
const (
	idlePairTime = 10 * time.Second
	maxIdlePairs = 1 << 16
)

func newPairs() *pairs { return &pairs{live: map[[16]byte]*pair{}} }

// enter is called by a stream that serves a leg; leave must follow.
func (ps *pairs) enter(id [16]byte) *pair {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at(id)
	p.streams++
	return p
}

func (ps *pairs) leave(id [16]byte) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.live[id]; p != nil {
		if p.streams--; p.streams == 0 {
			ps.expire(id)
		}
	}
}

// report sets the verdict on P's leg. The first one counts.
func (ps *pairs) report(id [16]byte, v outcome) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at(id)
	select {
	case <-p.ended:
		return
	default:
	}
	p.verdict = v
	close(p.ended)
	if p.streams == 0 {
		ps.expire(id)
	}
}

// giveUp records that nobody waits for P's leg any more, which may not have begun.
func (ps *pairs) giveUp(id [16]byte) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.at(id)
	if p.givenUp {
		return
	}
	p.givenUp = true
	close(p.over)
	if p.streams == 0 {
		ps.expire(id)
	}
}

// at finds a pair, or creates it. The caller holds the lock.
func (ps *pairs) at(id [16]byte) *pair {
	p := ps.live[id]
	if p == nil {
		p = &pair{ended: make(chan struct{}), over: make(chan struct{})}
		ps.live[id] = p
	}
	return p
}

// expire records that no stream uses a pair now, and forgets pairs without streams for long. The caller holds the
// lock.
func (ps *pairs) expire(id [16]byte) {
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
