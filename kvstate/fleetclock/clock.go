// Package fleetclock is the one time base of the replicas of a fleet (docs/adr/0053).
package fleetclock

import (
	"sync/atomic"
	"time"
)

// Clock is the clock of what replicas give each other with a time: tickets, stored turns. With Redis it is Redis's,
// as this replica estimates it, so that the clocks of the replicas' hosts do not matter; without Redis, and until the
// first estimate, it is the host's. The zero value is ready. It is safe for concurrent use.
type Clock struct{ last atomic.Pointer[clockReading] }

// clockReading is what the fleet's clock showed at a moment, which has a monotonic reading: a host's clock may be set.
type clockReading struct{ at, fleet time.Time }

// Now returns the fleet's time.
func (c *Clock) Now() time.Time {
	if r := c.last.Load(); r != nil {
		return r.fleet.Add(time.Since(r.at))
	}
	return time.Now()
}

// sameTime is the difference that an estimate may always have: a stream's ids are whole milliseconds.
const sameTime = 2 * time.Millisecond

// Set sets what the fleet's clock showed at a moment of the host's. The estimate may be off by this much: if
// the clock may be right as it is, it stays.
func (c *Clock) Set(at, fleet time.Time, off time.Duration) {
	if r := c.last.Load(); r != nil && r.fleet.Add(at.Sub(r.at)).Sub(fleet).Abs() <= off+sameTime {
		return
	}
	c.last.Store(&clockReading{at, fleet})
}

// Ahead returns by how much the host's clock is ahead of the fleet's.
func (c *Clock) Ahead() time.Duration {
	r := c.last.Load()
	if r == nil {
		return 0
	}
	return time.Now().Round(0).Sub(c.Now().Round(0)) // the wall clocks
}

// MaxAhead is the difference of a host's clock, either way, from which an operator is warned.
const MaxAhead = 2 * time.Second
