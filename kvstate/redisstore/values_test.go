package redisstore

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	"tandem/kvstate/redisstore/lag"
	statev1 "tandem/protos/state/v1"
)

// since is what was counted from one look to another, but for bytes and the time that batches took: those are Redis's.
func since(before, after Stats) Stats {
	return Stats{
		Commands: after.Commands - before.Commands, BatchesSent: after.BatchesSent - before.BatchesSent, BatchesRead: after.BatchesRead - before.BatchesRead,
		Errors: after.Errors - before.Errors, Dropped: after.Dropped - before.Dropped, EventsDropped: after.EventsDropped - before.EventsDropped, NoticesDropped: after.NoticesDropped - before.NoticesDropped,
		Gaps: after.Gaps - before.Gaps, Unknown: after.Unknown - before.Unknown, Snapshots: after.Snapshots - before.Snapshots, SpendUnknown: after.SpendUnknown - before.SpendUnknown,
		Lag: lag.Lag{Count: after.Lag.Count - before.Lag.Count},
	}
}

// counted are two replicas that do nothing by themselves: what they say to Redis is what a test has them say.
type counted struct {
	r       *server
	a, b    *replica
	prompts int
}

// routed has a route a prompt that nobody knows yet to endpoint i.
func (x *counted) routed(i, blocks int) {
	x.prompts++
	x.a.state.Routed(x.a.pool, x.a.e(i), prompt(x.prompts, blocks))
}

func (x *counted) tell(complete bool) { _ = x.a.flush(complete) }
func (x *counted) read(of *replica)   { _ = receive(context.Background(), of.store, 0, of.p) }
func (x *counted) spend()             { x.prompts++; x.a.store.Consume(ticketOf(uint64(x.prompts)), true) }

// notice has a tell the others of notices, and stop when that is done.
func (x *counted) notice(n int) {
	for i := range n {
		x.a.store.PublishNotice(attempt(i))
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); x.a.store.publishNotices(ctx) }()
	for len(x.a.store.notices) > 0 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	<-done
}

// forwards has a forward a batch, as long as there is another one who wants to know.
func (x *counted) forwards(bytes int) {
	x.a.p.ids.Store(&[]uint64{x.a.store.replica, x.a.store.replica + 1})
	x.a.store.Forward(x.a.pool, kvstate.EventBatch{Endpoint: x.a.e(0), Payload: make([]byte, bytes)})
}

