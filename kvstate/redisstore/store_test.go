package redisstore

import (
	"math"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate"
)

// What one replica routes, every other knows: within 100 ms, where the machine has time. (Mostly it takes 5 ms.)
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
	speed(t, took[45], 100*time.Millisecond, "known elsewhere, 90 of 100")
}

// A prompt goes to the two endpoints of a pair; its hashes are published once.
func TestPairsAreToldOnce(t *testing.T) {
	a, b := apart(t, Options{URL: "redis://127.0.0.1:1"}, 4), apart(t, Options{URL: "redis://127.0.0.1:1"}, 4)
	hashes, other := prompt(1, 20), prompt(2, 20)
	a.state.Routed(a.pool, a.e(0), hashes)
	a.state.Routed(a.pool, a.e(2), hashes)
	a.state.Routed(a.pool, a.e(3), other)
	e, err := a.p.entry(false, false)
	require.NoError(t, err)
	require.Less(t, len(e.bytes), 2*8*20+200)
	b.p.takeIn(message("1-1", string(e.bytes)))
	require.Equal(t, []int{20, 0, 20, 0}, []int{b.hit(0, hashes), b.hit(1, hashes), b.hit(2, hashes), b.hit(3, hashes)})
	require.Equal(t, []int{0, 20}, []int{b.hit(0, other), b.hit(3, other)})
}

// Bookings of all replicas count for each, and those of one that was stopped no longer at all: here its lease is longer than the
// test waits.
func TestBookingsAreShared(t *testing.T) {
	r := startRedis(t)
	long := redisURL(r)
	long.Lease = maxLease
	a, b, c := join(t, long, 4), join(t, long, 4), join(t, long, 4)
	id := a.state.Bookings.Reserve(a.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 1000})
	b.state.Bookings.Reserve(b.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 100})
	eventually(t, "the bookings are known", func() bool { return a.booked(0) == 2 && b.booked(0) == 2 && c.booked(0) == 2 })
	others := c.e(0).RemoteLoad()
	require.Equal(t, []int64{2, 1100}, []int64{others.Requests, others.PromptTokens})
	a.state.Bookings.Release(id)
	eventually(t, "the release is known", func() bool { return c.booked(0) == 1 && b.booked(0) == 1 && a.booked(0) == 1 })
	a.state.Bookings.Reserve(a.e(1), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
	eventually(t, "the booking is known", func() bool { return c.booked(1) == 1 })
	require.Equal(t, 3, c.store.Replicas())
	a.stop()
	took := eventually(t, "what the stopped one had booked is void", func() bool { return c.booked(1) == 0 })
	speed(t, took, 300*time.Millisecond, "void at once")
	require.Equal(t, 2, c.store.Replicas())
	require.Equal(t, int64(1), c.booked(0))
}

