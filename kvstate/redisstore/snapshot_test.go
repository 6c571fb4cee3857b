package redisstore

import (
	"bytes"
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"tandem/kvstate"
	statev1 "tandem/protos/state/v1"
)

// A snapshot has all that is not said again: which blocks endpoints hold, where sessions are, and who has failed. It is read in as many
// parts as it has.
func TestWhatIsInASnapshot(t *testing.T) {
	r := startRedis(t)
	a, b := apart(t, redisURL(r), 3), apart(t, redisURL(r), 3)
	defer a.store.Close()
	defer b.store.Close()
	const prompts = 2*chunkBlocks/1000 + 1 // three parts, of which two are read at once
	for i := range prompts {
		a.state.ApplyRouted(a.pool, a.e(i%3), prompt(i, 1000))
	}
	a.state.Sessions.ApplyAffinity(a.pool, 71, a.e(0), a.e(2))
	a.state.Sessions.ApplyAffinity(a.pool, 72, nil, a.e(1))
	a.state.Sessions.ApplyAffinity(a.pool, 73, a.e(1), nil)
	a.state.Health.Mark(a.e(1), true, kvstate.CauseTimeLimit, "")
	ctx := context.Background()
	require.ErrorIs(t, a.p.snapshots.write(ctx, snapshotWish{}), errNotJoined, "it knows less than what is there")
	eventually(t, "it joins", func() bool { return a.p.joinOnce(ctx) == nil })
	eventually(t, "it is written", func() bool { return a.p.snapshots.write(ctx, snapshotWish{}) == nil })
	n, err := b.p.lastSnapshot(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 3, n.GetChunks())
	require.Equal(t, a.p.position.String(), n.GetPosition())
	eventually(t, "it is loaded", func() bool { return b.p.load(ctx, n) == nil })
	for i := range prompts {
		require.Equal(t, 1000, b.hit(i%3, prompt(i, 1000)))
	}
	for session, want := range map[uint64][]kvstate.Role{71: {kvstate.RolePrefill, 0, kvstate.RoleDecode}, 72: {0, kvstate.RoleDecode, 0}, 73: {0, kvstate.RolePrefill, 0}, 74: {0, 0, 0}} {
		var v kvstate.View
		b.state.View(b.pool, nil, &v)
		b.state.Sessions.MarkSession(b.pool, session, &v)
		require.Equal(t, want, []kvstate.Role{v.Endpoints[0].Session, v.Endpoints[1].Session, v.Endpoints[2].Session}, session)
	}
	require.Equal(t, []bool{false, true, false}, []bool{b.e(0).Failed(), b.e(1).Failed(), b.e(2).Failed()})
	require.True(t, kvstate.Hung(b.e(1)))
	require.True(t, b.p.published[addr(1)].failed && b.p.published[addr(1)].hung, "it need not be published again")

	// The parts of the one before the last are kept for those who are still reading them, those of the one before that are not.
	c := r.client()
	defer c.Close()
	left := func() int64 { return c.DBSize(ctx).Val() - 2 } // but for the stream and the notice
	for range 3 {
		eventually(t, "the next one is written", func() bool { return a.p.snapshots.write(ctx, snapshotWish{everyone: true}) == nil })
		require.EqualValues(t, 6, left())
	}
	last, err := b.p.lastSnapshot(ctx)
	require.NoError(t, err)
	require.True(t, last.GetEveryone())
	r.do("DEL", a.p.keys.chunk(last.GetId(), 2))
	require.ErrorContains(t, b.p.load(ctx, last), "a part of it is gone")
}

// Snapshots are written when they are wanted, one a while, and by the oldest replica each minute. One that is for everyone is tried until
// it is written: nobody knows to ask for it again.
func TestWhenSnapshotsAreWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		x := record(r)
		r.p.joined = true
		stop := during(t.Context(), func(ctx context.Context) { r.store.writeSnapshots(ctx, r.p) })
		written := func() int { synctest.Wait(); return int(r.store.Stats().Snapshots) }
		refused := func() int { synctest.Wait(); return x.refused() }
		everyone := func() bool {
			r.p.out.mu.Lock()
			defer r.p.out.mu.Unlock()
			return r.p.out.notice.GetEveryone()
		}

		r.p.snapshots.want(snapshotWish{})
		require.Equal(t, 1, written())
		require.False(t, everyone())
		r.p.snapshots.want(snapshotWish{})
		r.p.snapshots.want(snapshotWish{everyone: true}) // one does for both
		r.p.snapshots.want(snapshotWish{})
		require.Equal(t, 1, written(), "not so soon")
		time.Sleep(snapshotAtMost)
		require.Equal(t, 2, written())
		require.True(t, everyone())
		time.Sleep(snapshotAtMost)
		require.Equal(t, 2, written())

		x.failing(errGone)
		r.p.snapshots.want(snapshotWish{})
		time.Sleep(4 * snapshotAtMost)
		require.Equal(t, 1, refused(), "who asked for it asks again")
		r.p.snapshots.want(snapshotWish{everyone: true})
		time.Sleep(4*snapshotAtMost - time.Millisecond)
		require.Equal(t, 1+4, refused())
		x.failing(nil)
		time.Sleep(snapshotAtMost)
		require.Equal(t, 3, written())
		require.True(t, everyone())

		for _, c := range []struct {
			up, leads bool
			written   int
		}{{true, true, 1}, {false, true, 0}, {true, false, 0}, {true, true, 1}} {
			before := written()
			ids := []uint64{r.store.replica}
			if !c.leads {
				ids = []uint64{1, r.store.replica}
			}
			r.p.ids.Store(&ids)
			r.store.link.Result(map[bool]error{false: errGone}[c.up])
			time.Sleep(snapshotEvery)
			require.Equal(t, c.written, written()-before, c)
		}
		before := written()
		stop()
		require.Equal(t, before+1, written(), "for who comes next")
	})
}

