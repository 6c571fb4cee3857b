package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	"tandem/kvstate/prefixindex"
	statev1 "tandem/protos/state/v1"
)

// taking is a Redis that only takes commands, or fails, so that a test has a time of its own (synctest).
type recorder struct {
	mu        sync.Mutex
	kept      map[string]any // by key
	published []*statev1.Batch
	reply     string // the id of an entry; "": what the time makes it
	fails     error
	refuse    int   // how often it failed
	ended     error // of a command whose time was over before it was sent
}

// takingOf puts one in the place of a replica's.
func record(r *replica) *recorder {
	t := &recorder{kept: map[string]any{}}
	r.store.client.AddHook(t)
	return t
}

func (t *recorder) DialHook(next redis.DialHook) redis.DialHook { return next }

func (t *recorder) ProcessHook(redis.ProcessHook) redis.ProcessHook {
	return func(_ context.Context, cmd redis.Cmder) error { return t.take(cmd) }
}

func (t *recorder) ProcessPipelineHook(redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		first := ctx.Err()
		t.ended = first
		for _, cmd := range cmds {
			if err := t.take(cmd); first == nil {
				first = err
			}
		}
		return first
	}
}

// failing has all commands fail from now on, or none.
func (t *recorder) failing(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.fails = err
}

func (t *recorder) refused() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.refuse
}

func (t *recorder) take(cmd redis.Cmder) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.fails != nil {
		cmd.SetErr(t.fails)
		t.refuse++
		return t.fails
	}
	args := cmd.Args()
	switch cmd.Name() {
	case "set":
		if key := args[1].(string); t.kept[key] == nil || !slices.Contains(args, any("nx")) {
			t.kept[key] = args[2]
		}
	case "get":
		v := t.kept[args[1].(string)]
		if v == nil {
			cmd.SetErr(redis.Nil)
			return redis.Nil
		}
		cmd.(*redis.StringCmd).SetVal(fmt.Sprintf("%s", v))
	case "xadd":
		b := &statev1.Batch{}
		if err := proto.Unmarshal(args[len(args)-1].([]byte), b); err != nil {
			return err
		}
		t.published = append(t.published, b)
		id := t.reply
		if id == "" {
			id = streamID{ms: uint64(time.Now().UnixMilli()), n: uint64(len(t.published))}.String()
		}
		cmd.(*redis.StringCmd).SetVal(id)
	}
	return nil
}

// last is what was published last.
func (t *recorder) last() *statev1.Batch { return t.published[len(t.published)-1] }

var errGone = errors.New("redis is gone")

// lonely is a replica that no Redis answers but the one that a test puts in its place.
func lonely(t *testing.T, endpoints int) *replica {
	r := apart(t, Options{URL: "redis://127.0.0.1:1"}, endpoints)
	t.Cleanup(func() { _ = r.store.Close() })
	return r
}

func (r *replica) flush(complete bool) error {
	return r.store.flush(context.Background(), complete, false)
}

// What a request does to the state goes out as one batch, and then it rests; where Redis fails it is left alone for longer. All is
// said at the start, with each heartbeat, and at the end.
func TestWhenItIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		fails    error
		complete []bool // what is published, as far as it is
		refused  int
	}{
		"redis is there": {nil, []bool{true, false, false, true, true, true}, 0},
		// Two commands each time that all is said, else one; tried again with what comes after retryAfter, with beats, and at the end.
		"redis is gone": {errGone, nil, 2 + 1 + 2 + 2 + 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := lonely(t, 2)
				x := record(r)
				x.failing(c.fails)
				stop := during(t.Context(), r.store.write)
				time.Sleep(50 * time.Millisecond)
				routed := func(n int) { r.state.Routed(r.pool, r.e(0), prompt(n, 2)) }
				routed(1)
				time.Sleep(gatherFor / 2)
				routed(2) // with the first
				time.Sleep(gatherFor)
				routed(3) // while it rests
				time.Sleep(restFor)
				routed(4) // with the third
				time.Sleep(2 * r.store.o.Lease / beatsPerLease)
				stop()
				var complete []bool
				blocks := 0
				for _, b := range x.published {
					complete, blocks = append(complete, b.GetComplete()), blocks+len(b.GetBlocks())
				}
				require.Equal(t, c.complete, complete)
				require.Equal(t, c.refused, x.refused())
				if c.fails == nil {
					require.Equal(t, 4, blocks)
					require.True(t, x.last().GetLeaving())
				}
			})
		})
	}
}