// Those of one that was killed count for as long as its lease.
func TestBookingsHoldForALease(t *testing.T) {
	r := startRedis(t)
	a, b, c := join(t, briefly(r), 2), join(t, briefly(r), 2), join(t, briefly(r), 2)
	a.state.Bookings.Reserve(a.e(1), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
	b.state.Bookings.Reserve(b.e(0), kvstate.Booking{For: kvstate.RoleDecode, PromptTokens: 10})
	eventually(t, "the bookings are known", func() bool { return c.booked(0) == 1 && c.booked(1) == 1 })
	b.kill()
	took := eventually(t, "what the killed one had booked is void", func() bool { return c.booked(0) == 0 && a.booked(0) == 0 })
	speed(t, took, 2*brief, "void with the lease")
	eventually(t, "what the living one has booked is not", func() bool { return c.booked(1) == 1 })
}

// What one replica has in a prefill endpoint's queue is as long for all, and gets shorter for all while the engine works on
// it; and how busy the fleet is, on which it depends how much a prefix that is held is worth, is the same for all.
func TestWorkIsShared(t *testing.T) {
	r := startRedis(t)
	a, b, c := join(t, redisURL(r), 4), join(t, redisURL(r), 4), join(t, redisURL(r), 4)
	const work, paused = 200 * time.Second, 50. // what may have been done of it, in seconds, when a busy machine looks
	prefill := kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 5000, Uncached: 5000, Work: work}
	id := a.state.Bookings.Reserve(a.e(0), prefill)
	b.state.Bookings.Reserve(b.e(0), prefill)
	a.state.Bookings.Reserve(a.e(1), kvstate.Booking{For: kvstate.RoleBoth, PromptTokens: 5000, Uncached: 5000, Work: work})
	see := func(r *replica) *kvstate.View {
		var v kvstate.View
		r.state.View(r.pool, nil, &v)
		return &v
	}
	for _, r := range []*replica{a, b, c} {
		eventually(t, "the work is known", func() bool { v := see(r); return v.Endpoints[0].Jobs == 2 && v.Endpoints[1].Local > 0 })
		v := see(r)
		require.InDelta(t, 2*work.Seconds(), v.Endpoints[0].Queue.Seconds(), paused)
		require.InDelta(t, work.Seconds(), v.Endpoints[1].Local.Seconds(), paused)
	}
	began := time.Now()
	before := see(c)
	eventually(t, "both are under way", func() bool {
		now := see(c)
		return now.Endpoints[0].Queue < before.Endpoints[0].Queue-2*time.Second && now.Endpoints[1].Local < before.Endpoints[1].Local-time.Second
	})
	done := before.Endpoints[0].Queue - see(c).Endpoints[0].Queue
	require.Less(t, done.Seconds(), time.Since(began).Seconds()+paused, "work is done no faster than time goes, but for errors about Redis' clock")
	eventually(t, "all are as busy", func() bool {
		busy := []kvstate.Utilisation{see(a).Load, see(b).Load, see(c).Load}
		return busy[0].Prefill > 0 && math.Abs(busy[0].Prefill-busy[1].Prefill) < .05 && math.Abs(busy[0].Prefill-busy[2].Prefill) < .05 &&
			busy[0].Local > 0 && math.Abs(busy[0].Local-busy[2].Local) < .05
	})

	a.state.Bookings.Complete(id)
	eventually(t, "the release is known", func() bool { return see(c).Endpoints[0].Jobs == 1 })
	require.InDelta(t, work.Seconds(), see(c).Endpoints[0].Queue.Seconds(), 2*paused)
	b.kill()
	eventually(t, "what the killed one had booked is void", func() bool { v := see(c).Endpoints[0]; return v.Jobs == 0 && v.Queue == 0 })
}

// Who fails a request of one replica is left out by all, until one of them sees that it is back.
func TestFailuresAreShared(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	a.state.Health.MarkFailed(a.e(1))
	eventually(t, "the failure is known", func() bool { return b.e(1).Failed() })
	require.False(t, kvstate.Hung(b.e(1)))
	a.state.Health.Mark(a.e(1), true, kvstate.CauseTimeLimit, "")
	eventually(t, "that it hangs is known", func() bool { return kvstate.Hung(b.e(1)) })
	// Again and again, as probes do: what b hears of a's complete state may be older than its own word.
	eventually(t, "the return is known", func() bool { b.state.Health.MarkGood(b.e(1)); return !a.e(1).Failed() })
	c := apart(t, redisURL(r), 2)
	a.state.Health.MarkFailed(a.e(0))
	eventually(t, "the failure is known", func() bool { return b.e(0).Failed() })
	c.joins()
	require.True(t, c.e(0).Failed(), "a replica that comes later knows it too")
	require.False(t, c.e(1).Failed())
}

