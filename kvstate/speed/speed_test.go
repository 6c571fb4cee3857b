package speed_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/speed"
)

// TestBounds: one observation changes the ratio by little, whichever of the two times is far off: the time that was
// observed, because an engine stood still, or the modelled one, because an estimate was wrong.
func TestBounds(t *testing.T) {
	const usual = 500 * time.Millisecond
	learned := func() (s speed.Learned) {
		for i := range 50 {
			s.Add(usual, usual, 1, int64(i))
		}
		return s
	}
	for name, one := range map[string]struct{ observed, modelled time.Duration }{
		"a stall":           {time.Hour, usual},
		"a wrong estimate":  {usual, time.Hour},
		"a wrong, fast one": {time.Millisecond, time.Hour},
	} {
		s := learned()
		s.Add(one.observed, one.modelled, 1, 51)
		require.InDelta(t, 1, s.Ratio(1, 51), 0.15, name)
	}
	s := learned()
	for i := range 100 { // an engine that is ten times faster than modelled is known as that all the same
		s.Add(usual, 10*usual, 1, int64(60+i))
	}
	require.Less(t, s.Ratio(1, 160), 0.15)
}
