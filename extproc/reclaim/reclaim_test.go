package reclaim

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
	"tandem/kvstate"
)

// counts is an observer.
type counts struct{ orphaned, reclaimed []string }

func (c *counts) Orphaned(_, _, why string)  { c.orphaned = append(c.orphaned, why) }
func (c *counts) Reclaimed(_, result string) { c.reclaimed = append(c.reclaimed, result) }

func newReclaimer(t *testing.T) (*Reclaimer, *counts) {
	t.Helper()
	o := &counts{}
	return New(Options{
		State: kvstate.New(kvstate.Options{}), Log: slog.New(slog.DiscardHandler), Observer: o, TTL: time.Minute,
		Policy: func(string) Policy { return Policy{Cleanup: true, Dialect: kvtransfer.Named("nixl")} },
	}), o
}

func ticket(stage kvtransfer.Stage) *kvtransfer.Ticket {
	return &kvtransfer.Ticket{ID: [16]byte{1}, Pool: "chat", Prefill: "p1", Stage: stage, Expires: time.Now().Add(time.Minute)}
}

// TestEnded lists the ends of a request that orphan its hand-over, and those that do not: if a decode endpoint may
// have been reached, or another replica decides, the blocks stay.
func TestEnded(t *testing.T) {
	for name, tt := range map[string]struct {
		stage   kvtransfer.Stage
		decided bool
		end     End
		want    []string
	}{
		"the client left between the hops": {kvtransfer.HandOver, false, End{ClientGone: true}, []string{ClientGone}},
		"no decode endpoint was asked":     {kvtransfer.HandOver, false, End{}, []string{NoDecode}},
		"one may have been":                {kvtransfer.HandOver, false, End{Asked: true}, nil},
		"decided here":                     {kvtransfer.DecodeLeg, true, End{BookedHere: true}, []string{NoDecode}},
		"decided here, and asked":          {kvtransfer.DecodeLeg, true, End{BookedHere: true, Asked: true}, nil},
		"decided by another replica":       {kvtransfer.DecodeLeg, true, End{}, nil},
		"read here, not decided here":      {kvtransfer.DecodeLeg, false, End{BookedHere: true}, nil},
		"P's answer was not followed":      {kvtransfer.PrefillLeg, false, End{ClientGone: true}, []string{ClientGone}},
	} {
		r, o := newReclaimer(t)
		now := ticket(tt.stage)
		r.Record(now, "r1", []byte("{}"), "d1", tt.decided)
		r.Confirm(now.ID, "r1")
		r.Ended(now, &tt.end)
		require.Equal(t, tt.want, o.orphaned, name)
		require.Len(t, r.queue, len(tt.want), name)
	}
}

// The access log may report the end before P's answer is recorded.
func TestEndedBeforeTheAnswer(t *testing.T) {
	r, o := newReclaimer(t)
	now := ticket(kvtransfer.PrefillLeg)
	r.Ended(now, &End{ClientGone: true})
	require.Empty(t, o.orphaned)
	r.Record(now, "r1", []byte("{}"), "d1", false)
	require.Empty(t, o.orphaned, "another replica may have read the answer")
	r.Confirm(now.ID, "r1")
	require.Equal(t, []string{ClientGone}, o.orphaned)
	require.Len(t, r.queue, 1)
}

// The queue is bounded, in bytes too.
func TestQueueIsBounded(t *testing.T) {
	r, o := newReclaimer(t)
	r.queued.Store(maxRecordBytes)
	r.enqueue([16]byte{1}, "r1", &record{pool: "chat", params: []byte("{}")})
	require.Equal(t, []string{"too_many"}, o.reclaimed)
	require.EqualValues(t, maxRecordBytes, r.queued.Load())

	r.queued.Store(0)
	for range maxCleanups + 1 {
		r.enqueue([16]byte{1}, "r1", &record{pool: "chat", params: []byte("{}")})
	}
	require.Equal(t, []string{"too_many", "too_many"}, o.reclaimed)
	_, queued := r.Held()
	require.EqualValues(t, 2*maxCleanups, queued)

	r.enqueue([16]byte{1}, "r1", &record{pool: "chat"})
	require.Equal(t, "no_room", o.reclaimed[2])
}

// What an engine of both roles keeps of an orphaned hand-over counts as held until its lease ends, or until it was
// reclaimed. Engines that only prefill are left alone: what they hold costs time, and locks nobody.
func TestOrphanedKVIsHeld(t *testing.T) {
	for name, c := range map[string]struct {
		role    kvstate.Role
		cleanup bool
		orphan  func(*Reclaimer, *kvtransfer.Ticket)
		held    int64
	}{
		"P answers": {kvstate.RoleBoth, false, func(r *Reclaimer, t *kvtransfer.Ticket) {
			r.Unfetched(t, "r1", []byte("{}"))
		}, 4032},
		"P answers, and it is to be reclaimed": {kvstate.RoleBoth, true, func(r *Reclaimer, t *kvtransfer.Ticket) {
			r.Unfetched(t, "r1", []byte("{}"))
		}, 4032},
		"the client left": {kvstate.RoleBoth, false, func(r *Reclaimer, t *kvtransfer.Ticket) {
			r.Orphaned(t, "r1", ClientGone)
			r.Orphaned(t, "r1", ClientGone)
		}, 4032},
		"P only prefills": {kvstate.RolePrefill, false, func(r *Reclaimer, t *kvtransfer.Ticket) {
			r.Unfetched(t, "r1", []byte("{}"))
		}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, o := newReclaimer(t)
				dialect, err := kvtransfer.New(kvtransfer.Options{Name: "nixl", Lease: 40 * time.Second})
				require.NoError(t, err)
				r.Policy = func(string) Policy { return Policy{Cleanup: c.cleanup, Dialect: dialect} }
				go r.State.Run(t.Context())
				r.State.SetPool(kvstate.PoolSpec{Name: "chat"}, []kvstate.EndpointSpec{{Addr: "p1", Role: c.role}})
				e := r.State.Pool("chat").Endpoint("p1")
				now := ticket(kvtransfer.HandOver)
				now.PromptTokens = 4000
				c.orphan(r, now)
				require.Len(t, o.orphaned, 1)
				require.Equal(t, kvstate.Room{Held: c.held}, e.Booked(time.Now()).Room)
				require.Zero(t, e.Booked(time.Now()).Requests, "it is no request")
				time.Sleep(39 * time.Second)
				require.Equal(t, kvstate.Room{Held: c.held}, e.Booked(time.Now()).Room)
				time.Sleep(time.Minute)
				require.Zero(t, e.Booked(time.Now()).Room, "the lease has ended")
				if c.cleanup {
					require.NotZero(t, (<-r.queue).record.held)
				}
			})
		})
	}
}