// A replica that knows of no other publishes some 20 times a second, whatever happens to it; with another one, at most every 6 ms; and
// of several each publishes less often, so that all together publish as often.
func TestAReplicaAlonePublishesSeldom(t *testing.T) {
	for name, c := range map[string]struct{ replicas, least, most int }{
		"alone":        {1, 18, 22},
		"with another": {2, 150, 170},
		"of 4":         {4, 80, 92},
		"of 16":        {16, 22, 26},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := lonely(t, 2)
				x := record(r)
				ids := make([]uint64, c.replicas)
				r.p.ids.Store(&ids)
				stop := during(t.Context(), r.store.write)
				for i := range 1000 {
					r.state.Routed(r.pool, r.e(0), prompt(i, 2))
					time.Sleep(time.Millisecond)
				}
				stop()
				require.GreaterOrEqual(t, len(x.published), c.least)
				require.LessOrEqual(t, len(x.published), c.most+2, "and when it starts and stops")
			})
		})
	}
}

// The wait of a batch's first entry goes with the batch: it is part of the lag at the receivers.
func TestWhatWaitedSaysForHowLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 2)
		x := record(r)
		r.state.Routed(r.pool, r.e(0), prompt(1, 2))
		time.Sleep(30 * time.Millisecond)
		x.failing(errGone)
		require.ErrorIs(t, r.flush(false), errGone)
		time.Sleep(5 * time.Millisecond)
		r.state.Routed(r.pool, r.e(0), prompt(2, 2))
		time.Sleep(2 * time.Millisecond)
		x.failing(nil)
		require.NoError(t, r.flush(false))
		require.EqualValues(t, 37_000, x.last().GetWaitedUs())
		r.state.Routed(r.pool, r.e(0), prompt(3, 2))
		time.Sleep(time.Millisecond)
		require.NoError(t, r.flush(false))
		require.EqualValues(t, 1000, x.last().GetWaitedUs())
	})
}

