package redisstore

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	statev1 "tandem/protos/state/v1"
)

// readAtOnce is the maximum number of entries of one XREAD.
const readAtOnce = 256

// read applies the batches of other replicas, until ctx ends.
func (s *Store) read(ctx context.Context, p *poolReplica) {
	for ctx.Err() == nil {
		err := p.joinOnce(ctx)
		if err == nil {
			err = p.receive(ctx, s.o.Lease/beatsPerLease)
		}
		p.mu.Lock()
		p.expire(time.Now())
		p.askDue(time.Now())
		p.mu.Unlock()
		p.loadAnnounced(ctx)
		if err != nil && ctx.Err() == nil {
			s.log.Debug("reading from redis", "pool", p.pool, "err", err)
			wait(ctx, retryAfter)
		} else {
			wait(ctx, s.rest())
		}
	}
}

// receive applies the available entries, or those that arrive within the given time.
func (p *poolReplica) receive(ctx context.Context, block time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, block+besidePath)
	defer cancel()
	p.mu.Lock()
	from := p.position
	p.mu.Unlock()
	if block == 0 {
		block = -1
	}
	streams, err := p.s.client.XRead(ctx, &redis.XReadArgs{
		Streams: []string{p.keys.stream(), from.String()}, Count: readAtOnce, Block: block,
	}).Result()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, stream := range streams {
		p.takeIn(stream.Messages...)
	}
	return nil
}

// takeIn applies entries.
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
	var b statev1.Batch
	text, _ := m.Values[batchField].(string)
	err = proto.Unmarshal([]byte(text), &b)
	p.mu.Lock()
	defer p.mu.Unlock()
	if id.compare(p.position) > 0 {
		p.position = id
		p.unsaved++
	}
	if err == nil && b.GetReplica() != 0 && b.GetReplica() != p.s.replica {
		p.apply(&b, id)
	}
	if p.unsaved >= streamLength/2 && p.leads(0) && time.Since(p.saved) >= snapshotSoonest {
		p.saved = time.Now() // otherwise every later entry would request it again
		p.snapshots.want(snapshotWish{})
	}
}
