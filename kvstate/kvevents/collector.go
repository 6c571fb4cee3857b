package kvevents

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"tandem/kvstate"
)

// Source is where the engines of a pool publish their KV events. vLLM: --kv-events-config, SGLang: --kv-events-config.
type Source struct {
	Port       int    // of the events, for data-parallel rank 0; rank r has Port+r. An endpoint's own EventsPort goes before
	ReplayPort int    // where old batches can be asked for, likewise; 0: nowhere
	Ranks      int    // data-parallel ranks behind each endpoint; 0 is 1
	Topic      string // what topics begin with; "": any
	Listen     string // host:port to be connected to by engines whose publishers connect; "": we connect to theirs
}

// Publisher is where the events of one publisher go.
type Publisher interface {
	Sink
	Close()
}

// Options are what a collector needs.
type Options struct {
	State *kvstate.State
	Log   *slog.Logger
	Pools map[string]Source // by name; pools that are not here publish nothing
	// Open begins to take the events of a publisher; nil: a feed of the pool's prefix index.
	Open func(p *kvstate.Pool, e *kvstate.Endpoint, rank int) Publisher
	// Owns says whether this replica collects from an endpoint; nil: from all.
	Owns func(p *kvstate.Pool, e *kvstate.Endpoint) bool
}

// Collector follows the publishers of all endpoints there are.
type Collector struct {
	o      Options
	mu     sync.Mutex
	active map[target]*subscription
}

// target is one publisher.
type target struct {
	pool     string
	endpoint *kvstate.Endpoint
	rank     int
}

// NewCollector returns a collector that follows nobody yet.
func NewCollector(o Options) *Collector {
	if o.Open == nil {
		o.Open = func(p *kvstate.Pool, e *kvstate.Endpoint, _ int) Publisher { return p.Feed(e) }
	}
	if o.Owns == nil {
		o.Owns = func(*kvstate.Pool, *kvstate.Endpoint) bool { return true }
	}
	return &Collector{o: o, active: map[target]*subscription{}}
}

// lookEvery is how often the pools' endpoints are compared with those that are followed.
const lookEvery = 250 * time.Millisecond

// Run follows publishers until ctx ends. An address that cannot be listened on is an error.
func (c *Collector) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	for _, pool := range slices.Sorted(maps.Keys(c.o.Pools)) {
		if err := c.listen(ctx, pool, &running); err != nil {
			return err
		}
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		c.look(ctx, &running)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// look begins to follow who is new, and ends with who has left.
func (c *Collector) look(ctx context.Context, running *sync.WaitGroup) {
	wanted := map[target]*kvstate.Pool{}
	for _, p := range c.o.State.Pools() {
		source, ok := c.o.Pools[p.Spec.Name]
		if !ok {
			continue
		}
		for _, e := range p.Endpoints() {
			for rank := range max(source.Ranks, 1) {
				if c.o.Owns(p, e) {
					wanted[target{p.Spec.Name, e, rank}] = p
				}
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for t, s := range c.active {
		if wanted[t] == nil {
			s.stop()
			delete(c.active, t)
		}
	}
	for t, p := range wanted {
		if c.active[t] == nil {
			c.active[t] = c.follow(ctx, running, t, p)
		}
	}
}

func (c *Collector) follow(ctx context.Context, running *sync.WaitGroup, t target, p *kvstate.Pool) *subscription {
	source := c.o.Pools[t.pool]
	s := newSubscription(t, source, c.o.Open(p, t.endpoint, t.rank), c.o.Log)
	ctx, s.stop = context.WithCancel(ctx)
	running.Go(func() {
		defer s.publisher.Close()
		if source.Listen == "" {
			s.connect(ctx)
		} else {
			s.await(ctx)
		}
	})
	return s
}

// Stats are a publisher's numbers.
type Stats struct {
	Pool, Endpoint string
	Rank           int
	Connected      bool
	Lag            time.Duration // from the engine's clock to ours, of the last batch
	Batches        uint64
	Events         uint64
	Malformed      uint64 // payloads that were no batch
	Gaps           uint64 // numbers missing
	Recovered      uint64 // gaps that a replay closed
	Lost           uint64 // times that events were lost and the publisher's blocks forgotten
	Restarts       uint64 // of the engine
	Feed           kvstate.FeedStats
}

// Stats are the numbers of all publishers that are followed.
func (c *Collector) Stats() []Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []Stats
	for t, s := range c.active {
		n := &s.stream.count
		one := Stats{
			Pool: t.pool, Endpoint: t.endpoint.Addr, Rank: t.rank, Connected: s.up.Load(), Lag: time.Duration(s.stream.lag.Load()),
			Batches: n.batches.Load(), Events: n.events.Load(), Malformed: n.malformed.Load(), Gaps: n.gaps.Load(),
			Recovered: n.recovered.Load(), Lost: n.lost.Load(), Restarts: n.restarts.Load(),
		}
		if feed, ok := s.publisher.(interface{ Stats() kvstate.FeedStats }); ok {
			one.Feed = feed.Stats()
		}
		out = append(out, one)
	}
	return out
}
