package kvevents

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
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
	Snapshot() *prefixindex.FeedSnapshot
	HasSuspects() bool
	ExpireSuspects(now time.Time)
	Close()
}

// Options are what a collector needs.
type Options struct {
	State *kvstate.State
	Log   *slog.Logger
	Pools map[string]Source // to begin with, by name; pools that are not here publish nothing
	// Open begins to take the events of a publisher; nil: a feed of the pool's prefix index.
	Open func(p *kvstate.Pool, e *kvstate.Endpoint, rank int) Publisher
	// Relay shares the work with other replicas; nil: this one listens to all publishers.
	Relay kvstate.EventRelay
}

// Collector follows the publishers of all endpoints there are. It implements [kvstate.EventFollower].
type Collector struct {
	o         Options
	mu        sync.Mutex
	sources   map[string]Source
	active    map[target]*subscription
	at        map[place]*subscription // the same
	listening map[string]*listening   // by pool
	changed   chan struct{}           // SetPools was called
	closing   sync.WaitGroup
}

var _ kvstate.EventFollower = (*Collector)(nil)

// target is one publisher.
type target struct {
	pool     string
	endpoint *kvstate.Endpoint
	rank     int
	source   Source
}

// place is where a publisher is, whatever else is known of it.
type place struct {
	pool, addr string
	rank       int
}

func (t *target) place() place { return place{t.pool, t.endpoint.Addr, t.rank} }

// NewCollector returns a collector that follows nobody yet.
func NewCollector(o Options) *Collector {
	if o.Open == nil {
		o.Open = func(p *kvstate.Pool, e *kvstate.Endpoint, _ int) Publisher { return p.Feed(e) }
	}
	return &Collector{o: o, sources: o.Pools, active: map[target]*subscription{}, at: map[place]*subscription{}, listening: map[string]*listening{}, changed: make(chan struct{}, 1)}
}

// SetPools changes where the pools publish. What is the same for a pool goes on.
func (c *Collector) SetPools(sources map[string]Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sources = sources
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// lookEvery is how often the pools' endpoints are compared with those that are followed, where any are to be.
const lookEvery = 250 * time.Millisecond

// Run follows publishers until ctx ends. An address that cannot be listened on is an error at the start; one that is set later
// is tried again.
func (c *Collector) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer c.end(&running)
	defer cancel()
	if err := c.lookListeners(ctx, &running); err != nil {
		return err
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	said := ""
	for {
		c.look(ctx, &running)
		if err := c.lookListeners(ctx, &running); err != nil && err.Error() != said {
			said = err.Error()
			c.o.Log.Error("KV events", "err", err)
		}
		next := tick.C
		if c.atRest() {
			next = nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-next:
		case <-c.changed:
		}
	}
}

// atRest reports whether there is nothing to follow before [Collector.SetPools] says so.
func (c *Collector) atRest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.sources) == 0 && len(c.active) == 0 && len(c.listening) == 0
}

// end forgets all publishers when the listening to them has ended.
func (c *Collector) end(running *sync.WaitGroup) {
	running.Wait()
	defer c.closing.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for t, s := range c.active {
		c.drop(t, s)
	}
}

// Look makes the index ready for what those publishers say that there are now, whom other replicas may listen to already.
// [Collector.Run] does it too.
func (c *Collector) Look() {
	c.mu.Lock()
	defer c.mu.Unlock()
	wanted := map[target]*kvstate.Pool{}
	for _, p := range c.o.State.Pools() {
		source, ok := c.sources[p.Spec.Name]
		if !ok {
			continue
		}
		for _, e := range p.Endpoints() {
			if e.Role == kvstate.RoleEncode {
				continue // has no KV cache
			}
			for rank := range max(source.Ranks, 1) {
				wanted[target{p.Spec.Name, e, rank, source}] = p
			}
		}
	}
	for t, s := range c.active {
		if wanted[t] == nil {
			c.drop(t, s)
		}
	}
	for t, p := range wanted {
		if c.active[t] == nil {
			s := newSubscription(t, t.source, c.o.Open(p, t.endpoint, t.rank), c.o.Log)
			if r := c.o.Relay; r != nil {
				s.stream.relayed = make(chan struct{}, 1)
				s.stream.tell = func(said kvstate.Collected) {
					said.Endpoint, said.Rank = t.endpoint, t.rank
					r.TellCollected(p, &said)
				}
			}
			c.active[t], c.at[t.place()] = s, s
		}
	}
}