// What Redis did not take is published again with the next batch, and before what came since.
func TestWhatWasNotTakenIsToldAgain(t *testing.T) {
	r := lonely(t, 2)
	x := record(r)
	require.NoError(t, r.flush(true))
	r.state.Routed(r.pool, r.e(0), prompt(1, 2))
	r.state.Sessions.SetAffinity(r.pool, 7, r.e(0), r.e(1))
	r.state.Bookings.Reserve(r.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
	r.state.Health.MarkFailed(r.e(1))
	r.state.Observe(r.e(0), kvstate.Signals{Running: 3, At: time.Now()})
	r.state.PublishQueued(r.pool, kvstate.Queued{ID: 5})
	r.store.Released(r.pool, 11)
	r.store.Learned(r.pool, prefixindex.LearnedTokens{Prompt: 21})
	r.p.requestSnapshot()
	r.p.out.notice = &statev1.SnapshotNotice{Id: 31}
	for _, fail := range []func(){func() { x.failing(errGone) }, func() { x.failing(nil); x.reply = "no id" }} {
		fail()
		require.Error(t, r.flush(false))
		_, up := r.store.Status()
		require.False(t, up)
	}
	x.reply = ""
	r.state.Routed(r.pool, r.e(1), prompt(2, 2))
	r.store.Released(r.pool, 12)
	r.store.Learned(r.pool, prefixindex.LearnedTokens{Prompt: 22})
	r.state.Sessions.SetAffinity(r.pool, 8, r.e(0), nil)
	require.NoError(t, r.flush(false))
	b := x.last()
	require.EqualValues(t, 2, b.GetSeq(), "what was not taken has no number")
	require.Len(t, b.GetBlocks(), 2)
	require.Equal(t, prompt(1, 2), b.GetBlocks()[0].GetHashes())
	require.Equal(t, []uint64{7, 8}, []uint64{b.GetSessions()[0].GetKey(), b.GetSessions()[1].GetKey()})
	require.Equal(t, []uint64{11, 12}, b.GetReleased())
	require.Equal(t, []uint64{21, 22}, []uint64{b.GetTokens()[0].GetPrompt(), b.GetTokens()[1].GetPrompt()})
	require.Equal(t, []int{1, 1, 1}, []int{len(b.GetLoads()), len(b.GetHealth()), len(b.GetSignals())})
	require.True(t, b.GetWaitsAll())
	require.True(t, b.GetJoining())
	require.EqualValues(t, 31, b.GetSnapshot().GetId())

	require.NoError(t, r.flush(false))
	require.Same(t, b, x.last(), "and once")
	r.state.PublishQueued(r.pool, kvstate.Queued{ID: 6})
	require.NoError(t, r.flush(false))
	require.False(t, x.last().GetWaitsAll())
}

// If a newer snapshot was announced meanwhile, that is the one.
func TestTheNewerNoticeIsTold(t *testing.T) {
	unsent := changes{notice: &statev1.SnapshotNotice{Id: 1}, lossy: true}
	o := outbox{changes: changes{notice: &statev1.SnapshotNotice{Id: 3}}}
	require.Zero(t, o.requeue(&unsent))
	require.EqualValues(t, 3, o.notice.GetId())
	require.True(t, o.lossy, "what found no room finds none later")
}

// What found no room is published as a snapshot for all, once there is a receiver.
func TestWhatFoundNoRoomIsInASnapshot(t *testing.T) {
	r := lonely(t, 1)
	x := record(r)
	r.store.Routed(r.pool, r.e(0), make([]uint64, maxOutbox/8))
	r.state.Routed(r.pool, r.e(0), prompt(1, 2))
	x.failing(errGone)
	require.Error(t, r.flush(false))
	require.Empty(t, r.p.snapshots.due)
	x.failing(nil)
	require.NoError(t, r.flush(false))
	<-r.p.snapshots.due
	require.Equal(t, snapshotWish{everyone: true}, r.p.snapshots.take())
	require.NoError(t, r.flush(true))
	require.Empty(t, r.p.snapshots.due, "once")
}

// The end does not cut short what is on its way.
func TestWhatIsOnItsWayAtTheEndIsTold(t *testing.T) {
	r := lonely(t, 1)
	x := record(r)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.store.write(ended)
	require.Len(t, x.published, 2, "what there was at the start, and goodbye")
	require.True(t, x.last().GetLeaving())
	require.NoError(t, x.ended)
	_, up := r.store.Status()
	require.True(t, up)
}

// Each kind of entry is published, also alone; and again only when it has changed.
func TestEachThingIsToldByItself(t *testing.T) {
	for name, happens := range map[string]func(r *replica){
		"a prompt":            func(r *replica) { r.state.Routed(r.pool, r.e(0), prompt(1, 1)) },
		"a session":           func(r *replica) { r.state.Sessions.SetAffinity(r.pool, 1, r.e(0), nil) },
		"a release":           func(r *replica) { r.store.Released(r.pool, 1) },
		"what was learned":    func(r *replica) { r.store.Learned(r.pool, prefixindex.LearnedTokens{Prompt: 1}) },
		"a forwarded batch":   func(r *replica) { r.store.Forward(r.pool, kvstate.EventBatch{Endpoint: r.e(0)}) },
		"where a snapshot is": func(r *replica) { r.p.out.notice = &statev1.SnapshotNotice{Id: 1}; r.store.Changed() },
		"hello":               func(r *replica) { r.p.requestSnapshot() },
		"a booking": func(r *replica) {
			r.state.Bookings.Reserve(r.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 1})
		},
		"a failure": func(r *replica) { r.state.Health.MarkFailed(r.e(0)) },
		"signals":   func(r *replica) { r.state.Observe(r.e(0), kvstate.Signals{Running: 1, At: time.Now()}) },
		"who waits": func(r *replica) { r.state.PublishQueued(r.pool, kvstate.Queued{ID: 1}) },
	} {
		r := lonely(t, 1)
		x := record(r)
		r.p.ids.Store(&[]uint64{r.store.replica, r.store.replica + 1})
		require.NoError(t, r.flush(true))
		require.NoError(t, r.flush(false))
		require.Len(t, x.published, 1, name)
		happens(r)
		require.True(t, r.store.dirty.Load(), "%s: it is woken", name)
		require.NoError(t, r.flush(false))
		require.Len(t, x.published, 2, name)
		require.NoError(t, r.flush(false))
		require.Len(t, x.published, 2, name)
	}
}

