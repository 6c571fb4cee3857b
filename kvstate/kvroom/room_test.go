package kvroom

import (
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/internal/budget"
)

// A prompt holds memory of P from pass 1 on, until D is known to have fetched it, or the request is over.
func TestRoom(t *testing.T) {
	var p, d Room
	coming := d.Claim(1100, &p, 1000, 0)
	require.Equal(t, []int64{1024, 0, 0, 1152}, []int64{p.Held(), p.Need(false), d.Held(), d.Need(false)})
	require.Zero(t, d.Need(true))
	sent := d.Claim(1100, &p, 1000, 50) // pass 2 claims before it releases
	d.Release(coming)
	require.Equal(t, []int64{1024, 1152, 1152}, []int64{p.Held(), d.Need(false), d.Need(true)})
	require.True(t, d.Waiting(0, 100))
	require.Equal(t, []int64{0, 1152}, []int64{p.Held(), d.Need(false)}, "fetched, and answered still")
	d.Release(sent)
	require.Equal(t, []int64{0, 0, 0}, []int64{p.Held(), d.Need(false), d.Need(true)})
}

// Of the prompts that wait, all but the latest ones count as fetched, if they were sent before the last report but one.
func TestWaiting(t *testing.T) {
	var p, q, d Room
	alone := d.Claim(5000, nil, 0, 1)
	d.Claim(64, &p, 64, 30)
	d.Claim(64, &q, 640, 10)
	d.Claim(64, &p, 6400, 20)
	d.Claim(64, &p, 64000, 0) // in pass 1
	require.False(t, d.Waiting(3, 100), "as many wait")
	require.True(t, d.Waiting(2, 100))
	require.Equal(t, []int64{64 + 6400 + 64000, 0}, []int64{p.Held(), q.Held()}, "the first")
	require.False(t, d.Waiting(1, 20), "sent too late to be sure")
	require.True(t, d.Waiting(0, 25))
	require.Equal(t, int64(64+64000), p.Held())
	d.Release(alone)
	require.Equal(t, int64(64), d.Need(false))
}

// Whatever comes and goes, nothing is left, and the sums are those of the claims.
func TestSums(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	rooms := make([]Room, 3)
	type open struct {
		at   int
		slot int32
		need int64
		sent bool
	}
	var all []open
	for range 5000 {
		if len(all) > 0 && r.IntN(2) == 0 {
			i := r.IntN(len(all))
			rooms[all[i].at].Release(all[i].slot)
			all[i] = all[len(all)-1]
			all = all[:len(all)-1]
		} else {
			at, need, since := r.IntN(3), 64*r.Int64N(100), max(r.Int64N(200)-100, 0) // half of them come later
			all = append(all, open{at, rooms[at].Claim(need, &rooms[(at+1)%3], need, since), need, since > 0})
		}
		if r.IntN(10) == 0 {
			rooms[r.IntN(3)].Waiting(r.Int64N(20), r.Int64N(100))
		}
		most, sent, held := [3]int64{}, [3]int64{}, [3]int64{}
		for _, o := range all {
			if most[o.at] = max(most[o.at], o.need); o.sent {
				sent[o.at] = max(sent[o.at], o.need)
			}
			held[(o.at+1)%3] += o.need
		}
		for i := range rooms {
			require.Equal(t, []int64{most[i], sent[i]}, []int64{rooms[i].Need(false), rooms[i].Need(true)})
			require.LessOrEqual(t, rooms[i].Held(), held[i])
			require.GreaterOrEqual(t, rooms[i].Held(), int64(0))
		}
	}
	for _, o := range all {
		rooms[o.at].Release(o.slot)
	}
	for i := range rooms {
		require.Zero(t, rooms[i].Held()+rooms[i].Need(false)+rooms[i].Need(true))
	}
}

func TestClaimAlloc(t *testing.T) {
	var p, d Room
	for range 100 {
		d.Claim(64, &p, 64, 1)
	}
	budget.Allocs(t, 100, 0, func() { d.Release(d.Claim(64, &p, 64, 1)) })
}

// What nobody will fetch counts until its lease ends.
func TestStrand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p, d Room
		var freed atomic.Int64
		slot := d.Claim(1100, &p, 1000, 1)
		require.True(t, d.Unfetched(slot))
		p.Strand(1000, time.Minute, func() { freed.Add(1) })
		d.Release(slot)
		require.EqualValues(t, 1024, p.Held())
		for range 2 * maxStrays {
			p.Strand(1, 2*time.Minute, func() { freed.Add(1) })
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 64*(maxStrays-1), p.Held(), "their number is bounded")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Zero(t, p.Held())
		require.EqualValues(t, maxStrays, freed.Load())
		p.Strand(1000, time.Minute, func() {})
		p.Restarted()
		require.Zero(t, p.Held())
		p.Strand(100, time.Hour, func() {})
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		require.EqualValues(t, 128, p.Held(), "the lease of before ends nothing here")
	})
	var p, d Room
	slot := d.Claim(1100, &p, 1000, 1)
	require.True(t, d.Waiting(0, 2))
	require.False(t, d.Unfetched(slot))
}