// What one replica hears from an engine, all know, with its age.
func TestSignalsAreShared(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 2), join(t, redisURL(r), 2)
	at := time.Now().Add(-2 * time.Minute)
	moved := kvstate.TransferCounters{Transfers: 7, Bytes: 1 << 50, Time: time.Hour, Tokens: 9000}
	host := kvstate.HostMemory{Tokens: 1, Bytes: 1 << 40, LoadedTokens: 3, LoadedBytes: 4, LoadTime: time.Minute}
	a.state.Observe(a.e(0), kvstate.Signals{Running: 3, Waiting: 5, KVUsage: .25, KVTokens: -1, Transfers: moved, Host: host, At: at})
	eventually(t, "the signals are known", func() bool { return b.e(0).Signals() != nil })
	got := *b.e(0).Signals()
	require.WithinDuration(t, at, got.At, time.Minute, "its age comes along; what the way took is lost")
	require.Equal(t, got.At, got.ScrapedAt)
	got.At, got.ScrapedAt = time.Time{}, time.Time{}
	require.EqualExportedValues(t, kvstate.Signals{Running: 3, Waiting: 5, KVUsage: .25, KVTokens: -1, Transfers: moved, Host: host}, got)
	require.Nil(t, b.e(1).Signals())

	// The second of two scrapes shows external load; only the replica that scraped can compute it.
	a.state.Observe(a.e(0), kvstate.Signals{Running: 3, Waiting: 4, KVUsage: .25, KVTokens: -1, At: at.Add(time.Second)})
	eventually(t, "what came another way is known", func() bool { return b.e(0).Signals().External == 7 })

	// An answer's header is published as such: the scrape before it stays as old as it was, at every receiver.
	looked := b.e(0).Signals().ScrapedAt
	for i := range 3 {
		b.state.Observe(b.e(0), kvstate.Signals{Running: -1, Waiting: int64(6 + i), KVUsage: .5, KVTokens: -1, At: at.Add(time.Duration(2+i) * time.Second)})
		eventually(t, "the header is known", func() bool { return a.e(0).Signals().Waiting == int64(6+i) })
	}
	require.Equal(t, at.Add(time.Second), a.e(0).Signals().ScrapedAt, "its own look")
	a.state.Observe(a.e(0), kvstate.Signals{Running: 4, Waiting: 0, KVUsage: .25, KVTokens: -1, At: at.Add(3 * time.Second)})
	eventually(t, "a look is news, whatever headers came since", func() bool { return b.e(0).Signals().Running == 4 })
	g := b.e(0).Signals()
	require.EqualValues(t, 8, g.Waiting)
	require.WithinDuration(t, looked.Add(2*time.Second), g.ScrapedAt, time.Minute)
	require.True(t, g.At.After(g.ScrapedAt))
}

func TestSessionsAreShared(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 3), join(t, redisURL(r), 3)
	a.state.Sessions.SetAffinity(a.pool, 77, a.e(0), a.e(2))
	marked := func(of *replica) []kvstate.Role {
		var v kvstate.View
		of.state.View(of.pool, nil, &v)
		of.state.Sessions.MarkSession(of.pool, 77, &v)
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
		require.True(t, a.state.HandOvers.Consume(ticket))
		require.False(t, a.state.HandOvers.Consume(ticket))
		if b.state.HandOvers.Consume(ticket) {
			twice++
		}
	}
	unknown := a.store.Stats().SpendUnknown + b.store.Stats().SpendUnknown
	require.LessOrEqual(t, twice, unknown)
	t.Logf("%d of 300 decided without Redis", unknown)
	if os.Getenv("TANDEM_SPEED") != "" {
		require.Less(t, unknown, int64(50))
	}
}

// Where Redis is frozen a request waits for some milliseconds, and soon not at all.
func TestSpendingDoesNotWaitForAFrozenRedis(t *testing.T) {
	r := startRedis(t)
	a := join(t, redisURL(r), 1)
	require.True(t, a.state.HandOvers.Consume([16]byte{0}))
	r.Signal(syscall.SIGSTOP)
	defer r.Signal(syscall.SIGCONT)
	var all, worst time.Duration
	for i := range 200 {
		began := time.Now()
		require.True(t, a.state.HandOvers.Consume([16]byte{1, byte(i)}))
		took := time.Since(began)
		all, worst = all+took, max(worst, took)
	}
	speed(t, worst, 60*time.Millisecond, "the slowest ticket")
	speed(t, all, 500*time.Millisecond, "200 tickets")
	eventually(t, "the store says so", func() bool { _, up := a.store.Status(); return !up })
	text, _ := a.store.Status()
	require.Contains(t, text, "redis: not in use")
}

func TestHandOversAreFoundByAll(t *testing.T) {
	r := startRedis(t)
	a, b := join(t, redisURL(r), 1), join(t, redisURL(r), 1)
	params := make([]byte, 1<<20)
	eventually(t, "Redis takes it and gives it in the 50 ms that it has for either", func() bool {
		ref, err := a.state.HandOvers.PutHandOver(params)
		require.NoError(t, err)
		got, ok := b.state.HandOvers.TakeHandOver(ref)
		if ok {
			require.Equal(t, params, got)
		}
		return ok
	})
	_, ok := b.state.HandOvers.TakeHandOver([16]byte{1})
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
