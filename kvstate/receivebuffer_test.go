package kvstate

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A buffer of 1,000 tokens: prompts get space in the order of their arrival, and none gets a part of its need.
func TestReserveRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{})
		s.SetPool(PoolSpec{Name: "p"}, pd(1, 1))
		d := s.Pool("p").Endpoints()[1]
		reserve := func(tokens int64) (ReservationID, time.Duration, bool) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			began := time.Now()
			id, ok := s.Bookings.ReserveBuffer(ctx, 0, d, Booking{For: RoleDecode, PromptTokens: tokens}, 1000, nil)
			return id, time.Since(began), ok
		}
		first, took, ok := reserve(600)
		require.True(t, ok)
		require.Zero(t, took)
		_, took, ok = reserve(1001)
		require.False(t, ok, "larger than the buffer")
		require.Zero(t, took)

		var mu sync.Mutex
		var order []int64
		for _, tokens := range []int64{700, 300} { // 300 would fit now, but waits behind 700
			go func() {
				id, _, ok := reserve(tokens)
				if !ok {
					t.Errorf("no room for %d tokens", tokens)
				}
				mu.Lock()
				order = append(order, tokens)
				mu.Unlock()
				time.Sleep(time.Second)
				s.Bookings.Release(id)
			}()
			synctest.Wait()
		}
		time.Sleep(2 * time.Second)
		require.Empty(t, order)
		require.True(t, s.Bookings.Release(first))
		synctest.Wait()
		require.ElementsMatch(t, []int64{700, 300}, order)
		time.Sleep(time.Second)

		all, _, ok := reserve(1000)
		require.True(t, ok)
		_, took, ok = reserve(1)
		require.False(t, ok, "nobody let go")
		require.Equal(t, 10*time.Second, took)
		require.True(t, s.Bookings.Release(all))
		last, took, ok := reserve(1000)
		require.True(t, ok, "who gave up left nothing behind")
		require.Zero(t, took)
		s.Bookings.sweepReservations(time.Now().Add(time.Hour)) // its holders are gone
		require.False(t, s.Bookings.Release(last))
		again, took, ok := reserve(1000)
		require.True(t, ok)
		require.Zero(t, took)
		s.Bookings.Release(again)
		require.Zero(t, s.Bookings.Reservations())
	})
}
