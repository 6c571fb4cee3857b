package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// Who starts, or has missed some of the KV events that another replica collects, says which endpoints it lacks. Whoever
// listens to those writes what it knows of them, and tells where. That is read, and then what came in the stream since.

// contentsAtMost is how soon after what was written of feeds it may be written again.
const contentsAtMost = time.Second

// maxContents bounds the notices that wait: one of each replica.
const maxContents = 64

// lacking notes what another replica lacks. sharer.mu is held.
func (p *sharer) lacking(b *statev1.Batch) {
	if p.s.follower == nil {
		return
	}
	for _, i := range b.GetLacks() {
		if int(i) < len(b.GetAddresses()) && len(p.lacks) < maxLacks && !slices.Contains(p.lacks, b.GetAddresses()[i]) {
			p.lacks = append(p.lacks, b.GetAddresses()[i])
		}
	}
	if len(p.lacks) > 0 {
		select {
		case p.contentsDue <- struct{}{}:
		default:
		}
	}
}

// maxLacks bounds the addresses that others can claim to lack.
const maxLacks = 1 << 14

// writeContents writes what others lack, until ctx ends.
func (s *Store) writeContents(ctx context.Context, p *sharer) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.contentsDue:
		}
		p.mu.Lock()
		lacks := p.lacks
		p.lacks = nil
		p.mu.Unlock()
		if pool := s.state.Pool(p.pool); pool != nil && s.link.isUp() {
			if err := p.writeContentsOf(ctx, pool, lacks); err != nil && ctx.Err() == nil {
				s.log.Warn("what others lack of KV events was not written", "pool", p.pool, "err", err)
			}
		}
		wait(ctx, contentsAtMost)
	}
}

// writeContentsOf writes what this replica knows of those endpoints whose publishers it listens to.
func (p *sharer) writeContentsOf(ctx context.Context, pool *kvstate.Pool, addrs []string) error {
	p.mu.Lock()
	position, joined := p.position, p.joined
	p.mu.Unlock()
	if !joined {
		return nil
	}
	w := chunkWriter{ctx: ctx, p: p, id: uint64(time.Now().UnixNano())}
	w.begin()
	for _, addr := range addrs {
		err := p.s.follower.Contents(pool, addr, func(c *kvstate.Collected) error {
			w.collected(addr, c)
			return w.err
		})
		if err != nil {
			return err
		}
	}
	if len(w.chunk.GetCollected()) > 0 {
		w.write()
	}
	if w.err != nil || w.chunks == 0 {
		return w.err
	}
	p.mu.Lock()
	last := p.written
	p.written = &statev1.SnapshotNotice{Id: w.id, Chunks: uint32(w.chunks), Position: position.String(), Previous: last.GetId(), PreviousChunks: last.GetChunks()}
	n := p.written
	p.mu.Unlock()
	p.unlinkPrevious(ctx, p.s.client, last)
	p.s.counters.snapshots.Add(1)
	p.outMu.Lock()
	p.out.contents = n
	p.outMu.Unlock()
	p.s.Changed()
	return nil
}

// collected adds part of what is known of a publisher.
func (w *chunkWriter) collected(addr string, c *kvstate.Collected) {
	if w.err != nil {
		return
	}
	told := &statev1.Collected{
		Address: w.table.position(addr), Rank: uint32(c.Rank), Next: c.Next, Epoch: c.Epoch, Time: c.Time, Anew: c.Reset, Doubt: c.Doubt, Part: true, More: c.More,
		Events: appendEvents(nil, c.Events),
	}
	w.chunk.Collected = append(w.chunk.Collected, told)
	if w.held += len(told.GetEvents()) / 8; w.held >= chunkBlocks {
		w.write()
	}
}

// loadContents reads what this replica lacks, where others have written that.
func (p *sharer) loadContents(ctx context.Context) {
	p.mu.Lock()
	notices := p.contents
	p.contents = nil
	p.mu.Unlock()
	for _, n := range notices {
		if !p.isLacking() {
			return
		}
		from, err := parseStreamID(n.GetPosition())
		if err == nil {
			err = p.load(ctx, n)
		}
		if err == nil {
			err = p.catchUp(ctx, from)
		}
		if err != nil && ctx.Err() == nil { // it is said again that it is lacking
			p.s.log.Warn("what was missed of KV events was not loaded", "pool", p.pool, "err", err)
		}
	}
}

func (p *sharer) isLacking() bool {
	pool := p.s.state.Pool(p.pool)
	return p.s.follower != nil && pool != nil && len(p.s.follower.Lacks(pool)) > 0
}

// catchUp takes in once more what was collected of KV events from a place in the stream on, up to where it has been read.
func (p *sharer) catchUp(ctx context.Context, from streamID) error {
	p.mu.Lock()
	end := p.position
	p.mu.Unlock()
	for from.compare(end) < 0 {
		streams, err := p.s.client.XRead(ctx, &redis.XReadArgs{Streams: []string{p.keys.stream(), from.String()}, Count: readAtOnce, Block: -1}).Result()
		if errors.Is(err, redis.Nil) { // the stream is gone (FLUSHALL): what was missed shows with the next heartbeat
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading the stream again: %w", err)
		}
		for _, m := range streams[0].Messages {
			if from, err = parseStreamID(m.ID); err != nil || from.compare(end) > 0 {
				return err
			}
			p.retake(&m)
		}
	}
	return nil
}

func (p *sharer) retake(m *redis.XMessage) {
	var b statev1.Batch
	text, _ := m.Values[batchField].(string)
	pool := p.s.state.Pool(p.pool)
	if err := proto.Unmarshal([]byte(text), &b); err != nil || pool == nil || b.GetReplica() == p.s.replica {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	endpoints, _ := p.endpoints(pool, b.GetAddresses()) // those that are not known were counted when it was read first
	p.takeCollected(pool, b.GetReplica(), b.GetCollected(), known(endpoints), true)
}

// known gives endpoints by their position in a message, nil for those that are not known here.
func known(endpoints []*kvstate.Endpoint) func(uint32) *kvstate.Endpoint {
	return func(i uint32) *kvstate.Endpoint {
		if int(i) < len(endpoints) {
			return endpoints[i]
		}
		return nil
	}
}