// Right after Redis came back its client may still return an error of the outage. The snapshot is written again, and
// nobody is warned.
func TestSnapshotRightAfterAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		x := record(r)
		var text bytes.Buffer
		r.p.joined, r.store.log = true, slog.New(slog.NewTextHandler(&text, nil))
		r.store.link.Result(errGone)
		r.store.link.Result(nil)
		x.failing(errGone)
		require.False(t, r.p.snapshots.tryWrite(t.Context(), snapshotWish{}))
		require.Empty(t, text.String())
		time.Sleep(settled)
		require.False(t, r.p.snapshots.tryWrite(t.Context(), snapshotWish{}))
		require.Contains(t, text.String(), "a snapshot was not written")
	})
}

// A snapshot is for who asked before it was made, or for everyone. What cannot be loaded is asked for again, a lease later.
func TestWhoseSnapshotItIs(t *testing.T) {
	said := streamID{ms: 5, n: 1}
	for name, c := range map[string]struct {
		asked        snapshotRequest
		position     string
		everyone     bool
		taken, wants bool
	}{
		"asked for":              {snapshotRequest{wanted: true, position: said}, "5-1", false, true, false},
		"made before":            {snapshotRequest{wanted: true, position: said}, "5-0", false, false, true},
		"made before, for all":   {snapshotRequest{wanted: true, position: said}, "5-0", true, true, true},
		"hello is not out yet":   {snapshotRequest{wanted: true}, "5-1", false, false, true},
		"not asked for":          {snapshotRequest{position: said}, "5-1", false, false, false},
		"not asked for, for all": {snapshotRequest{position: said}, "5-1", true, true, false},
		"made nobody knows when": {snapshotRequest{wanted: true, position: said}, "x", false, false, true},
	} {
		r := lonely(t, 1)
		x := record(r)
		r.p.sync = c.asked
		r.p.announced(&statev1.SnapshotNotice{Id: 3, Chunks: 1, Position: c.position, Everyone: c.everyone})
		require.Equal(t, []bool{c.taken, c.wants}, []bool{r.p.notice != nil, r.p.sync.wanted}, name)
		if !c.taken {
			continue
		}
		x.failing(errGone)
		r.p.loadAnnounced(t.Context())
		require.Nil(t, r.p.notice, name)
		require.True(t, r.p.sync.wanted, name)
		r.p.members[7] = &remoteReplica{}
		r.p.askDue(time.Now())
		require.False(t, r.p.out.join, name)
		r.p.askDue(time.Now().Add(r.store.o.Lease))
		require.True(t, r.p.out.join, name)
	}
}

// A snapshot is written before the stream cuts what none has, but not all the time.
func TestSnapshotBeforeTheStreamIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		n := uint64(0)
		receives := func(entries int) (wanted bool) {
			for range entries {
				n++
				r.p.takeIn(message(streamID{ms: n}.String(), ""))
			}
			select {
			case <-r.p.snapshots.due:
				return true
			default:
				return false
			}
		}
		require.False(t, receives(streamLength/2-1))
		require.True(t, receives(1))
		require.False(t, receives(1), "it was asked for")
		time.Sleep(snapshotSoonest)
		require.True(t, receives(1), "none was written")
		text, err := proto.Marshal(&statev1.Batch{Replica: 7, LeaseMs: 1, Snapshot: &statev1.SnapshotNotice{Position: "1-0"}})
		require.NoError(t, err)
		n++
		r.p.takeIn(message(streamID{ms: n}.String(), string(text)))
		time.Sleep(snapshotSoonest)
		require.False(t, receives(streamLength/2-1), "another replica wrote one")
		require.True(t, receives(1))
		r.p.ids.Store(&[]uint64{1, r.store.replica})
		time.Sleep(snapshotSoonest)
		require.False(t, receives(1), "the oldest writes them")
	})
}
