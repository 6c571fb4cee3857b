package fleetclock

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Hosts whose clocks differ have one time, whatever a better estimate corrects, and without Redis their own.
func TestClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		require.Equal(t, time.Now(), c.Now())
		require.Zero(t, c.Ahead())

		redis := time.Now().Add(-700 * time.Second)
		c.Set(time.Now(), redis, time.Second)
		require.True(t, redis.Equal(c.Now()))
		require.Equal(t, 700*time.Second, c.Ahead())
		time.Sleep(3 * time.Second)
		require.True(t, redis.Add(3*time.Second).Equal(c.Now()))

		c.Set(time.Now(), redis.Add(3*time.Second+40*time.Millisecond), 50*time.Millisecond)
		require.True(t, redis.Add(3*time.Second).Equal(c.Now()), "it may be right: it does not jump with each estimate")
		c.Set(time.Now(), redis.Add(-time.Minute), 50*time.Millisecond)
		require.True(t, redis.Add(-time.Minute).Equal(c.Now()), "another server, whose clock is behind")
	})
}
