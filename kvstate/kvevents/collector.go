package kvevents

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
)

// Source describes how the engines of a pool publish their KV events. vLLM: --kv-events-config, SGLang:
// --kv-events-config.
type Source struct {
	// of the events, for data-parallel rank 0; rank r has Port+r. An endpoint's own Events override it
	Port       int
	ReplayPort int    // serves old batches, likewise; 0: none
	Ranks      int    // data-parallel ranks of each endpoint; 0 is 1
	Topic      string // prefix of topics; "": any
	Listen     string // host:port to listen on, for engines whose publishers connect; "": Tandem connects to theirs
}

// Publisher takes the events of one publisher.
type Publisher interface {
	Sink
	Snapshot() *prefixindex.FeedSnapshot
	Close()
}

// Options are the options of a collector.
type Options struct {
	State *kvstate.State
	Log   *slog.Logger
	Pools map[string]Source // initial sources, by name; pools that are not here publish nothing
	// Open returns the receiver of a publisher's events; nil: a feed of the pool's prefix index.
	Open func(p *kvstate.Pool, e *kvstate.Endpoint, rank int) Publisher
	// Forward sends batches to the other replicas; nil: there are none. Batches are then kept until [Collector.Joined].
	Forward kvstate.EventForwarder
}

// Collector follows the publishers of all endpoints. It implements [kvstate.EventFollower].
type Collector struct {
	o         Options
	mu        sync.Mutex
	joining   bool
	sources   map[string]Source
	active    map[target]*subscription
	at        map[place]*subscription // the same
	listening map[string]*listening   // by pool
	changed   chan struct{}           // SetPools was called
	running   sync.WaitGroup
}

var _ kvstate.EventFollower = (*Collector)(nil)

// target is one publisher.
type target struct {
	pool     string
	endpoint *kvstate.Endpoint
	rank     int
	source   Source
}

// place identifies a publisher, whatever else is known of it.
type place struct {
	pool, addr string
	rank       int
}

func (t *target) place() place { return place{t.pool, t.endpoint.Addr, t.rank} }

// NewCollector returns a collector that follows no publisher yet.
func NewCollector(o Options) *Collector {
	if o.Open == nil {
		o.Open = func(p *kvstate.Pool, e *kvstate.Endpoint, _ int) Publisher { return p.Feed(e) }
	}
	return &Collector{
		o: o, joining: o.Forward != nil, sources: o.Pools,
		active: map[target]*subscription{}, at: map[place]*subscription{}, listening: map[string]*listening{},
		changed: make(chan struct{}, 1),
	}
}

// SetPools changes the pools' sources. Unchanged sources keep their subscriptions.
func (c *Collector) SetPools(sources map[string]Source) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sources = sources
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// lookEvery is the interval at which the pools' endpoints are compared with the followed ones.
const lookEvery = 250 * time.Millisecond

// Run follows publishers until ctx ends. An address that it cannot listen on is an error at the start; later ones
// are retried.
func (c *Collector) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer c.end()
	defer cancel()
	if err := c.lookListeners(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	logged := ""
	for {
		c.Look(ctx)
		if err := c.lookListeners(ctx); err != nil && err.Error() != logged {
			logged = err.Error()
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

// atRest reports whether there is nothing to follow before the next [Collector.SetPools].
func (c *Collector) atRest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.sources) == 0 && len(c.active) == 0 && len(c.listening) == 0
}

// end stops all subscriptions and waits for them.
func (c *Collector) end() {
	c.mu.Lock()
	for t, s := range c.active {
		c.drop(t, s)
	}
	c.mu.Unlock()
	c.running.Wait()
}

// Look starts to follow new publishers, until ctx ends, and stops following those that have left. [Collector.Run]
// calls it regularly.
func (c *Collector) Look(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ctx.Err() != nil {
		return
	}
	wanted := c.wanted()
	now := time.Now()
	for t, s := range c.active {
		if wanted[t] == nil {
			c.drop(t, s)
		} else {
			s.settle(now)
		}
	}
	for t, p := range wanted {
		if c.active[t] == nil {
			c.follow(ctx, t, p)
		}
	}
}

// wanted returns the current publishers.
func (c *Collector) wanted() map[target]*kvstate.Pool {
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
			if e.Ranks > 0 { // each rank is an endpoint with its own port
				wanted[target{p.Spec.Name, e, e.Rank, source}] = p
				continue
			}
			for rank := range max(source.Ranks, 1) {
				wanted[target{p.Spec.Name, e, rank, source}] = p
			}
		}
	}
	return wanted
}

