// Package lag counts how late replicas learn what others publish.
package lag

import (
	"sync/atomic"
	"time"
)

// Lag is the time from another replica's routing of a batch's first prompt until all are known here; batches published
// before this replica joined do not count. It uses Redis's clock, so it is right to some milliseconds whatever the
// hosts' clocks.
type Lag struct {
	Count   uint64
	Seconds float64             // sum
	Buckets [len(bounds)]uint64 // number of batches that took at most [Bucket]
}

var bounds = [...]time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
	50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 5 * time.Second,
}

// Bucket returns the upper bound of Lag.Buckets[i].
func Bucket(i int) time.Duration { return bounds[i] }

// Counter is the live counters behind Lag.
type Counter struct {
	count, micros atomic.Int64
	buckets       [len(bounds)]atomic.Int64
}

// Note counts a batch.
func (l *Counter) Note(d time.Duration) {
	l.count.Add(1)
	l.micros.Add(d.Microseconds())
	for i := range bounds {
		if d <= bounds[i] {
			l.buckets[i].Add(1)
			return
		}
	}
}

// Read returns the counts since the start.
func (l *Counter) Read() (out Lag) {
	out.Seconds = float64(l.micros.Load()) / 1e6
	sum := uint64(0)
	for i := range l.buckets {
		sum += uint64(l.buckets[i].Load())
		out.Buckets[i] = sum
	}
	out.Count = max(uint64(l.count.Load()), sum)
	return out
}
