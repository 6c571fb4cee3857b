package faults

import (
	"context"
	"time"

	"tandem/extproc/attempts"
	"tandem/extproc/kvtransfer"
)

// The replan port gets Envoy's next try, which does not say how the one before it failed. Envoy's log of failed tries
// does, at about the same moment.

// tries has the failures of the latest tries. The zero value is ready to use.
type tries struct{ attempts attempts.Table[try] }

type try struct {
	known   chan struct{} // closed when failure is set
	failure Failure
}

func newTry() *try { return &try{known: make(chan struct{})} }

// report records how a try failed. The first report of a ticket counts.
func (l *tries) report(id kvtransfer.ID, f Failure) {
	l.attempts.Tell(id, newTry, func(t *try) {
		select {
		case <-t.known:
		default:
			t.failure = f
			close(t.known)
		}
	})
}

// await returns how the try of a ticket failed, once that is known; false if it is not within a time.
func (l *tries) await(ctx context.Context, id kvtransfer.ID, within time.Duration) (Failure, bool) {
	t := l.attempts.Enter(id, newTry)
	defer l.attempts.Leave(id)
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-t.known:
		return t.failure, true
	case <-timer.C:
	case <-ctx.Done():
	}
	return Failure{}, false
}
