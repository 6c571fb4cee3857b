package kvstate

import "tandem/kvstate/prefixindex"

// FeedPart is a part of the blocks that one publisher of KV events has reported as held: a replica that starts loads it.
type FeedPart struct {
	Endpoint *Endpoint
	Rank     int
	Events   []prefixindex.BlockEvent // an empty feed that applies them holds the same blocks; the callee's
	Next     uint64                   // the number of the publisher's first batch that is not in the feed
	Time     float64                  // of the batch before: seconds since 1970, by the engine's clock
	// First is set in the feed's first part, and More in all but the last one.
	First, More bool
}

// EventBatch is one batch of KV events as its publisher sent it, from the replica that the publisher connected to.
type EventBatch struct {
	Endpoint *Endpoint
	Rank     int
	Seq      uint64 // the publisher's number of the batch
	Payload  []byte // nil: no batch; the publisher is connected, and Seq is the number of its next one
}

// EventForwarder sends batches to the other replicas (package redisstore).
type EventForwarder interface {
	// Forward sends a batch. It does not wait, and copies the payload.
	Forward(p *Pool, b EventBatch)
}

// EventFollower follows publishers of KV events (package kvevents).
type EventFollower interface {
	// NeedsFeeds reports whether this replica has just started and lacks what a publisher of the pool reported before.
	NeedsFeeds(p *Pool) bool
	// LoadFeed loads a part of a publisher's feed, if the replica needs it. Parts of one feed come in order.
	LoadFeed(p *Pool, part *FeedPart)
	// EachFeed calls f with the feeds of the pool's publishers, in parts, until f fails.
	EachFeed(p *Pool, f func(*FeedPart) error) error
	// Forwarded takes a batch that another replica received. It does not wait, and copies the payload.
	Forwarded(p *Pool, b EventBatch)
	// ForwardPositions forwards, for each publisher that is connected to this replica alone, the number of its next batch.
	ForwardPositions(p *Pool)
}
