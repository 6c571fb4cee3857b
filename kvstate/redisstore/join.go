package redisstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate/redisstore/roster"
	statev1 "tandem/protos/state/v1"
)

// snapshotRequest is the state of a request for a snapshot (a batch with hello set).
type snapshotRequest struct {
	wanted   bool     // not answered yet
	position streamID // of the request in the stream; the snapshot must include it
	at       time.Time
	tries    int
}

// requestTries is the maximum number of requests for the same snapshot, a lease apart: the replica that should write
// it may be gone.
const requestTries = 3

// ask requests a snapshot, unless one is requested already. poolReplica.mu is held.
func (p *poolReplica) ask() {
	if !p.sync.wanted {
		p.sync = snapshotRequest{wanted: true, at: p.sync.at}
		p.askDue(time.Now())
	}
}

// askDue repeats the request with the next batch, if a snapshot is wanted and none was requested within a lease.
// poolReplica.mu is held.
func (p *poolReplica) askDue(now time.Time) {
	if !p.sync.wanted || now.Sub(p.sync.at) < p.s.o.Lease {
		return
	}
	if p.sync.tries >= requestTries || len(p.members) == 0 {
		p.sync.wanted = false
		return
	}
	p.sync.at, p.sync.tries = now, p.sync.tries+1
	p.requestSnapshot()
}

func (p *poolReplica) requestSnapshot() {
	p.out.mu.Lock()
	p.out.join = true
	p.out.mu.Unlock()
	p.s.Changed()
}

// Join loads the state in Redis and the other replicas' knowledge, before this replica decides anything. It returns
// when that is done, when the limit is reached, or when Redis does not answer. [Store.Run] continues, so an error is
// for the log only.
func (s *Store) Join(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var joining sync.WaitGroup
	pools := s.pools()
	failed := make([]error, len(pools))
	for i, p := range pools {
		joining.Go(func() { failed[i] = p.warmUp(ctx) })
	}
	joining.Wait()
	err := errors.Join(failed...)
	s.linked(err)
	return err
}

// warmUp joins, and waits for the snapshot if Redis lacks something that was published.
func (p *poolReplica) warmUp(ctx context.Context) error {
	if err := p.joinOnce(ctx); err != nil {
		return err
	}
	var err error
	for {
		p.loadAnnounced(ctx)
		needsFeeds := p.needsFeeds()
		p.mu.Lock()
		warm := (!p.sync.wanted || p.gapless && !needsFeeds) && p.notice == nil
		p.mu.Unlock()
		if warm {
			return nil
		}
		failed := receive(ctx, p.s, 50*time.Millisecond, p)
		if failed != nil {
			wait(ctx, retryAfter)
		}
		if ctx.Err() != nil {
			// no error: a late snapshot is loaded when it comes, and the limit may have cut short an answer of
			// Redis
			return err
		}
		err = failed
	}
}

// joinOnce loads the state in Redis: the last snapshot, and the stream from there up to this replica's first batch. It
// relies on no other replica: one that seems alive may be this one's own former process, killed a moment ago.
func (p *poolReplica) joinOnce(ctx context.Context) error {
	p.mu.Lock()
	joined := p.joined
	p.mu.Unlock()
	if joined {
		return nil
	}
	said, err := p.publishJoin(ctx)
	if err != nil {
		return fmt.Errorf("requesting a snapshot: %w", err)
	}
	p.mu.Lock()
	p.began = said
	// the answer may be among the entries read now
	p.sync = snapshotRequest{wanted: true, position: said, at: time.Now(), tries: 1}
	p.mu.Unlock()
	gapless, err := p.loadStored(ctx, said)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	others := slices.Collect(maps.Values(p.members))
	alone := !slices.ContainsFunc(others, func(m *remoteReplica) bool { return !m.starting })
	p.joined, p.gapless = true, gapless
	p.sync.wanted = p.sync.wanted && !alone
	return nil
}

