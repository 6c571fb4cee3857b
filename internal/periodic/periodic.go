// Package periodic calls a function again and again.
package periodic

import (
	"context"
	"time"
)

// Run calls do every so often until ctx ends, first after one interval. now is the time of the tick; of the ticks that
// come while do works, all but one are lost.
func Run(ctx context.Context, every time.Duration, do func(now time.Time)) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			do(now)
		}
	}
}
