package kvstate

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"time"

	"tandem/internal/periodic"
	"tandem/kvstate/fleetclock"
	"tandem/kvstate/inferencepolicy"
	"tandem/kvstate/paramstore"
	"tandem/kvstate/prefixindex"
)

// Options bound the state. Zero values mean the defaults.
type Options struct {
	MaxIndexBytes int // of a pool's prefix index; default 512 MiB
	// routed text blocks remembered for an endpoint whose engine does not report its KV capacity; default 16 Ki
	EndpointBlocks   int
	FeedBlocks       int           // token blocks remembered for one publisher of KV events; default 1 Mi
	MaxTokenBytes    int           // of the known tokens of a pool's prompts; default 64 MiB
	RoutedTTL        time.Duration // how long a routed prompt is remembered that is not requested again; default 1 h
	ReservationTTL   time.Duration // after which a reservation is assumed lost; default 15 m
	MaxReservations  int           // default 1 Mi
	ConsumedTTL      time.Duration // how long a consumed ticket is remembered; default 2 m
	MaxConsumed      int           // default 4 Mi, allocated as needed (about 30 bytes each): 17,000 a second
	HandOverTTL      time.Duration // how long a hand-over is stored; default 60 s
	MaxHandOverBytes int           // of all hand-overs together; default 64 MiB
	SessionTTL       time.Duration // after which an unused session is forgotten; default 30 m
	MaxSessions      int           // default 256 Ki (about 100 bytes each)

	Now func() time.Time // the clock of reservations; default time.Now. A replay uses virtual time

	// HealthChanged is called when an endpoint is marked as failed or as good, with the cause, and if it is known why,
	// for people. It must not block.
	// May be nil.
	HealthChanged func(e *Endpoint, good bool, cause HealthCause, why string)

	// Allows reports whether a pool may have an endpoint at an address (ip:port). It must not block. Nil: any.
	Allows func(pool, address string) bool
}

func (o Options) withDefaults() Options {
	o.MaxIndexBytes = cmp.Or(o.MaxIndexBytes, 512<<20)
	o.EndpointBlocks = cmp.Or(o.EndpointBlocks, 1<<14)
	o.FeedBlocks = cmp.Or(o.FeedBlocks, 1<<20)
	o.MaxTokenBytes = cmp.Or(o.MaxTokenBytes, 64<<20)
	o.RoutedTTL = cmp.Or(o.RoutedTTL, time.Hour)
	o.ReservationTTL = cmp.Or(o.ReservationTTL, 15*time.Minute)
	o.MaxReservations = cmp.Or(o.MaxReservations, 1<<20)
	o.ConsumedTTL = cmp.Or(o.ConsumedTTL, 2*time.Minute)
	o.MaxConsumed = cmp.Or(o.MaxConsumed, 1<<22)
	o.HandOverTTL = cmp.Or(o.HandOverTTL, time.Minute)
	o.MaxHandOverBytes = cmp.Or(o.MaxHandOverBytes, 64<<20)
	o.SessionTTL = cmp.Or(o.SessionTTL, 30*time.Minute)
	o.MaxSessions = cmp.Or(o.MaxSessions, 1<<18)
	if o.Now == nil {
		o.Now = time.Now
	}
	return o
}

func (o Options) indexLimits() prefixindex.Limits {
	return prefixindex.Limits{
		MaxBytes: o.MaxIndexBytes, RoutedBlocks: o.EndpointBlocks, FeedBlocks: o.FeedBlocks, TTL: o.RoutedTTL,
	}
}

// State is everything that one replica knows of the fleet. Its own methods are about pools, views and the prefix
// index; the rest is in its parts, each with one job. It is safe for concurrent use.
type State struct {
	Health    Health
	Bookings  Bookings
	HandOvers HandOvers
	Sessions  Sessions
	KVLoads   KVLoads
	Policies  inferencepolicy.Policies
	Clock     fleetclock.Clock // of what replicas give each other with a time

	link      *link
	o         Options
	mu        sync.Mutex // held while the set of pools or the overrides change
	pools     atomic.Pointer[[]*Pool]
	overrides map[overrideKey]versioned
	expired   func(e *Endpoint, n int64) // nil: not reported
}

// New returns an empty state. It starts no goroutines.
func New(o Options) *State {
	o = o.withDefaults()
	l := &link{}
	s := &State{o: o, link: l, overrides: map[overrideKey]versioned{}}
	s.pools.Store(&[]*Pool{})
	s.KVLoads = KVLoads{link: l, now: o.Now, pools: s.Pools}
	s.Health = Health{link: l, now: o.Now, notify: o.HealthChanged, onRecovered: s.KVLoads.forgetLoadFaults}
	s.Bookings.init(l, o)
	s.HandOvers = HandOvers{
		link: l, consumed: newReplayGuard(o.MaxConsumed, o.ConsumedTTL),
		handOvers: paramstore.New(o.MaxHandOverBytes, o.HandOverTTL),
	}
	s.Sessions = Sessions{l, newSessionSet(o.MaxSessions, o.SessionTTL)}
	return s
}

// Run removes expired entries until ctx ends.
func (s *State) Run(ctx context.Context) {
	periodic.Run(ctx, time.Second, s.sweep)
}

func (s *State) sweep(now time.Time) {
	s.Bookings.sweepReservations(now)
	s.HandOvers.handOvers.Sweep(now)
	s.HandOvers.consumed.sweep(now)
	s.Bookings.ended.sweep(now)
	for _, p := range s.Pools() {
		p.index.Sweep(now)
		p.sweepLoads(s.o.Now())
		p.SweepMemory(s.o.Now())
	}
	s.Sessions.sessions.sweep(now)
}