// loadStored loads the last snapshot and reads the stream from its position, or from the beginning if there is none,
// up to end. It reads at least one lease: every living replica has published within it. gapless: nothing was cut from
// the stream that the snapshot lacks.
func (p *poolReplica) loadStored(ctx context.Context, end streamID) (gapless bool, err error) {
	n, err := p.lastSnapshot(ctx)
	if err != nil {
		return false, err
	}
	lease := uint64(p.s.o.Lease.Milliseconds())
	from := streamID{}
	if n != nil {
		from, err = parseStreamID(n.GetPosition())
		if err == nil {
			err = p.load(ctx, n)
		}
		if err != nil {
			p.s.log.Warn("the last snapshot was not loaded: starting with what the stream holds", "pool", p.pool, "err",
				err)
			n, from = nil, streamID{}
		}
	}
	first, fresh, err := p.firstEntry(ctx)
	if err != nil {
		return false, err
	}
	if n != nil {
		gapless = first.compare(from) <= 0
		if recent := (streamID{ms: end.ms - min(end.ms, lease)}); recent.compare(from) < 0 {
			from = recent
		}
	} else {
		gapless = fresh
	}
	p.mu.Lock()
	p.position = from
	p.mu.Unlock()
	return gapless, p.readTo(ctx, end)
}

// firstEntry returns the id of the stream's first entry. fresh: the stream begins with another replica's first batch,
// so nothing came before it.
func (p *poolReplica) firstEntry(ctx context.Context) (id streamID, fresh bool, err error) {
	streams, err := p.s.client.XRead(ctx,
		&redis.XReadArgs{Streams: []string{p.keys.stream(), "0"}, Count: 1, Block: -1}).Result()
	if errors.Is(err, redis.Nil) { // emptied since the first batch
		return streamID{ms: math.MaxUint64}, false, nil
	}
	if err != nil {
		return streamID{}, false, fmt.Errorf("reading the beginning of the stream: %w", err)
	}
	m := &streams[0].Messages[0]
	if id, err = parseStreamID(m.ID); err != nil {
		return streamID{}, false, err
	}
	var b statev1.Batch
	text, _ := m.Values[batchField].(string)
	fresh = proto.Unmarshal([]byte(text), &b) == nil && b.GetJoining() && b.GetSeq() == 1 &&
		b.GetReplica() != p.s.replica
	return id, fresh, nil
}

// readTo applies the stream's entries up to end.
func (p *poolReplica) readTo(ctx context.Context, end streamID) error {
	for {
		p.mu.Lock()
		before := p.position
		p.mu.Unlock()
		if before.compare(end) >= 0 {
			return nil
		}
		if err := receive(ctx, p.s, 0, p); err != nil {
			return fmt.Errorf("reading the stream: %w", err)
		}
		p.mu.Lock()
		if p.position == before { // the stream was cut or emptied meanwhile
			p.position = end
		}
		p.mu.Unlock()
	}
}

// publishJoin publishes this replica's first batch, which only requests a snapshot.
func (p *poolReplica) publishJoin(ctx context.Context) (streamID, error) {
	p.s.sending.RLock()
	defer p.s.sending.RUnlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	self, _ := p.s.roster.Self()
	b := &statev1.Batch{
		Member: roster.Record(&self), Replica: p.s.replica, Seq: p.seq + 1, LeaseMs: uint32(p.s.o.Lease.Milliseconds()),
		Joining: true, WantsFeeds: p.needsFeeds(),
	}
	text, err := proto.Marshal(b)
	if err != nil {
		return streamID{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	sent := time.Now()
	reply, err := p.s.client.XAdd(ctx, &redis.XAddArgs{
		Stream: p.keys.stream(), MaxLen: streamLength, Approx: true, Values: p.entryOf(text),
	}).Result()
	if err != nil {
		return streamID{}, err
	}
	p.seq++
	p.s.counters.batchesSent.Add(1)
	id, err := parseStreamID(reply)
	if err == nil {
		p.s.clock.set(id, sent, time.Now())
	}
	return id, err
}
