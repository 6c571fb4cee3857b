package redisstore

import (
	"context"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// What one replica routes, every other knows within 100 ms. (Mostly it takes 5 ms.)
func TestRoutedPrefixesAreKnownEverywhere(t *testing.T) {
	r := startRedis(t)
	a, b, c := join(t, redisURL(r), 4), join(t, redisURL(r), 4), join(t, redisURL(r), 4)
	var took []time.Duration
	for i := range 50 {
		hashes := prompt(i, 100)
		a.state.Routed(a.pool, a.e(i%4), hashes)
		took = append(took, eventually(t, "the prefix is known", func() bool { return b.hit(i%4, hashes) == 100 && c.hit(i%4, hashes) == 100 }))
	}
	slices.Sort(took)
	t.Logf("known elsewhere after: median %v, slowest %v", took[25], took[49])
	require.Less(t, took[45], 100*time.Millisecond)
}

// Bookings of all replicas count for each, those of one that was killed for as long as its lease, and of one that was stopped
// no longer at all.
func TestBookingsHoldForALease(t *testing.T) {
	r := startRedis(t)
	a, b, c := join(t, redisURL(r), 4), join(t, redisURL(r), 4), join(t, redisURL(r), 4)
	id := a.state.Reserve(a.e(0), 1000)
	b.state.Reserve(b.e(0), 100)
	eventually(t, "the bookings are known", func() bool { return a.booked(0) == 2 && b.booked(0) == 2 && c.booked(0) == 2 })
	requests, tokens := c.e(0).Others()
	require.Equal(t, []int64{2, 1100}, []int64{requests, tokens})
	a.state.Release(id)
	eventually(t, "the release is known", func() bool { return c.booked(0) == 1 && b.booked(0) == 1 && a.booked(0) == 1 })
	a.state.Reserve(a.e(1), 10)
	eventually(t, "the booking is known", func() bool { return c.booked(1) == 1 })
	require.Equal(t, 3, c.store.Replicas())

	b.kill()
	took := eventually(t, "what the killed one had booked is void", func() bool { return c.booked(0) == 0 && a.booked(0) == 0 })
	require.Less(t, took, 2*testLease)
	require.Equal(t, int64(1), c.booked(1))
	a.stop()
	took = eventually(t, "what the stopped one had booked is void", func() bool { return c.booked(1) == 0 })
	require.Less(t, took, testLease/2)
	require.Equal(t, 1, c.store.Replicas())
}

// Who fails a request of one replica is left out by all, until one of them sees that it is back.
func TestFailuresAreShared(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	a.state.MarkFailed(a.e(1))
	eventually(t, "the failure is known", func() bool { return b.e(1).Failed() })
	b.state.MarkGood(b.e(1))
	eventually(t, "the return is known", func() bool { return !a.e(1).Failed() })
	c := apart(t, redisURL(r), 2)
	a.state.MarkFailed(a.e(0))
	eventually(t, "the failure is known", func() bool { return b.e(0).Failed() })
	require.NoError(t, c.store.Join(context.Background(), 2*time.Second))
	require.True(t, c.e(0).Failed(), "a replica that comes later knows it too")
	require.False(t, c.e(1).Failed())
}

// What one replica hears from an engine, all know, with its age.
func TestSignalsAreShared(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	at := time.Now().Add(-2 * time.Second)
	a.state.Observe(a.e(0), kvstate.Signals{Running: 3, Waiting: 5, KVUsage: .25, KVTokens: -1, At: at})
	eventually(t, "the signals are known", func() bool { return b.e(0).Signals() != nil })
	got := *b.e(0).Signals()
	require.WithinDuration(t, at, got.At, 100*time.Millisecond)
	got.At = time.Time{}
	require.Equal(t, kvstate.Signals{Running: 3, Waiting: 5, KVUsage: .25, KVTokens: -1}, got)
	require.Nil(t, b.e(1).Signals())
}

func TestSessionsAreShared(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 3), join(t, redisURL(r), 3)
	a.state.Stick(a.pool, 77, a.e(0), a.e(2))
	marked := func(of *replica) []kvstate.Role {
		var v kvstate.View
		of.state.View(of.pool, nil, &v)
		of.state.MarkSession(of.pool, 77, &v)
		return []kvstate.Role{v.Endpoints[0].Session, v.Endpoints[1].Session, v.Endpoints[2].Session}
	}
	want := []kvstate.Role{kvstate.RolePrefill, 0, kvstate.RoleDecode}
	eventually(t, "the session is known", func() bool { return slices.Equal(marked(b), want) })
	c := join(t, redisURL(r), 3)
	require.Equal(t, want, marked(c), "a replica that comes later knows it too")
}

// One ticket buys one decode, whichever replica it comes to. (Redis has 5 ms to answer. Where this machine is too busy for
// that, the replicas decide by themselves, and say how often.)
func TestTicketsAreSpentOnce(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 1), join(t, redisURL(r), 1)
	twice := int64(0)
	for i := range 100 {
		ticket := [16]byte{1, byte(i)}
		require.True(t, a.state.Spend(ticket))
		require.False(t, a.state.Spend(ticket))
		if b.state.Spend(ticket) {
			twice++
		}
	}
	unknown := a.store.Stats().SpendUnknown + b.store.Stats().SpendUnknown
	require.LessOrEqual(t, twice, unknown)
	require.Less(t, unknown, int64(50))
}

// Where Redis is frozen a request waits for some milliseconds, and soon not at all.
func TestSpendingDoesNotWaitForAFrozenRedis(t *testing.T) {
	r := startRedis(t)
	a := join(t, redisURL(r), 1)
	require.True(t, a.state.Spend([16]byte{0}))
	r.signal(syscall.SIGSTOP)
	defer r.signal(syscall.SIGCONT)
	var all, worst time.Duration
	for i := range 200 {
		began := time.Now()
		require.True(t, a.state.Spend([16]byte{1, byte(i)}))
		took := time.Since(began)
		all, worst = all+took, max(worst, took)
	}
	t.Logf("200 tickets in %v, the slowest %v", all, worst)
	require.Less(t, worst, 60*time.Millisecond)
	require.Less(t, all, 500*time.Millisecond)
	eventually(t, "the store says so", func() bool { _, up := a.store.Status(); return !up })
	text, _ := a.store.Status()
	require.Contains(t, text, "redis: not in use")
}

func TestHandOversAreFoundByAll(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 1), join(t, redisURL(r), 1)
	params := make([]byte, 1<<20)
	ref, err := a.state.PutHandOver(params)
	require.NoError(t, err)
	got, ok := b.state.TakeHandOver(ref)
	require.True(t, ok)
	require.Equal(t, params, got)
	_, ok = b.state.TakeHandOver([16]byte{1})
	require.False(t, ok)
}

// A batch for which Redis has no room, or an entry that is no batch, harms nobody.
func TestWhatCannotBeReadIsLeftAlone(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	stream := a.p.keys.stream()
	r.do("XADD", stream, "*", "b", "\xff\xff\xff not a batch")
	r.do("XADD", stream, "*", "another field", "of another release")
	r.do("XADD", stream, "*", "b", "\x09\x01\x00\x00\x00\x00\x00\x00\x00\x10\x01\x18\xe8\x07\x3a\x00\xfa\x07\x03abc") // with a field 127
	hashes := prompt(1, 10)
	a.state.Routed(a.pool, a.e(0), hashes)
	eventually(t, "what comes after is read", func() bool { return b.hit(0, hashes) == 10 })
}
