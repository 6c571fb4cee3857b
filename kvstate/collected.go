package kvstate

import (
	"time"

	"tandem/kvstate/prefixindex"
)

// Collected is what one replica, which listens to a publisher of KV events, tells the others of it, so that none of them
// has to. The numbers are those that the publisher gives its batches.
type Collected struct {
	Endpoint *Endpoint
	Rank     int
	// Events are those of the batches From up to, but not including, Next. Where the two are equal there are none: the
	// teller says that it listens, and how far it is. Good until the callee returns.
	Events     []prefixindex.BlockEvent
	From, Next uint64
	Epoch      uint64  // drawn anew with each Reset, so that who has missed one sees that; 0: nothing was said yet
	Time       float64 // of the last of those batches: seconds since 1970, by the engine's clock
	Reset      bool    // all that was said before is void, or not known
	Old        bool    // the last of them did not come as it was published: it was asked for, or is told again
	Doubt      bool    // some batches before the last one were lost for good: see [prefixindex.Feed.Suspect]
	// Part: of all that the publisher's feed holds now, for who lacks that; Reset is set in the first part, and More in all
	// but the last one.
	Part, More bool
	// Heir: who says so is the one that is to listen, as far as is known here.
	Heir bool
}

// EventRelay carries what is collected to other replicas (package redisstore).
type EventRelay interface {
	// Collects reports whether this replica is the one to listen to an endpoint's publishers.
	Collects(p *Pool, e *Endpoint) bool
	// Alone reports whether no other replica collects events in the pool.
	Alone(p *Pool) bool
	// Lease is for how long it holds that a replica says it listens.
	Lease() time.Duration
	// TellCollected tells the others. It does not wait.
	TellCollected(p *Pool, c *Collected)
}

// EventFollower takes what is collected elsewhere (package kvevents).
type EventFollower interface {
	// Follows reports whether this replica takes the KV events of a pool.
	Follows(p *Pool) bool
	// TakeCollected takes what another replica tells, in the order in which it tells it.
	TakeCollected(p *Pool, c *Collected)
	// SayWhatIsCollected has the relay told how far this replica is with each publisher that it listens to.
	SayWhatIsCollected(p *Pool)
	// Lacks are the addresses of endpoints of whose events this replica has missed some.
	Lacks(p *Pool) []string
	// Contents calls each with all that is known of an endpoint's publishers, if this replica listens to them; an error
	// of each ends it.
	Contents(p *Pool, addr string, each func(*Collected) error) error
}
