package faults

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// One request's errors are its own, however many they are; those of several in a row are the endpoint's.
func TestRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r repeated
		for range 10 {
			require.False(t, r.again("d1", "poison"))
		}
		require.False(t, r.again("d1", "a"))
		r.clear("d1")
		require.False(t, r.again("d1", "b"), "it has served another between")
		require.False(t, r.again("d1", "c"))
		require.False(t, r.again("d2", "d"), "another endpoint")
		time.Sleep(rowTime + time.Second)
		require.False(t, r.again("d1", "d"), "long ago")
		require.False(t, r.again("d1", "e"))
		require.True(t, r.again("d1", "f"))
		require.False(t, r.again("d1", "g"), "a new row")
		for i := range 2 * maxCounted {
			r.again(strconv.Itoa(i), "x")
		}
		require.LessOrEqual(t, len(r.counts), maxCounted)
	})
}
