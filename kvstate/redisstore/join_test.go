package redisstore

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	statev1 "tandem/protos/state/v1"
)

// Where Redis comes back to a replica that has not joined yet, what it has to tell and its hello go out at the same time. Each has a
// number of its own and none is left out, or others would take that for a gap.
func TestNumbersAreGivenOnce(t *testing.T) {
	r := startRedis(t)
	c := r.client()
	defer c.Close()
	ctx := context.Background()
	var numbers, want []uint64
	eventually(t, "Redis is in time for all", func() bool {
		r.do("FLUSHALL")
		a := apart(t, redisURL(r), 2)
		defer a.store.Close()
		var late atomic.Int32
		for range 50 {
			var both sync.WaitGroup
			for _, tell := range []func() error{
				func() error { _, err := a.p.publishJoin(ctx); return err },
				func() error { return a.store.flush(ctx, true, false) },
			} {
				both.Go(func() {
					if tell() != nil {
						late.Add(1)
					}
				})
			}
			both.Wait()
		}
		numbers, want = nil, nil
		for i, m := range c.XRange(ctx, a.p.keys.stream(), "-", "+").Val() {
			var b statev1.Batch
			require.NoError(t, proto.Unmarshal([]byte(m.Values[batchField].(string)), &b))
			numbers, want = append(numbers, b.GetSeq()), append(want, uint64(i)+1)
		}
		return late.Load() == 0
	})
	require.Len(t, numbers, 100)
	require.Equal(t, want, numbers)
}

// A replica asks for a snapshot, and again each lease while there is another replica: three times.
func TestWhoAsksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		lease := r.store.o.Lease
		said := func(do func()) bool {
			r.p.mu.Lock()
			defer r.p.mu.Unlock()
			do()
			join := r.p.out.join
			r.p.out.join = false
			require.Equal(t, join, r.store.dirty.Swap(false), "who has something to say is woken")
			return join
		}
		due := func() { r.p.askDue(time.Now()) }
		require.False(t, said(r.p.ask), "nobody is there")
		require.False(t, r.p.sync.wanted)
		r.p.members[1] = &remoteReplica{}
		for range 2 {
			require.True(t, said(r.p.ask))
			require.False(t, said(r.p.ask), "it has asked")
			for range requestTries - 1 {
				require.False(t, said(due))
				time.Sleep(lease)
				require.True(t, said(due))
			}
			require.True(t, r.p.sync.wanted)
			time.Sleep(lease)
			require.False(t, said(due), "nobody answers")
			require.False(t, r.p.sync.wanted)
		}
		require.True(t, said(r.p.ask))
		r.p.sync.wanted = false // as when it is answered
		time.Sleep(lease / 2)
		require.False(t, said(r.p.ask), "it has asked just now")
		time.Sleep(lease / 2)
		require.True(t, said(due))
	})
}

// A gap that shows while an answer is awaited is not filled by that answer, if it was made before.
func TestGapWhileAnAnswerIsAwaited(t *testing.T) {
	r := lonely(t, 1)
	said, gap := streamID{ms: 5, n: 1}, streamID{ms: 7}
	publish := func(id streamID, b *statev1.Batch) {
		b.Replica, b.LeaseMs = 7, uint32(maxLease.Milliseconds())
		text, err := proto.Marshal(b)
		require.NoError(t, err)
		r.p.takeIn(message(id.String(), string(text)))
	}
	now := uint64(time.Now().UnixMilli())
	said.ms, gap.ms = said.ms+now, gap.ms+now
	r.p.joined, r.p.sync = true, snapshotRequest{wanted: true, position: said, at: time.Now(), tries: 1}
	publish(streamID{ms: now + 6}, &statev1.Batch{Seq: 1})
	publish(gap, &statev1.Batch{Seq: 3})
	publish(streamID{ms: now + 8}, &statev1.Batch{Seq: 4, Snapshot: &statev1.SnapshotNotice{Position: streamID{ms: now + 6}.String()}})
	require.Nil(t, r.p.notice)
	require.True(t, r.p.sync.wanted)
	publish(streamID{ms: now + 9}, &statev1.Batch{Seq: 5, Snapshot: &statev1.SnapshotNotice{Position: gap.String()}})
	require.NotNil(t, r.p.notice)
	require.False(t, r.p.sync.wanted)
}

