package redisstore

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"
)

// gatherFor is the time for which changes are collected before they are published: those of planning one request go
// into one batch. restFor for each replica, at most restMost, is the pause after a batch, and after reading: so all
// replicas together write and read about as often as one, and wake for many entries at once. beatsPerLease is the
// number of complete batches within a lease, and retryAfter the pause after a failed write. A replica that knows of no
// other pauses for aloneRest: only a replica that starts needs its batches.
const (
	gatherFor     = time.Millisecond
	restFor       = 2500 * time.Microsecond
	restMost      = 40 * time.Millisecond
	aloneRest     = 50 * time.Millisecond
	beatsPerLease = 3
	beatSpread    = 8 * time.Millisecond // less than the rest after reading with 4 replicas
	retryAfter    = 100 * time.Millisecond
)

// write publishes batches, until ctx ends; then it publishes that this replica leaves.
func (s *Store) write(ctx context.Context) {
	beat := time.NewTimer(0)
	defer beat.Stop()
	for complete := true; ; {
		if complete {
			beat.Reset(untilBeat(s, time.Now()))
		}
		pause := s.rest()
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

// untilBeat returns the time until the next complete batch: at least half an interval, and at most one and a half. A
// lease has three.
func untilBeat(s *Store, now time.Time) time.Duration {
	every := s.o.Lease / beatsPerLease
	offset := time.Duration(s.replica*0x9E3779B185EBCA87>>32) * beatSpread >> 32
	left := every - (s.clock.of(now)-offset)%every
	if left < every/2 {
		left += every
	}
	return left
}

// rest returns the pause after a batch, and after reading.
func (s *Store) rest() time.Duration {
	if n := s.Replicas(); n > 1 {
		return min(time.Duration(n)*restFor, restMost)
	}
	return aloneRest
}

// wait returns false if ctx ended first.
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

// flush publishes the changes of all pools, in one round trip. It fails if Redis does. The end of ctx does not cut it
// short, because that would look like a failure of Redis: the last snapshot is only written to one that answers.
func (s *Store) flush(ctx context.Context, complete, leaving bool) error {
	s.sending.Lock() // otherwise publishJoin would take the same number
	defer s.sending.Unlock()
	s.dirty.Store(false) // before looking: later changes are published next time
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
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
		if failed := e.settle(sent, err); failed != nil {
			err = failed
		}
	}
	s.linked(err)
	return err
}

// linked records whether Redis answers, and logs changes.
func (s *Store) linked(err error) {
	if c, ok := s.client.(*redis.ClusterClient); ok && err != nil {
		c.ReloadState(context.Background()) // a node may have replaced another; the client checks only every 10 s
	}
	if !s.link.Result(err) {
		return
	}
	if err == nil {
		s.log.Info("redis answers")
		if !s.answered.Swap(true) {
			return
		}
		s.mu.RLock()
		defer s.mu.RUnlock()
		for _, p := range s.byPool { // it may have come back empty
			if p.leads(0) {
				p.snapshots.want(snapshotWish{})
			}
		}
		return
	}
	s.log.Warn("redis is not in use: going on with what this replica knows itself", "err", err)
}

// entry is one batch that is being sent.
type entry struct {
	p      *poolReplica
	out    changes
	before map[string]published
	lives  time.Time // the stream's time to live was set then
	bytes  []byte
	member int // the edition of our record in it; -1: none
	reply  *redis.StringCmd
	expire *redis.BoolCmd // sets the stream's time to live; nil: not sent
}

// entry returns the pool's next entry, nil if there is nothing to publish.
func (p *poolReplica) entry(complete, leaving bool) (*entry, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if complete {
		p.expire(time.Now())
		p.forgetEndpoints()
		if pool := p.s.state.Pool(p.pool); pool != nil && p.s.follower != nil {
			p.s.follower.ForwardPositions(pool)
		}
	}
	e := &entry{p: p, out: p.out.take(), lives: p.lives}
	b, before := p.batchOf(&e.out, complete, time.Now())
	if b == nil {
		return nil, nil
	}
	b.Seq, b.Leaving = p.seq+1, leaving
	if e.member = -1; b.Member != nil {
		e.member = p.edition
	}
	var err error
	if e.bytes, err = proto.Marshal(b); err != nil {
		return nil, fmt.Errorf("encoding a batch: %w", err)
	}
	e.before = before
	return e, nil
}

func (e *entry) add(ctx context.Context, pipe redis.Pipeliner, complete bool) {
	e.reply = pipe.XAdd(ctx, &redis.XAddArgs{
		Stream: e.p.keys.stream(), MaxLen: streamLength, Approx: true, Values: e.p.entryOf(e.bytes),
	})
	if complete && time.Since(e.lives) >= expireEvery {
		e.expire = pipe.PExpire(ctx, e.p.keys.stream(), streamTTL)
	}
}

// clockBehind is the difference in milliseconds by which our entry's id must be below the last one read to show that
// another server gave it. Others' later entries are often read before the reply to ours, but not so much later.
const clockBehind = uint64(2 * commandTime / time.Millisecond)

// settle handles the reply to a batch. A failed batch is published again; if Redis has it after all, the other
// replicas apply it twice, which does no harm.
func (e *entry) settle(sent time.Time, failed error) error {
	p := e.p
	text, err := e.reply.Result()
	var id streamID
	if text == "" {
		err = cmp.Or(err, failed) // the reply of a command has no error if no connection took it
	}
	if err == nil {
		id, err = parseStreamID(text)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		maps.Copy(p.published, e.before)
		p.waitsUnknown, p.publishedKeys, p.edition, p.lives = true, nil, -1, time.Time{} // it may come back empty
		p.s.counters.dropped.Add(int64(p.out.requeue(&e.out)))
		p.s.counters.eventsDropped.Add(int64(len(e.out.forwarded)))
		return fmt.Errorf("writing to Redis: %w", err)
	}
	p.seq++
	if e.expire != nil && e.expire.Err() == nil {
		p.lives = sent
	}
	p.s.counters.batchesSent.Add(1)
	p.s.roster.Took(e.member, sent)
	p.s.clock.set(id, sent, time.Now())
	if e.out.join {
		p.sync.position = id
	}
	if p.joined && id.ms+clockBehind < p.position.ms { // another server, whose clock is behind: continue from here
		p.position, p.began = id, id
		p.ask()
	}
	if p.out.lost() {
		p.snapshots.want(snapshotWish{everyone: true})
	}
	return nil
}

// forgetEndpoints drops what is remembered of endpoints that left the pool.
func (p *poolReplica) forgetEndpoints() {
	pool := p.s.state.Pool(p.pool)
	if pool == nil || len(p.published) <= len(pool.Endpoints()) {
		return
	}
	maps.DeleteFunc(p.published, func(addr string, _ published) bool { return p.endpoints.find(pool, addr) == nil })
}
