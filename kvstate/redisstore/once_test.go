package redisstore

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/redisstore/redisclient"
)

// A ticket that nobody answers for waits as long as its request may, and soon not at all; then Redis is tried again.
func TestHowLongATicketWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := lonely(t, 1)
		r.store.link.Result(nil)
		n := uint64(0)
		waited := func(patient bool) time.Duration {
			n++
			began := time.Now()
			_, known := r.store.Consume(ticketOf(n), patient)
			require.False(t, known)
			return time.Since(began)
		}
		for range 2 {
			require.Equal(t, onPath, waited(false))
			require.Equal(t, commandTime, waited(true))
			require.Equal(t, onPath, waited(false)) // the third in a row
			require.Zero(t, waited(true))
			time.Sleep(redisclient.Pause - time.Millisecond)
			require.Zero(t, waited(false))
			time.Sleep(time.Millisecond)
		}
		require.EqualValues(t, n, r.store.Stats().SpendUnknown)
		require.Len(t, r.store.questions, 6, "only they have asked")

		require.Equal(t, onPath, waited(false))
		require.Equal(t, onPath, waited(false))
		r.store.link.Asked(nil) // one is answered
		require.Equal(t, onPath, waited(false))
		require.Equal(t, onPath, waited(false))
		for len(r.store.questions) < cap(r.store.questions) {
			r.store.questions <- question{}
		}
		require.Zero(t, waited(true), "more wait than can be answered in time")
	})
}

// Whatever requests ask Redis for, three failures in a row are enough; that there is no such thing is no failure.
func TestRequestsLeaveAFailingRedisAlone(t *testing.T) {
	for name, ask := range map[string]func(s *Store){
		"a ticket": func(s *Store) {
			q := question{ticketOf(1), make(chan spent, 1)}
			askRedis(context.Background(), s, append([]question(nil), q))
			<-q.answer
		},
		"a hand-over is put":   func(s *Store) { s.PutHandOver(ticketOf(1), []byte("x")) },
		"a hand-over is taken": func(s *Store) { s.TakeHandOver(ticketOf(2)) },
	} {
		synctest.Test(t, func(t *testing.T) {
			r := lonely(t, 1)
			x := record(r)
			ask(r.store)
			require.Zero(t, r.store.Stats().Errors, name)
			r.store.link.Result(nil)
			for range redisclient.Misses {
				ask(r.store)
			}
			require.True(t, r.store.link.MayAsk(), name)
			x.failing(errGone)
			for i := range redisclient.Misses {
				require.True(t, r.store.link.MayAsk(), name)
				ask(r.store)
				require.Equal(t, i+1, x.refused(), name)
			}
			require.False(t, r.store.link.MayAsk(), name)
		})
	}
}
