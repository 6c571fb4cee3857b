package kvstate

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"tandem/kvstate/prefixindex"
)

// Options bound the state. Zero values take the defaults.
type Options struct {
	MaxIndexBytes    int           // that a pool's prefix index may take; default 512 MiB
	EndpointBlocks   int           // text blocks that it remembers of what was routed to an endpoint whose engine does not say how much KV it holds; default 16 Ki
	FeedBlocks       int           // token blocks that it remembers of one publisher of KV events; default 1 Mi
	MaxTokenBytes    int           // that the tokens known of a pool's prompts may take; default 64 MiB
	RoutedTTL        time.Duration // how long it remembers what was routed and not asked for again; default 1 h
	ReservationTTL   time.Duration // after which a reservation is taken for lost; default 15 m
	MaxReservations  int           // default 1 Mi
	SpentTTL         time.Duration // how long a spent ticket is remembered; default 2 m
	MaxSpent         int           // default 4 Mi, as they come (about 30 bytes each): 17,000 a second
	HandOverTTL      time.Duration // how long a hand-over is kept; default 60 s
	MaxHandOverBytes int           // of all hand-overs together; default 64 MiB
	SessionTTL       time.Duration // after which a session that was not seen is forgotten; default 30 m
	MaxSessions      int           // default 256 Ki (about 100 bytes each)

	Now func() time.Time // the clock of bookings; default time.Now. A replay runs in a time of its own

	// HealthChanged is called when an endpoint is left out or taken in again, with the cause; it must not block. May be nil.
	HealthChanged func(e *Endpoint, good bool, cause HealthCause)
}

func (o Options) withDefaults() Options {
	setDefault(&o.MaxIndexBytes, 512<<20)
	setDefault(&o.EndpointBlocks, 1<<14)
	setDefault(&o.FeedBlocks, 1<<20)
	setDefault(&o.MaxTokenBytes, 64<<20)
	setDefault(&o.RoutedTTL, time.Hour)
	setDefault(&o.ReservationTTL, 15*time.Minute)
	setDefault(&o.MaxReservations, 1<<20)
	setDefault(&o.SpentTTL, 2*time.Minute)
	setDefault(&o.MaxSpent, 1<<22)
	setDefault(&o.HandOverTTL, time.Minute)
	setDefault(&o.MaxHandOverBytes, 64<<20)
	setDefault(&o.SessionTTL, 30*time.Minute)
	setDefault(&o.MaxSessions, 1<<18)
	if o.Now == nil {
		o.Now = time.Now
	}
	return o
}

func (o Options) indexLimits() prefixindex.Limits {
	return prefixindex.Limits{MaxBytes: o.MaxIndexBytes, RoutedBlocks: o.EndpointBlocks, FeedBlocks: o.FeedBlocks, TTL: o.RoutedTTL}
}

func setDefault[T int | int64 | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// State is everything one replica knows of the fleet. It is safe for concurrent use.
type State struct {
	o      Options
	mu     sync.Mutex // held by those who change the set of pools, or what is ordered of it
	pools  atomic.Pointer[[]*Pool]
	orders map[orderKey]Order

	transferFailed func(p *Pool, prefill, decode string)

	bookings  [bookingShards]bookingShard
	booked    atomic.Int64
	spent     spentSet
	handOvers handOverStore
	turns     handOverStore // what conversations' last turns left; empty where there are other replicas
	sessions  *sessionSet
	peers     Peers    // nil: there are none
	intents   sync.Map // pool name to *Intents; there are few, and they seldom change
}

// New returns an empty state. It starts nothing.
func New(o Options) *State {
	s := &State{o: o.withDefaults(), orders: map[orderKey]Order{}}
	s.pools.Store(&[]*Pool{})
	for i := range s.bookings {
		s.bookings[i].held = map[ReservationID]reservation{}
	}
	s.spent = newSpentSet(s.o.MaxSpent, s.o.SpentTTL)
	s.handOvers = newHandOverStore(s.o.MaxHandOverBytes, s.o.HandOverTTL)
	s.turns = newHandOverStore(maxTurnBytes, 0)
	s.sessions = newSessionSet(s.o.MaxSessions, s.o.SessionTTL)
	return s
}

// Run sweeps what has expired until ctx ends.
func (s *State) Run(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.sweep(now)
		}
	}
}

func (s *State) sweep(now time.Time) {
	s.sweepReservations(now)
	s.handOvers.sweep(now)
	s.turns.sweep(now)
	s.spent.sweep(now)
	for _, p := range s.Pools() {
		p.index.Sweep(now)
		p.sweepLoads(s.o.Now())
	}
	s.sessions.sweep(now)
}
