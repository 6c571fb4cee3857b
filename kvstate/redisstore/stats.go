package redisstore

import (
	"sync/atomic"
	"time"

	"tandem/kvstate/redisstore/redisclient"
)

// Stats are the statistics of the traffic between this replica and Redis since its start.
type Stats struct {
	Commands       int64 // sent, including those that open connections
	BytesSent      int64 // on the wire
	BytesRead      int64
	BatchesSent    int64
	BatchesRead    int64 // of other replicas
	Errors         int64 // failed or late ones of the commands
	Dropped        int64 // routed prompts that did not fit into the outbox
	EventsDropped  int64 // batches of KV events that were not forwarded
	NoticesDropped int64 // notices of engines that were not published
	Gaps           int64 // number of times that batches of another replica were missed
	Unknown        int64 // unknown endpoints in batches and snapshots
	Snapshots      int64 // written
	SpendUnknown   int64 // tickets that were consumed without Redis
	Lag            Lag
}

// Lag is the time from another replica's routing of a batch's first prompt until all are known here; batches published
// before this replica joined do not count. It uses Redis's clock, so it is right to some milliseconds whatever the
// hosts' clocks.
type Lag struct {
	Count   uint64
	Seconds float64           // sum
	Buckets [len(lags)]uint64 // number of batches that took at most [LagBucket]
}

// lags are the bounds of the buckets of Lag.
var lags = [...]time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond,
	50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 5 * time.Second,
}

// LagBucket returns the upper bound of Lag.Buckets[i].
func LagBucket(i int) time.Duration { return lags[i] }

// lag is the live counters behind Lag.
type lag struct {
	count, micros atomic.Int64
	buckets       [len(lags)]atomic.Int64
}

func (l *lag) note(d time.Duration) {
	l.count.Add(1)
	l.micros.Add(d.Microseconds())
	for i := range lags {
		if d <= lags[i] {
			l.buckets[i].Add(1)
			return
		}
	}
}

func (l *lag) read() (out Lag) {
	out.Seconds = float64(l.micros.Load()) / 1e6
	sum := uint64(0)
	for i := range l.buckets {
		sum += uint64(l.buckets[i].Load())
		out.Buckets[i] = sum
	}
	out.Count = max(uint64(l.count.Load()), sum)
	return out
}

// counters are the live counters behind Stats.
type counters struct {
	redisclient.Counts
	batchesSent, batchesRead                                       atomic.Int64
	dropped, gaps, unknown, snapshots, spendUnknown, eventsDropped atomic.Int64
	noticesDropped                                                 atomic.Int64
	lag                                                            lag
}

// Stats returns the current statistics.
func (s *Store) Stats() Stats {
	c := &s.counters
	return Stats{
		Commands: c.Commands.Load(), BytesSent: c.BytesSent.Load(), BytesRead: c.BytesRead.Load(),
		BatchesSent: c.batchesSent.Load(), BatchesRead: c.batchesRead.Load(), Errors: c.Errors.Load(),
		Dropped: c.dropped.Load(), Gaps: c.gaps.Load(), Unknown: c.unknown.Load(), Snapshots: c.snapshots.Load(),
		SpendUnknown: c.spendUnknown.Load(), EventsDropped: c.eventsDropped.Load(),
		NoticesDropped: c.noticesDropped.Load(), Lag: c.lag.read(),
	}
}