// Each thing that passes between replicas and Redis counts as what it is, and as nothing else. A step that Redis was late for, which
// may be whenever this machine has other things to do, is done again: what is counted in a wrong place is so every time.
func TestWhatIsCountedOfRedis(t *testing.T) {
	const much = maxOutbox / 8 * 5 / 8 // blocks: one prompt of them has room, two have not
	received := Stats{Commands: 1, BatchesRead: 1}
	prompted := Stats{Commands: 1, BatchesRead: 1, Lag: lag.Lag{Count: 1}}
	type step struct {
		what    string
		prepare func(x *counted)
		do      func(x *counted)
		a, b    Stats
	}
	none, up, down := func(*counted) {}, true, false
	phases := []struct {
		what  string
		begin func(x *counted)
		up    bool
		steps []step
	}{
		{"redis is there", none, up, []step{
			{"nothing to tell", none, func(x *counted) { x.tell(false) }, Stats{}, Stats{}},
			{"nothing to read", none, func(x *counted) { x.read(x.b) }, Stats{}, Stats{Commands: 1}},
			{"a prompt", none, func(x *counted) { x.routed(0, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, prompted},
			{"one's own is not heard", none, func(x *counted) { x.routed(0, 3); x.tell(false); x.read(x.a) }, Stats{Commands: 2, BatchesSent: 1}, Stats{}},
			{"two prompts at once", func(x *counted) { x.read(x.b) }, func(x *counted) { x.routed(0, 3); x.routed(1, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, prompted},
			{"all that is booked", none, func(x *counted) { x.tell(true); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, received},
			{"a hello", none, func(x *counted) { _, _ = x.a.p.publishJoin(context.Background()); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, received},
			{"of an endpoint that the other one lacks", none, func(x *counted) { x.routed(2, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1},
				Stats{Commands: 1, BatchesRead: 1, Unknown: 1, Lag: lag.Lag{Count: 1}}},
			{"batches are missed", none, func(x *counted) { x.a.p.seq += 5; x.tell(true); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, Stats{Commands: 1, BatchesRead: 1, Gaps: 1}},
			{"a snapshot", func(x *counted) { x.r.do("FLUSHALL") }, func(x *counted) { x.a.p.snapshots.tryWrite(context.Background(), snapshotWish{}) }, Stats{Commands: 3, Snapshots: 1}, Stats{}},
			{"a ticket", none, (*counted).spend, Stats{Commands: 1}, Stats{}},
			{"a ticket that is spent", none, func(x *counted) { x.a.store.Consume(ticketOf(1<<40), true) }, Stats{Commands: 1}, Stats{}},
			{"notices", none, func(x *counted) { x.notice(3) }, Stats{Commands: 2}, Stats{}},
			{"notices of nobody's", none, func(x *counted) { x.a.store.PublishNotice("short") }, Stats{}, Stats{}},
			{"events of engines", func(x *counted) { x.tell(false); x.read(x.b) }, func(x *counted) { x.forwards(1); x.tell(false); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, received},
			{"more of them than there is room for", none, func(x *counted) { x.forwards(maxForwarded); x.forwards(1) }, Stats{EventsDropped: 1}, Stats{}},
		}},
		{"redis is full", func(x *counted) { x.r.do("CONFIG", "SET", "maxmemory", "1") }, down, []step{
			{"a prompt", none, func(x *counted) { x.routed(0, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, Errors: 1}, Stats{Commands: 1}},
			{"all that is booked: one of two commands needs room", none, func(x *counted) { x.tell(true) }, Stats{Commands: 2, Errors: 1}, Stats{}},
		}},
		{"it has room again", func(x *counted) { x.r.do("CONFIG", "SET", "maxmemory", "0") }, up, []step{
			{"all is told", none, func(x *counted) { x.routed(0, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, prompted},
		}},
		{"redis is gone", func(x *counted) { x.r.Kill() }, down, []step{
			{"a prompt", none, func(x *counted) { x.routed(0, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, Errors: 1}, Stats{Commands: 1, Errors: 1}},
			{"all that is booked", none, func(x *counted) { x.tell(true) }, Stats{Commands: 2, Errors: 2}, Stats{}},
			{"a prompt that finds no room", func(x *counted) { x.a.p.out.take() }, func(x *counted) { x.routed(0, much); x.routed(1, much) }, Stats{Dropped: 1}, Stats{}},
			{"two that find none when they come back", func(x *counted) { x.a.p.out.take() }, func(x *counted) {
				x.routed(0, much-3)
				x.routed(1, 3)
				e, _ := x.a.p.entry(false, false)
				pipe := x.a.store.client.Pipeline()
				e.add(context.Background(), pipe, false)
				_, _ = pipe.Exec(context.Background())
				x.routed(0, much)
				_ = e.settle(time.Now(), nil)
			}, Stats{Commands: 1, Errors: 1, Dropped: 2}, Stats{}},
			{"events of engines are not told again", none, func(x *counted) {
				x.forwards(1)
				e, _ := x.a.p.entry(false, false)
				e.reply = redis.NewStringResult("", errors.New("redis is gone"))
				_ = e.settle(time.Now(), nil)
			}, Stats{EventsDropped: 1}, Stats{}},
			{"a ticket", none, (*counted).spend, Stats{SpendUnknown: 1}, Stats{}},
			{"notices", none, func(x *counted) { x.notice(3) }, Stats{NoticesDropped: 3}, Stats{}},
			{"more notices than have room", none, func(x *counted) { x.notice(noticesWaiting + 2) }, Stats{NoticesDropped: noticesWaiting + 2}, Stats{}},
			{"a snapshot", none, func(x *counted) { x.a.p.snapshots.tryWrite(context.Background(), snapshotWish{}) }, Stats{Commands: 1, Errors: 1}, Stats{}},
			{"notices, before anybody has seen that it is gone", func(x *counted) { x.a.store.link.Result(nil) }, func(x *counted) { x.notice(3) }, Stats{Commands: 2, Errors: 2, NoticesDropped: 3}, Stats{}},
		}},
		{"redis is back", func(x *counted) { x.a.p.out.take(); x.r.Start() }, up, []step{
			{"a prompt: no number was used up", none, func(x *counted) { x.routed(0, 3); x.tell(false); x.read(x.b) }, Stats{Commands: 1, BatchesSent: 1}, prompted},
		}},
	}
	x := newCounted(t)
	for _, phase := range phases {
		gaps := x.b.store.Stats().Gaps
		phase.begin(x)
		eventually(t, phase.what, func() bool {
			x.tell(true)
			x.read(x.b)
			_, up := x.a.store.Status()
			return up == phase.up
		})
		require.Equal(t, gaps, x.b.store.Stats().Gaps, "%s: what was not taken has no number", phase.what)
		for _, s := range phase.steps {
			var a, b Stats
			addEndpoint := time.Now().Add(patience)
			for done := false; !done && time.Now().Before(addEndpoint); {
				s.prepare(x)
				beforeA, beforeB := x.a.store.Stats(), x.b.store.Stats()
				s.do(x)
				a, b = since(beforeA, x.a.store.Stats()), since(beforeB, x.b.store.Stats())
				done = a == s.a && b == s.b
			}
			require.Equal(t, []Stats{s.a, s.b}, []Stats{a, b}, "%s: %s", phase.what, s.what)
		}
	}
}

func newCounted(t *testing.T) *counted {
	x := &counted{r: startRedis(t)}
	o := redisURL(x.r)
	o.Lease = maxLease
	x.a, x.b = apart(t, o, 3), apart(t, o, 2)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); x.a.store.askAll(ctx) }()
	t.Cleanup(func() { cancel(); <-done; _, _ = x.a.store.Close(), x.b.store.Close() })
	for _, r := range []*replica{x.a, x.b} {
		eventually(t, "it joins", func() bool { return r.store.Join(ctx, patience) == nil })
	}
	return x
}

// Lag is from when a prompt was routed, so its wait before it was published counts; what others published before this
// one joined does not, nor does what has no prompts in it.
func TestLagIsCounted(t *testing.T) {
	r := apart(t, Options{URL: "redis://127.0.0.1:1"}, 1)
	now := uint64(time.Now().Add(time.Hour).UnixMilli()) // by Redis's clock, so that nothing is older than it says
	r.p.began = streamID{ms: now}
	for i, b := range []*statev1.Batch{
		{WaitedUs: 1500, Blocks: []*statev1.Blocks{{Hashes: []uint64{1}}, {Hashes: []uint64{2}}}},
		{WaitedUs: 100_000, Blocks: []*statev1.Blocks{{Hashes: []uint64{3}}}},
		{WaitedUs: 9_000_000, Blocks: []*statev1.Blocks{{Hashes: []uint64{4}}}},
		{WaitedUs: 1000, Released: []uint64{1}},
		{WaitedUs: 1000, Blocks: []*statev1.Blocks{{Hashes: []uint64{5}}}}, // before the hello
	} {
		id := streamID{now, uint64(i) + 1}
		if i == 4 {
			id = streamID{now - 1, 0}
		}
		b.Replica, b.Seq, b.LeaseMs, b.Addresses = 7, uint64(i)+1, 60_000, []string{addr(0)}
		text, err := proto.Marshal(b)
		require.NoError(t, err)
		r.p.takeIn(message(id.String(), string(text)))
	}
	require.Equal(t, Stats{BatchesRead: 5, Lag: lag.Lag{Count: 3, Seconds: 9.1015, Buckets: [11]uint64{0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2}}}, r.store.Stats())
}

// Who starts reads what others said before it: that is heard, and late for nobody.
func TestWhatWasSaidBeforeIsNotLate(t *testing.T) {
	x := newCounted(t)
	x.routed(0, 3)
	eventually(t, "it is told", func() bool { return x.a.flush(true) == nil })
	c := apart(t, x.a.store.o, 2)
	defer c.store.Close()
	eventually(t, "it joins", func() bool { return c.p.joinOnce(context.Background()) == nil })
	require.Positive(t, c.store.Stats().BatchesRead)
	require.Equal(t, 3, c.hit(0, prompt(1, 3)))
	require.Zero(t, c.store.Stats().Lag.Count)
	x.routed(0, 3)
	eventually(t, "it is told", func() bool { return x.a.flush(true) == nil })
	eventually(t, "it is heard", func() bool { x.read(c); return c.hit(0, prompt(2, 3)) == 3 })
	require.EqualValues(t, 1, c.store.Stats().Lag.Count)
}
