package redisstore

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"
)

// gatherFor is how long what happens is collected before it is told: what a request does to the state when it is planned goes
// into one batch. restFor is how long nothing more is told after that, beatsPerLease how often within a lease all bookings
// are told, and retryAfter how long a failed write is not tried again.
const (
	gatherFor     = time.Millisecond
	restFor       = 2 * time.Millisecond
	beatsPerLease = 3
	retryAfter    = 100 * time.Millisecond
)

// write tells the others, until ctx ends; then it takes leave of them.
func (s *Store) write(ctx context.Context) {
	beat := time.NewTicker(s.o.Lease / beatsPerLease)
	defer beat.Stop()
	for complete := true; ; {
		pause := restFor
		if err := s.flush(ctx, complete, false); err != nil {
			pause = retryAfter
		}
		complete = false
		if !wait(ctx, pause) {
			break
		}
		select {
		case <-ctx.Done():
		case <-beat.C:
			complete = true
		case <-s.wake:
			wait(ctx, gatherFor)
		}
		if ctx.Err() != nil {
			break
		}
	}
	_ = s.flush(ctx, true, true)
}

// wait is false if ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// flush tells what there is to tell of all pools, in one round trip. It fails if Redis does, and is not cut short by the end of ctx,
// which is no fault of Redis's: the last snapshot is only written to one that answers.
func (s *Store) flush(ctx context.Context, complete, leaving bool) error {
	s.sending.Lock() // or greet would give the same number
	defer s.sending.Unlock()
	s.dirty.Store(false) // before looking: what changes from now on is told next time
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), besidePath)
	defer cancel()
	var entries []*entry
	pipe := s.client.Pipeline()
	for _, p := range s.pools() {
		e, err := p.entry(complete, leaving)
		if err != nil {
			return err
		}
		if e != nil {
			e.add(ctx, pipe, complete)
			entries = append(entries, e)
		}
	}
	if len(entries) == 0 {
		return nil
	}
	sent := time.Now()
	_, err := pipe.Exec(ctx)
	for _, e := range entries {
		if failed := e.settle(sent); failed != nil {
			err = failed
		}
	}
	s.linked(err)
	return err
}

// linked notes whether Redis takes what it is told, and says so when that changes.
func (s *Store) linked(err error) {
	if c, ok := s.client.(*redis.ClusterClient); ok && err != nil {
		c.ReloadState(context.Background()) // a node may have taken another's place; the client looks every 10 s
	}
	if !s.link.result(err) {
		return
	}
	if err == nil {
		s.log.Info("redis answers")
		if !s.answered.Swap(true) {
			return
		}
		s.mu.RLock()
		defer s.mu.RUnlock()
		for _, p := range s.sharers { // it may have come back empty
			if p.leads(0) {
				p.wantSnapshot(snapshotWish{})
			}
		}
		return
	}
	s.log.Warn("redis is not in use: going on with what this replica knows itself", "err", err)
}

// entry is one batch on its way.
type entry struct {
	p      *sharer
	out    outbox
	before map[string]told
	bytes  []byte
	reply  *redis.StringCmd
}

// entry makes the pool's next entry, nil if there is nothing to tell.
func (p *sharer) entry(complete, leaving bool) (*entry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if complete {
		p.expire(time.Now())
		p.prune()
		if pool := p.s.state.Pool(p.pool); pool != nil && p.s.follower != nil {
			p.s.follower.ForwardPositions(pool)
		}
	}
	e := &entry{p: p, out: p.take()}
	b, before := p.batchOf(&e.out, complete, time.Now())
	if b == nil {
		return nil, nil
	}
	b.Seq, b.Leaving = p.seq+1, leaving
	var err error
	if e.bytes, err = proto.Marshal(b); err != nil {
		return nil, fmt.Errorf("encoding a batch: %w", err)
	}
	e.before = before
	return e, nil
}

// batchField is the one field of a stream's entry.
const batchField = "b"

func (e *entry) add(ctx context.Context, pipe redis.Pipeliner, complete bool) {
	e.reply = pipe.XAdd(ctx, &redis.XAddArgs{
		Stream: e.p.keys.stream(), MaxLen: streamLength, Approx: true, Values: []any{batchField, e.bytes},
	})
	if complete {
		pipe.PExpire(ctx, e.p.keys.stream(), streamTTL)
	}
}

// clockBehind is how much lower than what was read last the id of an entry of ours must be to tell that another server gave
// it, in milliseconds. Others' later entries are often read before the reply to ours is, but not so much later.
const clockBehind = uint64(2 * besidePath / time.Millisecond)

// settle takes the reply in to what was sent at a time. What was not taken is told again; if Redis took it after all, others hear it twice, which does
// no harm.
func (e *entry) settle(sent time.Time) error {
	p := e.p
	text, err := e.reply.Result()
	var id streamID
	if err == nil {
		id, err = parseStreamID(text)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		maps.Copy(p.told, e.before)
		p.waitsLost, p.published = true, nil
		p.outMu.Lock()
		p.s.counters.dropped.Add(int64(p.out.giveBack(&e.out)))
		p.s.counters.eventsDropped.Add(int64(len(e.out.forwarded)))
		p.outMu.Unlock()
		return fmt.Errorf("writing to Redis: %w", err)
	}
	p.seq++
	p.s.counters.batchesSent.Add(1)
	p.s.clock.set(id, sent, time.Now())
	if e.out.hello {
		p.sync.said = id
	}
	if p.joined && id.ms+clockBehind < p.position.ms { // another server, whose clock is behind: go on from here
		p.position, p.began = id, id
		p.ask()
	}
	p.tellRest()
	return nil
}

// tellRest has a snapshot written for everyone, when the outbox could not hold all there was to tell.
func (p *sharer) tellRest() {
	p.outMu.Lock()
	lossy := p.out.lossy
	p.out.lossy = false
	p.outMu.Unlock()
	if lossy {
		p.wantSnapshot(snapshotWish{everyone: true})
	}
}

// prune drops what is remembered of endpoints that left the pool.
func (p *sharer) prune() {
	pool := p.s.state.Pool(p.pool)
	if pool == nil || len(p.told) <= len(pool.Endpoints()) {
		return
	}
	for addr := range p.told {
		if p.endpoint(pool, addr) == nil {
			delete(p.told, addr)
		}
	}
}
