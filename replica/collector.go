package replica

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// How the garbage collector is tuned. In a small fleet little memory stays in use and much becomes garbage, so
// collecting seldom is cheap. An index of many engines and long prompts stays in use for hours: as a ratio of it,
// garbage would be gigabytes.
const (
	garbage    = 128 << 20 // bytes that may become garbage between two collections
	mostGOGC   = 400       // percent of what lives, where little lives
	leastGOGC  = 50        // and where much does: collecting more often costs more CPU than it spares memory
	gcInterval = time.Second
)

// TuneGC bounds the garbage of this process by bytes, where Go bounds it by a ratio of what lives (GOGC), until ctx
// ends. It is for the process as a whole: one call suffices. GOGC and GOMEMLIMIT still rule.
func TuneGC(ctx context.Context) {
	if os.Getenv("GOGC") != "" {
		return
	}
	now := mostGOGC
	debug.SetGCPercent(now)
	lives := []metrics.Sample{{Name: "/gc/heap/live:bytes"}} // as the last collection has found it
	tick := time.NewTicker(gcInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		metrics.Read(lives)
		// Setting it stops the world for some microseconds: small changes are left out.
		if next := gogc(lives[0].Value.Uint64()); next < now*7/8 || next > now*9/8 {
			now = next
			debug.SetGCPercent(now)
		}
	}
}

// gogc returns the percentage of live bytes after which to collect again.
func gogc(live uint64) int {
	return int(min(max(100*garbage/max(live, 1), leastGOGC), mostGOGC))
}
