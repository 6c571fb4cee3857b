package kvstate

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Hosts whose clocks differ have one time, whatever a better estimate corrects, and without Redis their own.
func TestFleetClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c FleetClock
		require.Equal(t, time.Now(), c.FleetNow())
		require.Zero(t, c.ClockAhead())

		redis := time.Now().Add(-700 * time.Second)
		c.SetFleetTime(time.Now(), redis, time.Second)
		require.True(t, redis.Equal(c.FleetNow()))
		require.Equal(t, 700*time.Second, c.ClockAhead())
		time.Sleep(3 * time.Second)
		require.True(t, redis.Add(3*time.Second).Equal(c.FleetNow()))

		c.SetFleetTime(time.Now(), redis.Add(3*time.Second+40*time.Millisecond), 50*time.Millisecond)
		require.True(t, redis.Add(3*time.Second).Equal(c.FleetNow()), "it may be right")
		c.SetFleetTime(time.Now(), redis.Add(-time.Minute), 50*time.Millisecond)
		require.True(t, redis.Add(-time.Minute).Equal(c.FleetNow()), "another server, whose clock is behind")
	})
}
