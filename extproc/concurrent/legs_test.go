package concurrent

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// What is remembered of pairs is bounded in time and number.
func TestPairsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ps := NewPairs()
		id := func(n int) [16]byte { return [16]byte{byte(n), byte(n >> 8), byte(n >> 16)} }
		for i := range maxIdlePairs + 1000 {
			ps.Report(id(i), Outcome{})
		}
		require.LessOrEqual(t, len(ps.live), maxIdlePairs)
		time.Sleep(idlePairTime + time.Second)
		held := ps.Enter(id(7))
		ps.Report(id(1<<20), Outcome{})
		require.Len(t, ps.live, 2)
		ps.Leave(id(7))
		require.NotNil(t, held)
		time.Sleep(idlePairTime + time.Second)
		ps.GiveUp(id(1 << 21))
		require.Len(t, ps.live, 1)
	})
}
