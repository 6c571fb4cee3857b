package words

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMillis(t *testing.T) {
	for v, want := range map[float64]string{0: "-", 20: "20 ms", 59e3: "59.0 s", 1200e3: "20 min", 3 * 3600e3: "3.0 h", 6e9: "69 days"} {
		require.Equal(t, want, Millis(v))
	}
}

func TestPerSecond(t *testing.T) {
	for bytes, want := range map[float64]string{1.3e11: "130 GB/s", 2.5e9: "2.5 GB/s", 999.7e6: "1.0 GB/s", 512: "512 B/s", 9.96e3: "10 KB/s", 5e15: "5000 TB/s"} {
		require.Equal(t, want, PerSecond(bytes))
	}
}

// A rate that is not 0 is not shown as 0.
func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 1. / 60: "0.02", .096: "0.1", .25: "0.2", 3: "3", 12.4: "12", 25e3: "25k"} {
		require.Equal(t, want, Number(v))
	}
}

func TestPaint(t *testing.T) {
	require.Equal(t, "\x1b[1mTandem v1, ready\x1b[0m\n\x1b[31mPROBLEM  x\x1b[0m\n  p1  prefill  up\n"+
		"\x1b[31m  d1  decode  OUT  0\x1b[0m\n\x1b[31m  503  split\x1b[0m\n",
		Paint("Tandem v1, ready\nPROBLEM  x\n  p1  prefill  up\n  d1  decode  OUT  0\n  503  split\n"))
}

// All commands name a state alike.
func TestState(t *testing.T) {
	for want, c := range map[string]struct {
		state  string
		paused bool
	}{"OUT": {"out", false}, "OUT, paused": {"out", true}, "paused": {"stale", true}, "draining": {"draining", true}, "stale": {"stale", false}, "up": {"", false}} {
		require.Equal(t, want, State(c.state, c.paused))
	}
}
