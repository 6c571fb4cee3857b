package redisstore

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/redisstore/roster"
	statev1 "tandem/protos/state/v1"
)

// A record comes with every complete batch, and at once when it changes. Leases that end leave it for an hour.
func TestRecords(t *testing.T) {
	r := lonely(t, 1)
	all := r.store.roster
	record := &statev1.Member{Name: "b:9090", Version: "2", Slot: 3, ExtProc: "10.0.0.2:9002", Replan: "10.0.0.2:9003"}
	r.hears(&statev1.Batch{Replica: 7, Member: record})
	r.hears(&statev1.Batch{Replica: 7})
	got := all.Others()[7]
	require.WithinDuration(t, time.Now(), got.Heard, time.Minute)
	got.Heard = time.Time{}
	require.Equal(t, roster.Member{Replica: 7, Name: "b:9090", Version: "2", Slot: 2, ExtProc: "10.0.0.2:9002", Replan: "10.0.0.2:9003"}, got)
	r.hears(&statev1.Batch{Replica: 7, Leaving: true})
	require.True(t, all.Others()[7].Ended)
	require.Equal(t, []uint64{r.store.replica}, r.store.Access().Living())

	r.hears(&statev1.Batch{Replica: 8})
	require.NotContains(t, all.Others(), uint64(8), "a release that keeps records of its own")
}

// A replica that died a moment before another one started is known to that one from the stream or a snapshot.
func TestRecordsOfTheDead(t *testing.T) {
	r := lonely(t, 1)
	b := &statev1.Batch{Replica: 7, LeaseMs: 1000, Member: &statev1.Member{Name: "b:9090", Version: "2"}}
	r.p.mu.Lock()
	require.Nil(t, r.p.observe(b, time.Minute))
	r.p.mu.Unlock()
	require.Empty(t, r.p.members)
	gone := r.store.roster.Gone([]uint64{r.store.replica})
	require.Len(t, gone, 1)
	late := lonely(t, 1).store.roster
	late.Load(gone)
	require.Equal(t, "b:9090", late.Others()[7].Name)
	require.WithinDuration(t, time.Now().Add(-time.Minute), late.Others()[7].Heard, 10*time.Second)
	require.Empty(t, r.store.roster.Gone([]uint64{7}))
}

// This replica's record is published in complete batches, and once more when it changed or Redis failed.
func TestOwnRecord(t *testing.T) {
	r := lonely(t, 1)
	x := record(r)
	all := r.store.roster
	has := func(complete bool) bool {
		t.Helper()
		r.p.mu.Lock()
		defer r.p.mu.Unlock()
		b, _ := r.p.batchOf(&changes{}, complete, time.Now())
		return b.GetMember() != nil
	}
	require.True(t, has(true))
	require.False(t, has(false))
	all.Edit(func(self *roster.Member) { self.Slot = 1 })
	require.NoError(t, r.flush(false))
	require.False(t, has(false))
	_, sent := all.Self()
	require.False(t, sent.IsZero())
	all.Edit(func(*roster.Member) {})
	_, still := all.Self()
	require.Equal(t, sent, still, "it is the same")
	all.Edit(func(self *roster.Member) { self.Slot = 2 })
	_, sent = all.Self()
	require.True(t, sent.IsZero())
	x.fails = errors.New("no Redis")
	require.Error(t, r.flush(false))
	require.True(t, has(false))
	_, sent = all.Self()
	require.True(t, sent.IsZero())
}
