package redisstore

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"tandem/internal/guard"
	"tandem/kvstate"
	"tandem/kvstate/redisstore/decode"
	"tandem/kvstate/redisstore/redisclient"
	"tandem/kvstate/redisstore/roster"
	statev1 "tandem/protos/state/v1"
)

// Store connects one replica's state with those of the others. It implements [kvstate.Replicas].
type Store struct {
	o        Options
	state    *kvstate.State
	log      *slog.Logger
	replica  uint64 // this replica's number
	client   redis.UniversalClient
	counters counters
	link     *redisclient.Link
	answered atomic.Bool // Redis has answered before
	clock    clock
	roster   *roster.Roster
	follower kvstate.EventFollower // nil: no KV events are followed

	fingerprints func() []uint64 // of this replica's ticket keys; nil: no comparison
	keysChanged  func()

	signer     Signer // nil: nothing is signed
	forgedOnce sync.Once

	dirty atomic.Bool
	wake  chan struct{} // there is something to publish
	// a batch of any pool has its number and is being sent; held for reading by the first batch of one
	sending sync.RWMutex

	questions chan question // of requests
	notices   chan string   // to be published

	mu     sync.RWMutex
	byPool map[string]*poolReplica // by pool
}

var _ kvstate.Replicas = (*Store)(nil)

// New returns a store for the state. It does not connect; [Store.Join] and [Store.Run] do.
func New(o Options, state *kvstate.State) (*Store, error) {
	o.setDefaults()
	s := &Store{
		o: o, state: state, log: o.Log, replica: newReplica(time.Now()), link: redisclient.NewLink(),
		clock: clock{fleet: &state.Clock, log: o.Log},
		wake:  make(chan struct{}, 1), questions: make(chan question, askers*askAtOnce),
		notices: make(chan string, noticesWaiting), byPool: map[string]*poolReplica{},
	}
	s.roster = roster.New(roster.Member{Replica: s.replica, Name: o.Name, Version: o.Release, Slot: -1}, s.Changed)
	s.counters.Refusals.Said = func(command, reason string) {
		s.log.Warn("redis refuses a command: what it is for does not work", "command", command, "reason", reason)
	}
	var err error
	if s.client, err = o.client(&s.counters.Counts); err != nil {
		return nil, err
	}
	s.pools()
	return s, nil
}

// newReplica returns a replica's number: its start time in milliseconds, and 20 random bits. So the lowest is the
// oldest.
func newReplica(now time.Time) uint64 { return uint64(now.UnixMilli())<<20 | rand.Uint64N(1<<20) }

// Close closes the connections.
func (s *Store) Close() error { return s.client.Close() }

// Run keeps the state and the other replicas' up to date until ctx ends; then it publishes that it leaves.
func (s *Store) Run(ctx context.Context) {
	var running sync.WaitGroup
	for _, r := range newReaders(s) {
		running.Go(func() { guard.Keep(ctx, "Redis", func() { r.run(ctx) }) })
	}
	for _, p := range s.pools() {
		running.Go(func() { guard.Keep(ctx, "Redis", func() { s.writeSnapshots(ctx, p) }) })
	}
	for range askers {
		running.Go(func() { guard.Keep(ctx, "Redis", func() { s.askAll(ctx) }) })
	}
	s.write(ctx)
	running.Wait()
}

// pools returns the parts of all current pools. (Pools are configured: they do not change while Run runs.)
func (s *Store) pools() []*poolReplica {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*poolReplica
	for _, p := range s.state.Pools() {
		name := p.Spec.Name
		if s.byPool[name] == nil {
			s.byPool[name] = newPoolReplica(s, name)
		}
		out = append(out, s.byPool[name])
	}
	return out
}

func (s *Store) poolReplica(pool string) *poolReplica {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.byPool[pool]
}

// poolReplica is the store's part for one pool.
type poolReplica struct {
	s    *Store
	pool string
	keys poolKeys

	out outbox

	mu        sync.Mutex
	seq       uint64               // of the last batch sent
	lives     time.Time            // the stream's time to live was set then
	published map[string]published // by address: the other replicas' knowledge
	members   map[uint64]*remoteReplica
	resum     map[string]struct{} // addresses whose remote load has changed since it was summed
	waits     map[uint64]uint64   // requests that wait here, as published: by id, the version published
	reading
	sync snapshotRequest

	publishedKeys []uint64                // fingerprints of our ticket keys, as published
	edition       int                     // of our record in the roster, as published; -1: none
	waitsUnknown  bool                    // the other replicas may have missed waiting requests: publish all
	notice        *statev1.SnapshotNotice // of a snapshot to load
	endpoints     endpoints

	ids       atomic.Pointer[[]uint64] // of the living replicas, including ours, sorted
	snapshots snapshots
}

// reading is the position in the pool's stream.
type reading struct {
	position streamID // of the last entry read
	began    streamID // of our first batch; earlier entries were published before we joined
	joined   bool
	gapless  bool      // Redis had everything that was published before we joined: no need to wait for a snapshot
	unsaved  int       // entries read since the last snapshot was announced
	saved    time.Time // when a snapshot was last requested because of them
	in       decode.Reader
}

func newPoolReplica(s *Store, pool string) *poolReplica {
	p := &poolReplica{
		s: s, pool: pool, keys: s.o.poolKeys(pool), published: map[string]published{},
		members: map[uint64]*remoteReplica{}, resum: map[string]struct{}{},
	}
	p.snapshots = snapshots{p: p, due: make(chan struct{}, 1)}
	p.ids.Store(&[]uint64{s.replica})
	return p
}

// Status describes the link to Redis in a line; up is whether Redis answers.
func (s *Store) Status() (text string, up bool) { return s.link.Status(s.Replicas()) }

// Access is what packages operator and membership need to use the same Redis.
type Access struct {
	Client  redis.UniversalClient
	Prefix  string          // of keys
	Replica uint64          // this one's number: when it started in milliseconds since 1970, and 20 random bits
	Lease   time.Duration   // as in [Options]
	Living  func() []uint64 // the numbers of all living replicas, sorted
	Roster  *roster.Roster  // their records

	store *Store
}

// Access returns the store's own connections and its knowledge of the replicas.
func (s *Store) Access() Access {
	return Access{s.client, s.o.KeyPrefix + ":" + version + ":", s.replica, s.o.Lease, func() (out []uint64) {
		s.mu.RLock()
		defer s.mu.RUnlock()
		for _, p := range s.byPool {
			out = append(out, *p.ids.Load()...)
		}
		slices.Sort(out)
		return slices.Compact(out)
	}, s.roster, s}
}

// Replicas returns the number of living replicas, this one included.
func (s *Store) Replicas() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	most := 1
	for _, p := range s.byPool {
		most = max(most, len(*p.ids.Load()))
	}
	return most
}
