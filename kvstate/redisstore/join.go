package redisstore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"google.golang.org/protobuf/proto"

	statev1 "tandem/protos/state/v1"
)

// hello is the state of a request for a snapshot.
type hello struct {
	wanted bool     // and not yet answered
	said   streamID // where it stands in the stream; a snapshot must reach as far
	at     time.Time
	tries  int
}

// helloTries is how often a hello is said that nobody answers, a lease apart: who should have answered may be gone.
const helloTries = 3

// ask wants a snapshot of the others. sharer.mu is held.
func (p *sharer) ask() {
	if !p.sync.wanted {
		p.sync = hello{wanted: true, at: p.sync.at}
		p.askDue(time.Now())
	}
}

// askDue says hello with the next batch, if a snapshot is wanted and none was asked for within a lease. sharer.mu is held.
func (p *sharer) askDue(now time.Time) {
	if !p.sync.wanted || now.Sub(p.sync.at) < p.s.o.Lease {
		return
	}
	if p.sync.tries >= helloTries || len(p.members) == 0 {
		p.sync.wanted = false
		return
	}
	p.sync.at, p.sync.tries = now, p.sync.tries+1
	p.sayHello()
}

func (p *sharer) sayHello() {
	p.outMu.Lock()
	p.out.hello = true
	p.outMu.Unlock()
	p.s.Changed()
}

// Join takes in what the others know, before this replica decides anything: it returns when that is done, when it has taken
// too long, or when Redis does not answer. The rest is up to [Store.Run], so an error is for the log.
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

// warmUp joins and waits for the snapshot that the others were asked for.
func (p *sharer) warmUp(ctx context.Context) error {
	if err := p.joinOnce(ctx); err != nil {
		return err
	}
	var err error
	for {
		p.loadNoticed(ctx)
		p.loadContents(ctx)
		p.mu.Lock()
		warm := !p.sync.wanted && p.notice == nil
		p.mu.Unlock()
		warm = warm && !p.isLacking()
		if warm {
			return nil
		}
		failed := p.receive(ctx, 50*time.Millisecond)
		if failed != nil {
			wait(ctx, retryAfter)
		}
		if ctx.Err() != nil {
			return err // late is not wrong: it is loaded when it comes. Nor is Redis, whose answer the end of the time cut short
		}
		err = failed
	}
}

// joinOnce finds the place in the stream from which to read: it says hello, which has a place itself, and reads from one
// lease before that, where every living replica has spoken. If none has, or but to say hello, nobody will answer yet, and the
// last snapshot is taken with all that came after it.
func (p *sharer) joinOnce(ctx context.Context) error {
	p.mu.Lock()
	joined := p.joined
	p.mu.Unlock()
	if joined {
		return nil
	}
	said, err := p.greet(ctx)
	if err != nil {
		return fmt.Errorf("saying hello: %w", err)
	}
	lease := uint64(p.s.o.Lease.Milliseconds())
	p.mu.Lock()
	p.position, p.began = streamID{ms: said.ms - min(said.ms, lease)}, said
	p.sync = hello{wanted: true, said: said, at: time.Now(), tries: 1} // the answer may be among what is read now
	p.mu.Unlock()
	if err := p.readTo(ctx, said); err != nil {
		return err
	}
	p.mu.Lock()
	alone := !slices.ContainsFunc(slices.Collect(maps.Values(p.members)), func(m *member) bool { return !m.starting })
	p.mu.Unlock()
	if alone {
		if err := p.inherit(ctx); err != nil {
			p.s.log.Warn("starting without what earlier replicas knew", "pool", p.pool, "err", err)
		}
		if err := p.readTo(ctx, said); err != nil { // what came after the snapshot
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.joined = true
	p.sync.wanted = p.sync.wanted && !alone
	return nil
}

// readTo takes in what lies between where the stream has been read and a place in it.
func (p *sharer) readTo(ctx context.Context, end streamID) error {
	for {
		p.mu.Lock()
		before := p.position
		p.mu.Unlock()
		if before.compare(end) >= 0 {
			return nil
		}
		if err := p.receive(ctx, 0); err != nil {
			return fmt.Errorf("reading the stream: %w", err)
		}
		p.mu.Lock()
		if p.position == before { // the stream was cut or emptied meanwhile
			p.position = end
		}
		p.mu.Unlock()
	}
}

// greet adds a batch that says hello and nothing else.
func (p *sharer) greet(ctx context.Context) (streamID, error) {
	p.s.sending.RLock()
	defer p.s.sending.RUnlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	b := &statev1.Batch{Replica: p.s.replica, Seq: p.seq + 1, LeaseMs: uint32(p.s.o.Lease.Milliseconds()), Hello: true}
	p.lackAll(b)
	text, err := proto.Marshal(b)
	if err != nil {
		return streamID{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, besidePath)
	defer cancel()
	sent := time.Now()
	reply, err := p.s.client.XAdd(ctx, &redis.XAddArgs{
		Stream: p.keys.stream(), MaxLen: streamLength, Approx: true, Values: []any{batchField, text},
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

// inherit takes the last snapshot of replicas that are gone, if there is one, and goes back to where it was made.
func (p *sharer) inherit(ctx context.Context) error {
	n, err := p.lastSnapshot(ctx)
	if err != nil || n == nil {
		return err
	}
	if err := p.load(ctx, n); err != nil {
		return err
	}
	if id, err := parseStreamID(n.GetPosition()); err == nil {
		p.mu.Lock()
		p.position = id
		p.mu.Unlock()
	}
	return nil
}
