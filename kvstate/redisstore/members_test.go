package redisstore

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// hears has a replica read what another one publishes now.
func (r *replica) hears(b *statev1.Batch) {
	r.t.Helper()
	b.LeaseMs = uint32(maxLease.Milliseconds())
	text, err := proto.Marshal(b)
	require.NoError(r.t, err)
	r.p.takeIn(message(streamID{ms: uint64(time.Now().UnixMilli())}.String(), string(text)))
}

// What others book is the sum of what each said last, on each endpoint and of the fleet, and of those that are gone nothing.
func TestWhatOthersBook(t *testing.T) {
	r := lonely(t, 2)
	addresses := []string{addr(0), addr(1)}
	load := func(at uint32, requests int64) *statev1.Load { return &statev1.Load{Address: at, Requests: requests} }
	for i, step := range []struct {
		says             *statev1.Batch
		first, second    int64
		prefilled, local float64
		replicas         int
	}{
		{&statev1.Batch{Replica: 7, Loads: []*statev1.Load{load(0, 1), load(1, 10)}, PrefillRate: 500_000, LocalRate: 100_000}, 1, 10, .5, .1, 2},
		{&statev1.Batch{Replica: 8, Loads: []*statev1.Load{load(0, 2)}, PrefillRate: 250_000}, 3, 10, .75, .1, 3},
		{&statev1.Batch{Replica: 7, Loads: []*statev1.Load{load(0, 0)}, PrefillRate: 500_000, LocalRate: 200_000}, 2, 10, .75, .2, 3},
		{&statev1.Batch{Replica: 8, Loads: []*statev1.Load{load(0, 4)}, PrefillRate: 250_000}, 4, 10, .75, .2, 3},
		{&statev1.Batch{Replica: 7, Complete: true, PrefillRate: 500_000, LocalRate: 200_000}, 4, 0, .75, .2, 3}, // all that it has
		{&statev1.Batch{Replica: 8, Leaving: true}, 0, 0, .5, .2, 2},
	} {
		step.says.Addresses = addresses
		r.hears(step.says)
		require.Equal(t, []int64{step.first, step.second}, []int64{r.booked(0), r.booked(1)}, "step %d", i)
		var v kvstate.View
		r.state.View(r.pool, nil, &v)
		// of two endpoints that do both: prompts for others and their own keep them busy alike
		require.InDelta(t, step.prefilled+step.local, v.Load.Prefill*2, 1e-9, "step %d", i)
		require.InDelta(t, step.prefilled+step.local, v.Load.Local*2, 1e-9, "step %d", i)
		require.Equal(t, step.replicas, r.store.Replicas())
	}
}

// The oldest replica that is there writes snapshots, but for the one that asks.
func TestTheOldestLeads(t *testing.T) {
	r := lonely(t, 40)
	older, younger := uint64(7), r.store.replica+1
	require.True(t, r.p.leads(0))
	r.hears(&statev1.Batch{Replica: younger + 1})
	r.hears(&statev1.Batch{Replica: younger, Complete: true})
	require.True(t, r.p.leads(0))
	require.True(t, r.p.leads(younger))
	r.hears(&statev1.Batch{Replica: older, Complete: true})
	require.False(t, r.p.leads(0))
	require.False(t, r.p.leads(younger))
	require.True(t, r.p.leads(older))
	require.Equal(t, []uint64{older, r.store.replica, younger, younger + 1}, *r.p.ids.Load())
}

// With each heartbeat, and only then, what is over is forgotten, and the numbers of publishers' next batches are forwarded.
func TestWhatAHeartbeatDoes(t *testing.T) {
	r := lonely(t, 1)
	events := newEvents(t, r)
	record(r)
	r.hears(&statev1.Batch{Replica: 7})
	r.p.members[7].expires = time.Now().Add(-time.Second)
	r.p.published[addr(8)], r.p.published[addr(9)] = published{}, published{} // no endpoints any more
	r.state.Routed(r.pool, r.e(0), prompt(1, 2))
	require.NoError(t, r.flush(false))
	require.Equal(t, []int{2, 2, 0}, []int{r.store.Replicas(), len(r.p.published), events.positions})
	require.NoError(t, r.flush(true))
	require.Equal(t, []int{1, 0, 1}, []int{r.store.Replicas(), len(r.p.published), events.positions})
}

// Where another server takes over whose clock is behind, its numbers are lower than those read before: it goes on from there, and asks
// what it has missed.
func TestAnotherServersClockIsBehind(t *testing.T) {
	r := lonely(t, 1)
	x := record(r)
	r.hears(&statev1.Batch{Replica: 7})
	at := streamID{ms: 1 << 40, n: 1}
	for _, c := range []struct {
		behind uint64
		joined bool
		other  bool
	}{
		{0, true, false},
		{clockBehind, true, false}, // others' later entries may have been read before the reply was
		{clockBehind + 1, true, true},
		{clockBehind + 1, false, false}, // nothing has been read yet
	} {
		r.p.position, r.p.began, r.p.joined, r.p.sync = at, streamID{}, c.joined, snapshotRequest{}
		own := streamID{ms: at.ms - c.behind}
		x.reply = own.String()
		require.NoError(t, r.flush(true))
		if c.other {
			require.Equal(t, []streamID{own, own}, []streamID{r.p.position, r.p.began})
		} else {
			require.Equal(t, []streamID{at, {}}, []streamID{r.p.position, r.p.began})
		}
		require.Equal(t, []bool{c.other, c.other}, []bool{r.p.sync.wanted, r.p.out.join})
		r.p.out.join = false
	}
}