// While a replica that starts waits for an answer Redis may go: it is asked ten times a second, and that is said in the end.
func TestRedisGoesWhileWaitingForAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		x := record(r)
		x.failing(errGone)
		r.p.joined, r.p.sync = true, snapshotRequest{wanted: true}
		require.ErrorIs(t, r.store.Join(t.Context(), 10*retryAfter-time.Millisecond), errGone)
		require.Equal(t, 10, x.refused())
	})
}

// Who starts reads the stream from the last snapshot on, and at least one lease of it: all that live have published since. Without a
// snapshot it reads all of it.
func TestHowMuchIsReadAtTheStart(t *testing.T) {
	text, err := proto.Marshal(&statev1.Batch{Replica: 7, Seq: 1, LeaseMs: 1000})
	require.NoError(t, err)
	for name, c := range map[string]struct {
		snapshot time.Duration // how long ago
		read     int64
	}{"no snapshot": {0, 3}, "an old one": {30 * time.Minute, 2}, "a new one": {time.Millisecond, 1}} {
		t.Run(name, func(t *testing.T) {
			r := startRedis(t)
			a := apart(t, redisURL(r), 1)
			defer a.store.Close()
			now := time.Now()
			for _, ago := range []time.Duration{time.Hour, 20 * time.Minute, a.store.o.Lease / 2} {
				r.do("XADD", a.p.keys.stream(), streamID{ms: uint64(now.Add(-ago).UnixMilli())}.String(), batchField, string(text))
			}
			if c.snapshot > 0 {
				notice, err := proto.Marshal(&statev1.SnapshotNotice{Position: streamID{ms: uint64(now.Add(-c.snapshot).UnixMilli())}.String()})
				require.NoError(t, err)
				r.do("SET", a.p.keys.snapshot(), string(notice))
			}
			require.NoError(t, a.p.joinOnce(t.Context()))
			require.Equal(t, c.read, a.store.Stats().BatchesRead)
		})
	}
}

// After any kill a replica is ready with what Redis holds, at once: those that seem to live may be its own former self, which nobody
// outlives for a lease. (Here the lease is longer than the test waits.)
func TestWarmStartAfterKills(t *testing.T) {
	early, late := prompt(1, 30), prompt(2, 30)
	for name, c := range map[string]struct {
		replicas int
		snapshot bool
	}{
		"one, before the first snapshot": {1, false},
		"one":                            {1, true},
		"all, before the first snapshot": {2, false},
		"all":                            {2, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := startRedis(t)
			o := redisURL(r)
			o.Lease = maxLease
			var all []*replica
			for range c.replicas {
				all = append(all, join(t, o, 2))
			}
			a := all[0]
			a.state.Routed(a.pool, a.e(0), early)
			a.publishedOf(r, 0, 2, early)
			eventually(t, "it has read that", func() bool { a.p.mu.Lock(); defer a.p.mu.Unlock(); return a.p.position != streamID{} })
			if c.snapshot {
				eventually(t, "a snapshot is written", func() bool { return a.p.snapshots.write(t.Context(), snapshotWish{}) == nil })
			} else {
				r.do("DEL", a.p.keys.snapshot())
			}
			a.state.Routed(a.pool, a.e(1), late)
			a.publishedOf(r, 1, 2, late)
			for _, one := range all {
				one.kill()
			}
			for range c.replicas {
				b := apart(t, o, 2)
				began := time.Now()
				eventually(t, "it joins", func() bool { return b.p.warmUp(t.Context()) == nil })
				require.Equal(t, []int{30, 30}, []int{b.hit(0, early), b.hit(1, late)})
				speed(t, time.Since(began), time.Second, "ready")
				b.run()
			}
		})
	}
}

