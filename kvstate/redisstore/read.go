package redisstore

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"tandem/internal/guard"
)

// readAtOnce is the maximum number of entries of one stream in an XREAD.
const readAtOnce = 256

// loadingBlock is the time for which a read waits while a pool is left out of it: that pool's entries wait too.
const loadingBlock = 50 * time.Millisecond

// reader applies the batches of other replicas to pools whose streams one command can read.
type reader struct {
	s       *Store
	pools   []*poolReplica
	loading sync.WaitGroup // pools that are brought up to date
}

// newReaders returns one reader; in a Cluster, where pools are stored on several nodes, one for each.
func newReaders(s *Store) (out []*reader) {
	if _, ok := s.client.(*redis.ClusterClient); !ok {
		return []*reader{{s: s, pools: s.pools()}}
	}
	for one := range slices.Chunk(s.pools(), 1) {
		out = append(out, &reader{s: s, pools: one})
	}
	return out
}

// run reads until ctx ends.
func (r *reader) run(ctx context.Context) {
	defer r.loading.Wait()
	for ctx.Err() == nil {
		err := r.once(ctx)
		for _, p := range r.pools {
			p.mu.Lock()
			p.expire(time.Now())
			p.askDue(time.Now())
			p.mu.Unlock()
		}
		if err != nil && ctx.Err() == nil {
			r.s.log.Debug("reading from redis", "err", err)
			wait(ctx, retryAfter)
		} else {
			wait(ctx, r.s.rest())
		}
	}
}

// once reads the streams of those pools that have joined and load no snapshot. The others are brought up to date
// concurrently, because that may take seconds.
func (r *reader) once(ctx context.Context) error {
	ready := make([]*poolReplica, 0, len(r.pools))
	for _, p := range r.pools {
		if upToDate(p) {
			ready = append(ready, p)
		} else if p.snapshots.loading.CompareAndSwap(false, true) {
			r.loading.Go(func() {
				defer p.snapshots.loading.Store(false)
				p.bringUpToDate(ctx)
			})
		}
	}
	if len(ready) == 0 {
		return nil
	}
	block := r.s.o.Lease / beatsPerLease
	if len(ready) < len(r.pools) {
		block = loadingBlock
	}
	err := receive(ctx, r.s, block, ready...)
	var refused redis.Error // the key of one pool may be unreadable
	if len(ready) > 1 && errors.As(err, &refused) {
		for _, p := range ready {
			err = errors.Join(err, receive(ctx, r.s, 0, p))
		}
	}
	return err
}

// upToDate reports whether a pool's entries can be read.
func upToDate(p *poolReplica) bool {
	if p.snapshots.loading.Load() {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.joined && p.notice == nil
}

// bringUpToDate joins, or loads the announced snapshot.
func (p *poolReplica) bringUpToDate(ctx context.Context) {
	defer guard.Recover(ctx, "Redis")
	err := p.joinOnce(ctx)
	p.loadAnnounced(ctx)
	if err != nil && ctx.Err() == nil {
		p.s.log.Debug("reading from redis", "pool", p.pool, "err", err)
		wait(ctx, retryAfter)
	}
}

// receive applies the available entries, or those that arrive within the given time.
func receive(ctx context.Context, s *Store, block time.Duration, pools ...*poolReplica) error {
	ctx, cancel := context.WithTimeout(ctx, block+commandTime)
	defer cancel()
	if block == 0 {
		block = -1
	}
	names := make([]string, 2*len(pools))
	for i, p := range pools {
		p.mu.Lock()
		names[i], names[len(pools)+i] = p.keys.stream(), p.position.String()
		p.mu.Unlock()
	}
	streams, err := s.client.XRead(ctx, &redis.XReadArgs{Streams: names, Count: readAtOnce, Block: block}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	if err != nil {
		return err
	}
	for i := range streams {
		if at := slices.Index(names[:len(pools)], streams[i].Stream); at >= 0 {
			pools[at].takeIn(streams[i].Messages...)
		}
	}
	return nil
}

// takeIn applies entries. One goroutine calls it.
func (p *poolReplica) takeIn(entries ...redis.XMessage) {
	for i := range entries {
		p.takeOne(&entries[i])
	}
	p.mu.Lock()
	p.sumLoads()
	p.mu.Unlock()
}

// takeOne applies one entry. Entries that cannot be read, of a later release or not Tandem's, are skipped.
func (p *poolReplica) takeOne(m *redis.XMessage) {
	id, err := parseStreamID(m.ID)
	if err != nil {
		return
	}
	text, _ := m.Values[batchField].(string)
	b, err := p.in.Read(text)
	p.mu.Lock()
	defer p.mu.Unlock()
	if id.compare(p.position) > 0 {
		p.position = id
		p.unsaved++
	}
	if err == nil && b.GetReplica() != 0 && b.GetReplica() != p.s.replica {
		if p.genuineEntry(m, id) {
			p.apply(b, id)
		} else {
			p.stranger(b, id)
		}
	}
	if p.unsaved >= streamLength/2 && p.leads(0) && time.Since(p.saved) >= snapshotSoonest {
		p.saved = time.Now() // otherwise every later entry would request it again
		p.snapshots.want(snapshotWish{})
	}
}
