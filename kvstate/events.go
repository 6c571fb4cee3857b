package kvstate

import "tandem/kvstate/prefixindex"

// FeedPart is a part of the blocks that one publisher of KV events has reported. A replica that starts loads it.
type FeedPart struct {
	Endpoint *Endpoint
	Rank     int
	Events   []prefixindex.BlockEvent // applied to an empty feed, they yield the same blocks; owned by the callee
	Next     uint64                   // sequence number of the publisher's first batch that is not in the feed
	Time     float64                  // of the last batch in the feed: seconds since 1970, by the engine's clock
	// First is set in the feed's first part, and More in all but the last one.
	First, More bool
}

// EventBatch is one batch of KV events as its publisher sent it, forwarded by the replica that the publisher
// connected to.
type EventBatch struct {
	Endpoint *Endpoint
	Rank     int
	Seq      uint64 // the publisher's sequence number of the batch
	Payload  []byte // nil: no batch, but a report that the publisher is connected and that Seq is its next number
}

// EventForwarder sends batches to the other replicas (package redisstore).
type EventForwarder interface {
	// Forward sends a batch. It does not wait, and copies the payload.
	Forward(p *Pool, b EventBatch)
}

// EventFollower follows publishers of KV events (package kvevents).
type EventFollower interface {
	// NeedsFeeds reports whether this replica has just started and lacks earlier reports of a publisher of the
	// pool.
	NeedsFeeds(p *Pool) bool
	// LoadFeed loads a part of a publisher's feed, if the replica needs it. Parts of one feed come in order.
	LoadFeed(p *Pool, part *FeedPart)
	// EachFeed calls f with the feeds of the pool's publishers, in parts, until f fails.
	EachFeed(p *Pool, f func(*FeedPart) error) error
	// Forwarded accepts a batch that another replica received. It does not wait, and copies the payload.
	Forwarded(p *Pool, b EventBatch)
	// ForwardPositions forwards the next sequence number of each publisher that is connected to this replica only.
	ForwardPositions(p *Pool)
}
