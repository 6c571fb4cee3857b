package redisstore

import (
	"sync/atomic"

	"tandem/kvstate/redisstore/lag"
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
	Forged         int64 // texts in Redis that were not signed with this replica's keys, if it signs
	Lag            lag.Lag
}

// counters are the live counters behind Stats.
type counters struct {
	redisclient.Counts
	batchesSent, batchesRead                                       atomic.Int64
	dropped, gaps, unknown, snapshots, spendUnknown, eventsDropped atomic.Int64
	noticesDropped, forged                                         atomic.Int64
	lag                                                            lag.Counter
}

// Stats returns the current statistics.
func (s *Store) Stats() Stats {
	c := &s.counters
	return Stats{
		Commands: c.Commands.Load(), BytesSent: c.BytesSent.Load(), BytesRead: c.BytesRead.Load(),
		BatchesSent: c.batchesSent.Load(), BatchesRead: c.batchesRead.Load(), Errors: c.Errors.Load(),
		Dropped: c.dropped.Load(), Gaps: c.gaps.Load(), Unknown: c.unknown.Load(), Snapshots: c.snapshots.Load(),
		SpendUnknown: c.spendUnknown.Load(), EventsDropped: c.eventsDropped.Load(),
		NoticesDropped: c.noticesDropped.Load(), Forged: c.forged.Load(), Lag: c.lag.Read(),
	}
}