// What was learned of prompts takes no more than half of the room: it will be learned again.
func TestWhatWasLearnedHasHalfTheRoom(t *testing.T) {
	r := lonely(t, 1)
	for i, blocks := range []int{maxOutbox / 8 / 4, maxOutbox / 8 / 4, 1} {
		r.store.Learned(r.pool, prefixindex.LearnedTokens{Prompt: uint64(i), Blocks: []prefixindex.LearnedBlocks{{Size: 16, Hashes: make([]uint64, blocks)}}})
	}
	x := record(r)
	require.NoError(t, r.flush(false))
	require.Len(t, x.last().GetTokens(), 2)
	require.Equal(t, []uint64{0, 2}, []uint64{x.last().GetTokens()[0].GetPrompt(), x.last().GetTokens()[1].GetPrompt()})
	require.False(t, r.p.out.lossy, "no snapshot has it")
}

// A KV load that failed at one replica is avoided by all: the end of a request is reported to one replica only. It holds until one
// sees the pair succeed. What is applied is not published again.
func TestFailedKVLoadsAreShared(t *testing.T) {
	a, b := lonely(t, 2), lonely(t, 2)
	xa, xb := record(a), record(b)
	p, d := a.e(0).Addr, a.e(1).Addr
	require.True(t, a.state.KVLoads.LoadFailed(a.pool, p, d))
	require.NoError(t, a.flush(false))
	b.hears(xa.last())
	require.True(t, b.e(0).LoadFaults().Avoids(d))
	require.NoError(t, b.flush(true))
	require.Empty(t, xb.last().GetKvLoads())

	b.state.KVLoads.LoadSucceeded(b.pool, p, d)
	require.NoError(t, b.flush(false))
	a.hears(xb.last())
	require.False(t, a.e(0).LoadFaults().Avoids(d))
	b.state.KVLoads.LoadSucceeded(b.pool, p, d) // as nearly always: nothing had failed
	require.NoError(t, b.flush(true))
	require.Empty(t, xb.last().GetKvLoads())
}

// What a request costs in bytes: its prompt once for both endpoints, 8 bytes a block, and its reservations.
func TestBytesOfARequest(t *testing.T) {
	r := lonely(t, 2)
	x := record(r)
	require.NoError(t, r.flush(true))
	for i := range 2 {
		r.state.Bookings.Reserve(r.e(i), kvstate.Booking{For: []kvstate.Role{kvstate.RolePrefill, kvstate.RoleDecode}[i], PromptTokens: 12800, Uncached: 12800, Work: time.Second})
		r.state.Routed(r.pool, r.e(i), prompt(1, 100))
	}
	before := len(x.published)
	require.NoError(t, r.flush(false))
	require.Len(t, x.published, before+1)
	require.LessOrEqual(t, proto.Size(x.last()), 8*100+150)
}

// Complete batches of all replicas come at about the same moments of Redis's clock, whatever their own clocks and starts, and at
// least twice in a lease.
func TestBeatsComeTogether(t *testing.T) {
	now := time.Now()
	for i := range uint64(200) {
		r := lonely(t, 1)
		r.store.replica = newReplica(now) + i<<20
		r.store.clock.ahead.Store(int64(i) * 7777)
		every := r.store.o.Lease / beatsPerLease
		left := untilBeat(r.store, now)
		require.GreaterOrEqual(t, left, every/2)
		require.Less(t, left, 3*every/2)
		phase := (r.store.clock.of(now) + left) % every
		require.Less(t, phase, beatSpread)
	}
}