// follow starts to follow a publisher.
func (c *Collector) follow(ctx context.Context, t target, p *kvstate.Pool) {
	s := newSubscription(ctx, t, c.o.Open(p, t.endpoint, t.rank), c.o.Log)
	s.stream.joining = c.joining
	if f := c.o.Forward; f != nil && t.source.Listen != "" {
		s.forward = func(b kvstate.EventBatch) { f.Forward(p, b) }
	}
	c.active[t], c.at[t.place()] = s, s
	c.running.Go(func() {
		defer s.close()
		guard.Keep(s.ctx, "KV events", s.follow)
	})
}

// drop stops following a publisher.
func (c *Collector) drop(t target, s *subscription) {
	delete(c.active, t)
	delete(c.at, t.place())
	s.stop()
}

// AwaitConnected waits until every publisher that we connect to is connected, or ctx ends.
func (c *Collector) AwaitConnected(ctx context.Context) {
	for !c.connected() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (c *Collector) connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t, s := range c.active {
		if t.source.Listen == "" && !s.isUp() {
			return false
		}
	}
	return true
}

// Joined ends the joining: subscriptions stop waiting for feeds of other replicas, or wait only for late.
func (c *Collector) Joined(late time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.joining = false
	for _, s := range c.active {
		c.running.Go(func() {
			defer guard.Recover(s.ctx, "KV events")
			s.join(late)
		})
	}
}

// of returns the subscriptions of a pool.
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

func (c *Collector) find(at place) *subscription {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at[at]
}

// NeedsFeeds implements [kvstate.EventFollower].
func (c *Collector) NeedsFeeds(p *kvstate.Pool) bool {
	return slices.ContainsFunc(c.of(p.Spec.Name), func(s *subscription) bool { return !s.stream.isLoaded() })
}

// LoadFeed implements [kvstate.EventFollower].
func (c *Collector) LoadFeed(p *kvstate.Pool, part *kvstate.FeedPart) {
	if s := c.find(place{p.Spec.Name, part.Endpoint.Addr, part.Rank}); s != nil {
		s.stream.load(part)
	}
}

// EachFeed implements [kvstate.EventFollower].
func (c *Collector) EachFeed(p *kvstate.Pool, f func(*kvstate.FeedPart) error) error {
	for _, s := range c.of(p.Spec.Name) {
		if err := s.eachPart(f); err != nil {
			return err
		}
	}
	return nil
}

// Forwarded implements [kvstate.EventFollower].
func (c *Collector) Forwarded(p *kvstate.Pool, b kvstate.EventBatch) {
	if s := c.find(place{p.Spec.Name, b.Endpoint.Addr, b.Rank}); s != nil && s.forward != nil && !s.isUp() {
		s.receive(b)
	}
}

// ForwardPositions implements [kvstate.EventFollower].
func (c *Collector) ForwardPositions(p *kvstate.Pool) {
	for _, s := range c.of(p.Spec.Name) {
		s.passPosition()
	}
}

// Stats are the statistics of a publisher.
type Stats struct {
	Pool, Endpoint string
	Rank           int
	// its batches reach this replica, directly or through the replica that it is connected to
	Connected bool
	Lag       time.Duration // from the engine's clock to ours, of the last batch that arrived live
	Batches   uint64
	Events    uint64
	Malformed uint64 // payloads that are not a batch
	Gaps      uint64 // number of times that batches were missing
	Recovered uint64 // gaps that a replay closed
	Lost      uint64 // number of times that events were lost and the publisher's blocks forgotten
	Restarts  uint64 // of the engine
	Forwarded uint64 // batches from the replica that it is connected to
	Feed      prefixindex.FeedStats
}

// Stats returns the statistics of all followed publishers.
func (c *Collector) Stats() []Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []Stats
	now := time.Now()
	for t, s := range c.active {
		n := &s.stream.count
		one := Stats{
			Pool: t.pool, Endpoint: t.endpoint.Addr, Rank: t.rank, Connected: s.reaches(now),
			Lag:     time.Duration(s.stream.lag.Load()),
			Batches: n.batches.Load(), Events: n.events.Load(), Malformed: n.malformed.Load(), Gaps: n.gaps.Load(),
			Recovered: n.recovered.Load(), Lost: n.lost.Load(), Restarts: n.restarts.Load(),
			Forwarded: n.forwarded.Load(),
		}
		if feed, ok := s.publisher.(interface{ Stats() prefixindex.FeedStats }); ok {
			one.Feed = feed.Stats()
		}
		out = append(out, one)
	}
	return out
}
