package kvstate

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// Options bound the state. Zero values take the defaults.
type Options struct {
	MaxIndexBlocks   int           // blocks that a pool's prefix index remembers; default 1 Mi (about 100 MB)
	EndpointBlocks   int           // of those for each endpoint that prefills, about what its cache holds; default 16 Ki
	ReservationTTL   time.Duration // after which a reservation is taken for lost; default 15 m
	MaxReservations  int           // default 1 Mi
	SpentTTL         time.Duration // how long a spent ticket is remembered; default 2 m
	MaxSpent         int           // default 4 Mi, as they come (about 30 bytes each): 17,000 a second
	HandOverTTL      time.Duration // how long a hand-over is kept; default 60 s
	MaxHandOverBytes int           // of all hand-overs together; default 64 MiB
}

func (o Options) withDefaults() Options {
	setDefault(&o.MaxIndexBlocks, 1<<20)
	setDefault(&o.EndpointBlocks, 1<<14)
	setDefault(&o.ReservationTTL, 15*time.Minute)
	setDefault(&o.MaxReservations, 1<<20)
	setDefault(&o.SpentTTL, 2*time.Minute)
	setDefault(&o.MaxSpent, 1<<22)
	setDefault(&o.HandOverTTL, time.Minute)
	setDefault(&o.MaxHandOverBytes, 64<<20)
	return o
}

func setDefault[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// State is everything one replica knows of the fleet. It is safe for concurrent use.
type State struct {
	o     Options
	mu    sync.Mutex // held by those who change the set of pools
	pools atomic.Pointer[[]*Pool]

	bookings  [bookingShards]bookingShard
	booked    atomic.Int64
	spent     spentSet
	handOvers handOverStore
	intents   sync.Map // pool name to *Intents; there are few, and they seldom change
}

// New returns an empty state. It starts nothing.
func New(o Options) *State {
	s := &State{o: o.withDefaults()}
	s.pools.Store(&[]*Pool{})
	for i := range s.bookings {
		s.bookings[i].held = map[ReservationID]booking{}
	}
	s.spent = newSpentSet(s.o.MaxSpent, s.o.SpentTTL)
	s.handOvers = newHandOverStore(s.o.MaxHandOverBytes, s.o.HandOverTTL)
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
	s.spent.sweep(now)
}