// drop ends with a publisher.
func (c *Collector) drop(t target, s *subscription) {
	delete(c.active, t)
	delete(c.at, t.place())
	s.stop()
	ended := s.ended
	c.closing.Go(func() {
		<-ended
		s.stream.mu.Lock()
		defer s.stream.mu.Unlock()
		s.publisher.Close()
	})
}

// look begins to follow who is new, ends with who has left, and begins and ends to listen where that is due.
func (c *Collector) look(ctx context.Context, running *sync.WaitGroup) {
	c.Look()
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	for t, s := range c.active {
		s.settle(now)
		if t.source.Listen != "" {
			if s.accepts() {
				s.listen(ctx, running, s.await)
			}
			continue
		}
		ours, alone, lease := true, true, time.Duration(0)
		if p := c.o.State.Pool(t.pool); c.o.Relay != nil && p != nil {
			ours, alone, lease = c.o.Relay.Collects(p, t.endpoint), c.o.Relay.Alone(p), c.o.Relay.Lease()
		}
		switch s.next(ours, alone, lease, now) {
		case listen:
			s.listen(ctx, running, s.connect)
		case rest:
			s.log.Info("KV events: another replica listens now")
			s.stop()
		case stay:
		}
	}
}

// Follows implements [kvstate.EventFollower].
func (c *Collector) Follows(p *kvstate.Pool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.sources[p.Spec.Name]
	return ok
}

// TakeCollected implements [kvstate.EventFollower].
func (c *Collector) TakeCollected(p *kvstate.Pool, said *kvstate.Collected) {
	if s := c.find(place{p.Spec.Name, said.Endpoint.Addr, said.Rank}); s != nil {
		s.take(said, time.Now())
	}
}

func (c *Collector) find(at place) *subscription {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at[at]
}

// of are the subscriptions of a pool.
func (c *Collector) of(pool string) (out []*subscription) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t, s := range c.active {
		if t.pool == pool {
			out = append(out, s)
		}
	}
	return out
}

// SayWhatIsCollected implements [kvstate.EventFollower].
func (c *Collector) SayWhatIsCollected(p *kvstate.Pool) {
	for _, s := range c.of(p.Spec.Name) {
		s.say()
	}
}

// Lacks implements [kvstate.EventFollower].
func (c *Collector) Lacks(p *kvstate.Pool) (addrs []string) {
	for _, s := range c.of(p.Spec.Name) {
		if addr := s.target.endpoint.Addr; s.isLacking() && !slices.Contains(addrs, addr) {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// Contents implements [kvstate.EventFollower].
func (c *Collector) Contents(p *kvstate.Pool, addr string, each func(*kvstate.Collected) error) error {
	for _, s := range c.of(p.Spec.Name) {
		if s.target.endpoint.Addr == addr {
			if err := s.contents(each); err != nil {
				return err
			}
		}
	}
	return nil
}

// Stats are a publisher's numbers.
type Stats struct {
	Pool, Endpoint string
	Rank           int
	Connected      bool          // to this replica
	Known          bool          // what it says is known here, from itself or from another replica
	Lag            time.Duration // from the engine's clock to ours, of the last batch that came as it was published
	Batches        uint64
	Events         uint64
	Malformed      uint64 // payloads that were no batch
	Gaps           uint64 // times that batches were missing
	Recovered      uint64 // gaps that a replay closed
	Lost           uint64 // times that events were lost and the publisher's blocks forgotten
	Restarts       uint64 // of the engine
	Relayed        uint64 // times that batches came from another replica as it took them
	Missed         uint64 // times that they did not, and what is lacking was asked for
	Feed           prefixindex.FeedStats
}

// Stats are the numbers of all publishers that are followed.
func (c *Collector) Stats() []Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []Stats
	lease := time.Duration(0)
	if c.o.Relay != nil {
		lease = c.o.Relay.Lease()
	}
	for t, s := range c.active {
		n := &s.stream.count
		one := Stats{
			Pool: t.pool, Endpoint: t.endpoint.Addr, Rank: t.rank, Connected: s.up.Load(), Lag: time.Duration(s.stream.lag.Load()),
			Batches: n.batches.Load(), Events: n.events.Load(), Malformed: n.malformed.Load(), Gaps: n.gaps.Load(),
			Recovered: n.recovered.Load(), Lost: n.lost.Load(), Restarts: n.restarts.Load(),
			Relayed: n.relayed.Load(), Missed: n.missed.Load(), Known: s.isKnown(lease, time.Now()),
		}
		if feed, ok := s.publisher.(interface{ Stats() prefixindex.FeedStats }); ok {
			one.Feed = feed.Stats()
		}
		out = append(out, one)
	}
	return out
}
