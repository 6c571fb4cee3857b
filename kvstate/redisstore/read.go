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

// streamsOf returns the pools whose streams one command can read: all; in a Cluster, where they are stored on several
// nodes, each by itself.
func streamsOf(s *Store) [][]*poolReplica {
	if _, ok := s.client.(*redis.ClusterClient); ok {
		return slices.Collect(slices.Chunk(s.pools(), 1))
	}
	return [][]*poolReplica{s.pools()}
}

// read applies the batches of other replicas to these pools, until ctx ends.
func (s *Store) read(ctx context.Context, pools ...*poolReplica) {
	var loading sync.WaitGroup
	defer loading.Wait()
	for ctx.Err() == nil {
		err := readOnce(ctx, s, pools, &loading)
		for _, p := range pools {
			p.mu.Lock()
			p.expire(time.Now())
			p.askDue(time.Now())
			p.mu.Unlock()
		}
		if err != nil && ctx.Err() == nil {
			s.log.Debug("reading from redis", "err", err)
			wait(ctx, retryAfter)
		} else {
			wait(ctx, s.rest())
		}
	}
}

// readOnce reads the streams of those pools that have joined and load no snapshot. This is concurrent, because it may
// take seconds.
func readOnce(ctx context.Context, s *Store, pools []*poolReplica, loading *sync.WaitGroup) error {
	ready := make([]*poolReplica, 0, len(pools))
	for _, p := range pools {
		if upToDate(p) {
			ready = append(ready, p)
		} else if p.snapshots.loading.CompareAndSwap(false, true) {
			loading.Go(func() {
				defer p.snapshots.loading.Store(false)
				p.bringUpToDate(ctx)
			})
		}
	}
	if len(ready) == 0 {
		return nil
	}
	block := s.o.Lease / beatsPerLease
	if len(ready) < len(pools) {
		block = loadingBlock
	}
	err := receive(ctx, s, block, ready...)
	var refused redis.Error // the key of one pool may be unreadable
	if len(ready) > 1 && errors.As(err, &refused) {
		for _, p := range ready {
			err = errors.Join(err, receive(ctx, s, 0, p))
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
	ctx, cancel := context.WithTimeout(ctx, block+besidePath)
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
		takeOne(p, &entries[i])
	}
	p.mu.Lock()
	sumLoads(p)
	p.mu.Unlock()
}

// takeOne applies one entry. Entries that cannot be read, of a later release or not Tandem's, are skipped.
func takeOne(p *poolReplica, m *redis.XMessage) {
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
		p.apply(b, id)
	}
	if p.unsaved >= streamLength/2 && p.leads(0) && time.Since(p.saved) >= snapshotSoonest {
		p.saved = time.Now() // otherwise every later entry would request it again
		p.snapshots.want(snapshotWish{})
	}
}
