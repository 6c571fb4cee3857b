package redisstore

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// received returns the requests that a replica knows to wait at others, by id.
func (r *replica) received() map[uint64]kvstate.Queued {
	known, changes := map[uint64]kvstate.Queued{}, uint64(0)
	r.pool.SyncRemoteQueue(known, &changes, func(*kvstate.Queued) {}, func(uint64, bool) {})
	return known
}

// Who waits at one replica all know, within some milliseconds, with what endpoints hold of the prompt; and a booking is known before
// the request that it is for waits no more.
func TestWhoWaitsIsKnownEverywhere(t *testing.T) {
	r := startRedis(t)
	a, b, c := join(t, redisURL(r), 4), join(t, redisURL(r), 4), join(t, redisURL(r), 4)
	arrived := time.Now().Add(-2 * time.Minute)
	w := kvstate.Queued{
		ID: 5, Arrived: arrived, Work: 300 * time.Millisecond, Priority: -2, Flow: 9, PromptTokens: 4000,
		Held: []kvstate.Held{{Addr: addr(1), Tokens: 3000}, {Addr: addr(0), Tokens: 10}},
	}
	a.state.PublishQueued(a.pool, w)
	b.state.PublishQueued(b.pool, kvstate.Queued{ID: 6, Arrived: arrived, PromptTokens: 1})
	took := eventually(t, "both are known", func() bool { return len(c.received()) == 2 && len(b.received()) == 1 && len(a.received()) == 1 })
	speed(t, took, 100*time.Millisecond, "known elsewhere")
	got := c.received()[5]
	require.WithinDuration(t, arrived, got.Arrived, time.Minute, "its age comes along; what the way took is lost")
	require.NotZero(t, got.Replica)
	got.Arrived, got.Replica, got.Version = w.Arrived, 0, 0
	require.Equal(t, w, got)

	w.Held = nil
	a.state.PublishQueued(a.pool, w)
	eventually(t, "what has changed is known", func() bool { return c.received()[5].Held == nil })
	a.state.Bookings.Reserve(a.e(0), kvstate.Booking{For: kvstate.RolePrefill, PromptTokens: 4000, Uncached: 4000, Work: time.Second})
	a.state.PublishDequeued(a.pool, 5, true)
	eventually(t, "it waits no more", func() bool { _, waits := c.received()[5]; return !waits })
	require.Equal(t, int64(1), c.booked(0))
	require.Len(t, c.received(), 1)
}

// Who waits is said again and again, which changes nothing; and what waited at a replica that was killed is forgotten with its lease.
func TestWhoWaitedAtAKilledReplica(t *testing.T) {
	r := startRedis(t)
	b, c := join(t, briefly(r), 1), join(t, briefly(r), 1)
	b.state.PublishQueued(b.pool, kvstate.Queued{ID: 6, Arrived: time.Now(), PromptTokens: 1})
	eventually(t, "it is known", func() bool { return len(c.received()) == 1 })
	said := b.store.Stats().BatchesSent
	eventually(t, "it is said again", func() bool { return b.store.Stats().BatchesSent > said+5 })
	eventually(t, "it waits", func() bool { return len(c.received()) == 1 })
	b.kill()
	took := eventually(t, "who waited at the killed one is forgotten", func() bool { return len(c.received()) == 0 })
	speed(t, took, 2*brief, "forgotten with the lease")
}

// What was lost on the way is said again in full.
func TestWhoWaitsIsRepaired(t *testing.T) {
	a, b := apart(t, Options{URL: "redis://127.0.0.1:1"}, 2), apart(t, Options{URL: "redis://127.0.0.1:1"}, 2)
	seq := 0
	deliver := func(complete bool) {
		e, err := a.p.entry(complete, false)
		require.NoError(t, err)
		require.NotNil(t, e)
		seq++
		b.p.takeIn(message(streamID{ms: uint64(time.Now().UnixMilli()), n: uint64(seq)}.String(), string(e.bytes)))
	}
	ids := func() (out []uint64) {
		for id := range b.received() {
			out = append(out, id)
		}
		slices.Sort(out)
		return out
	}
	a.state.PublishQueued(a.pool, kvstate.Queued{ID: 1})
	deliver(false)
	require.Equal(t, []uint64{1}, ids())
	a.state.PublishDequeued(a.pool, 1, true)
	a.state.PublishQueued(a.pool, kvstate.Queued{ID: 2})
	_, err := a.p.entry(false, false) // nobody reads this one
	require.NoError(t, err)
	a.state.PublishQueued(a.pool, kvstate.Queued{ID: 3})
	deliver(false)
	require.Equal(t, []uint64{1, 3}, ids())
	deliver(true)
	require.Equal(t, []uint64{2, 3}, ids())

	a.state.PublishDequeued(a.pool, 2, true)
	_, err = a.p.entry(false, false) // nor this one
	require.NoError(t, err)
	a.p.waitsUnknown = true // as after a write that failed
	deliver(false)
	require.Equal(t, []uint64{3}, ids())
	a.state.PublishDequeued(a.pool, 3, true)
	_, err = a.p.entry(false, false)
	require.NoError(t, err)
	deliver(true)
	require.Empty(t, ids(), "nobody waits any more, which is said too")
}

