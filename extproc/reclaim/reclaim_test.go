package reclaim

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/extproc/ended"
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
	asked := ended.Try{Tries: 1, Began: true}
	for name, tt := range map[string]struct {
		stage   kvtransfer.Stage
		decided bool
		here    bool
		end     ended.Pass
		want    []string
	}{
		"the client left between the hops": {kvtransfer.HandOver, false, false, ended.Pass{ClientGone: true}, []string{ClientGone}},
		"no decode endpoint was asked":     {kvtransfer.HandOver, false, false, ended.Pass{}, []string{NoDecode}},
		"one may have been":                {kvtransfer.HandOver, false, false, ended.Pass{Try: asked}, nil},
		"decided here":                     {kvtransfer.DecodeLeg, true, true, ended.Pass{}, []string{NoDecode}},
		"decided here, and asked":          {kvtransfer.DecodeLeg, true, true, ended.Pass{Try: asked}, nil},
		"decided by another replica":       {kvtransfer.DecodeLeg, true, false, ended.Pass{}, nil},
		"read here, not decided here":      {kvtransfer.DecodeLeg, false, true, ended.Pass{}, nil},
		"P's answer was not followed":      {kvtransfer.PrefillLeg, false, false, ended.Pass{ClientGone: true}, []string{ClientGone}},
	} {
		r, o := newReclaimer(t)
		now := ticket(tt.stage)
		r.Record(now, "r1", []byte("{}"), "d1", tt.decided)
		r.Confirm(now.ID, "r1")
		r.Ended(now, &tt.end, tt.here)
		require.Equal(t, tt.want, o.orphaned, name)
		require.Len(t, r.queue, len(tt.want), name)
	}
}

// The access log may report the end before P's answer is recorded.
func TestEndedBeforeTheAnswer(t *testing.T) {
	r, o := newReclaimer(t)
	now := ticket(kvtransfer.PrefillLeg)
	r.Ended(now, &ended.Pass{ClientGone: true}, false)
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
