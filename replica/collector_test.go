package replica

import (
	"runtime/debug"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Garbage is bounded by bytes between the two ratios.
func TestGOGC(t *testing.T) {
	for _, row := range []struct {
		live uint64 // MiB
		want int
	}{{0, 400}, {8, 400}, {32, 400}, {64, 200}, {128, 100}, {256, 50}, {4096, 50}} {
		require.Equal(t, row.want, gogc(row.live<<20), "%d MiB live", row.live)
	}
}

// A process in which much lives collects earlier, and later again once it lives no more.
func TestTuneGC(t *testing.T) {
	t.Setenv("GOGC", "")
	was := debug.SetGCPercent(100)
	t.Cleanup(func() { debug.SetGCPercent(was) })
	percent := func() int {
		now := debug.SetGCPercent(100)
		debug.SetGCPercent(now)
		return now
	}
	go TuneGC(t.Context())
	require.Eventually(t, func() bool { return percent() > 100 }, 10*time.Second, 10*time.Millisecond)
	held := make([]byte, 400<<20)
	debug.FreeOSMemory() // collects
	require.Eventually(t, func() bool { return percent() == leastGOGC }, 10*time.Second, 100*time.Millisecond)
	held[0] = 1
	held = nil
	require.Nil(t, held)
	debug.FreeOSMemory()
	require.Eventually(t, func() bool { return percent() > 100 }, 10*time.Second, 100*time.Millisecond)
}