// A request that was dispatched differs from one that stopped waiting, also in a list of all that wait.
func TestWhoWasSentIsKnown(t *testing.T) {
	a, b := apart(t, Options{URL: "redis://127.0.0.1:1"}, 1), apart(t, Options{URL: "redis://127.0.0.1:1"}, 1)
	over := map[uint64]bool{}
	known, changes, seq := map[uint64]kvstate.Queued{}, uint64(0), 0
	deliver := func(complete bool) {
		e, err := a.p.entry(complete, false)
		require.NoError(t, err)
		require.NotNil(t, e)
		seq++
		b.p.takeIn(message(streamID{ms: uint64(time.Now().UnixMilli()), n: uint64(seq)}.String(), string(e.bytes)))
		b.pool.SyncRemoteQueue(known, &changes, func(*kvstate.Queued) {}, func(id uint64, sent bool) { over[id] = sent })
	}
	for id := range uint64(4) {
		a.state.PublishQueued(a.pool, kvstate.Queued{ID: id + 1})
	}
	deliver(false)
	require.Len(t, known, 4)
	a.state.PublishDequeued(a.pool, 1, true)
	a.state.PublishDequeued(a.pool, 2, false)
	deliver(false)
	require.Equal(t, map[uint64]bool{1: true, 2: false}, over)
	a.state.PublishDequeued(a.pool, 3, true)
	a.state.PublishDequeued(a.pool, 4, false)
	deliver(true)
	require.Equal(t, map[uint64]bool{1: true, 2: false, 3: true, 4: false}, over)
	require.Empty(t, a.pool.TakeDispatched(), "told once")
}

// A release to come may say more of who waits; it is skipped, and what is known of it is used.
func TestWhoWaitsOfAReleaseToCome(t *testing.T) {
	r := apart(t, Options{URL: "redis://127.0.0.1:1"}, 1)
	waits, err := proto.Marshal(&statev1.Waits{Id: 3, PromptTokens: 7, HeldAt: []uint32{0, 9}, Held: []int64{100, 1, 1}})
	require.NoError(t, err)
	waits = protowire.AppendString(protowire.AppendTag(waits, 60, protowire.BytesType), "more")
	b, err := proto.Marshal(&statev1.Batch{Replica: 9, Seq: 1, LeaseMs: 1000, Addresses: []string{addr(0)}})
	require.NoError(t, err)
	b = protowire.AppendBytes(protowire.AppendTag(b, 40, protowire.BytesType), waits)
	b = protowire.AppendVarint(protowire.AppendTag(b, 60, protowire.VarintType), 1)
	r.p.takeIn(message(streamID{ms: uint64(time.Now().UnixMilli())}.String(), string(b)))
	require.Equal(t, []kvstate.Held{{Addr: addr(0), Tokens: 7}}, r.received()[3].Held, "no more than there is of the prompt, where it is known")
}

// What cannot be read of what is held of a prompt is left out, and so is more of it than anybody tells.
func TestWhatIsHeldOfAPrompt(t *testing.T) {
	at, tokens := make([]uint32, kvstate.MaxHeld+1), make([]int64, kvstate.MaxHeld+1)
	for name, c := range map[string]struct {
		at     []uint32
		tokens []int64
		want   []int64
	}{
		"of an address, and of none": {[]uint32{0, 1, 2}, []int64{5, 6, 7}, []int64{5, 6}},
		"of more than there is":      {[]uint32{0, 1}, []int64{-5, 60}, []int64{0, 10}},
		"more addresses than tokens": {[]uint32{0, 1}, []int64{5}, []int64{5}},
		"more tokens than addresses": {[]uint32{0}, []int64{5, 6}, []int64{5}},
		"too much":                   {at, tokens, make([]int64, kvstate.MaxHeld)},
	} {
		var got []int64
		for _, h := range readWaits(&statev1.Waits{PromptTokens: 10, HeldAt: c.at, Held: c.tokens}, positions{{EndpointSpec: kvstate.EndpointSpec{Addr: "a"}}, {EndpointSpec: kvstate.EndpointSpec{Addr: "b"}}}, time.Now()).Held {
			got = append(got, h.Tokens)
		}
		require.Equal(t, c.want, got, name)
	}
}
