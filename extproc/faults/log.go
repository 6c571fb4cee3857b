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
type tries struct {
	attempts attempts.Table[attempts.First[Failure]]
}

// report records how a try failed. The first report of a ticket counts.
func (l *tries) report(id kvtransfer.ID, f Failure) {
	l.attempts.Update(id, attempts.NewFirst[Failure], func(t *attempts.First[Failure]) { t.Set(f) })
}

// await returns how the try of a ticket failed, as soon as that is known; false if it is not known within a time.
func (l *tries) await(ctx context.Context, id kvtransfer.ID, within time.Duration) (Failure, bool) {
	t := l.attempts.Enter(id, attempts.NewFirst[Failure])
	defer l.attempts.Leave(id)
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-t.Done():
		return t.Value(), true
	case <-timer.C:
	case <-ctx.Done():
	}
	return Failure{}, false
}