// Where the stream has been cut since the last snapshot, or emptied, others are waited for: Redis does not hold all that they know.
func TestWhatRedisLacks(t *testing.T) {
	at := func(ms uint64) string { return streamID{ms: ms}.String() }
	batch := func(b *statev1.Batch) string {
		text, err := proto.Marshal(b)
		require.NoError(t, err)
		return string(text)
	}
	for name, c := range map[string]struct {
		snapshot uint64 // position
		entries  map[uint64]*statev1.Batch
		gapless  bool
	}{
		"nothing":                         {0, nil, false},
		"all since the first replica":     {0, map[uint64]*statev1.Batch{1000: {Replica: 7, Seq: 1, Joining: true}, 1001: {Replica: 7, Seq: 2}}, true},
		"emptied, no snapshot since":      {0, map[uint64]*statev1.Batch{1000: {Replica: 7, Seq: 20}}, false},
		"emptied, someone asked since":    {0, map[uint64]*statev1.Batch{1000: {Replica: 7, Seq: 20, Joining: true}}, false},
		"a snapshot and all since":        {1000, map[uint64]*statev1.Batch{1000: {Replica: 7, Seq: 9}, 1001: {Replica: 7, Seq: 10}}, true},
		"a snapshot, and cut since":       {1000, map[uint64]*statev1.Batch{1001: {Replica: 7, Seq: 10}}, false},
		"a snapshot, and nothing besides": {1000, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := startRedis(t)
			a := apart(t, redisURL(r), 1)
			defer a.store.Close()
			for _, ms := range slices.Sorted(maps.Keys(c.entries)) {
				r.do("XADD", a.p.keys.stream(), at(ms), batchField, batch(c.entries[ms]))
			}
			if c.snapshot > 0 {
				text, err := proto.Marshal(&statev1.SnapshotNotice{Position: at(c.snapshot)})
				require.NoError(t, err)
				r.do("SET", a.p.keys.snapshot(), string(text))
			}
			require.NoError(t, a.p.joinOnce(t.Context()))
			require.Equal(t, c.gapless, a.p.gapless)
		})
	}
}

// How far Redis's clock is from ours is known from the first reply on, and from each that follows.
func TestRedisClock(t *testing.T) {
	r := startRedis(t)
	a := apart(t, redisURL(r), 1)
	defer a.store.Close()
	ahead := streamID{ms: uint64(time.Now().Add(time.Hour).UnixMilli())} // numbers never go back, so it is as if its clock were
	r.do("XADD", a.p.keys.stream(), ahead.String(), "x", "x")
	known := func() bool {
		d := time.Duration(a.store.clock.ahead.Load()) * time.Microsecond
		return d > time.Hour-patience && d <= time.Hour+patience
	}
	require.False(t, known())
	eventually(t, "it says hello", func() bool { _, err := a.p.publishJoin(context.Background()); return err == nil })
	require.True(t, known())
	a.store.clock.ahead.Store(0)
	eventually(t, "it tells", func() bool { return a.flush(true) == nil })
	require.True(t, known())
}

// emptying is a Redis that is emptied after every hello.
type emptying struct {
	recorder
	empty func()
}

func (e *emptying) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if cmd.Name() == "xadd" {
			e.empty()
		}
		return err
	}
}

// The stream may be emptied while a replica joins: then there is nothing to read.
func TestEmptiedWhileJoining(t *testing.T) {
	r := startRedis(t)
	a := apart(t, redisURL(r), 1)
	defer a.store.Close()
	a.store.client.AddHook(&emptying{empty: func() { r.do("FLUSHALL") }})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, a.p.joinOnce(ctx))
	require.True(t, a.p.joined)
}

// Who starts waits for what others know of KV events, too, even where Redis holds all that was published.
func TestLateComersKnowWhatEnginesReported(t *testing.T) {
	r := startRedis(t)
	a, b := apart(t, redisURL(r), 1), apart(t, redisURL(r), 1)
	defer b.store.Close()
	x, y := newEvents(t, a), newEvents(t, b)
	x.feed.Apply(runsOfBlocks(3, 5))
	y.needs.Store(true)
	a.joins()
	a.run()
	said := a.store.Stats().BatchesSent
	eventually(t, "it has said that it is there", func() bool { return a.store.Stats().BatchesSent > said })
	b.joins()
	require.False(t, y.needs.Load())
	require.Equal(t, x.feed.Stats().Held, y.feed.Stats().Held)
}
