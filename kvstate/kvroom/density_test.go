package kvroom

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A prompt may have a token for each byte, until some have been counted; then as many as the densest of late, and more.
func TestDensity(t *testing.T) {
	var d Density
	require.InDelta(t, 1, d.Most(), 1e-9, "none was counted")
	d.Observe(100, 63)
	require.InDelta(t, 1, d.Most(), 1e-9, "the template is most of a short one")
	d.Observe(4000, 1000)
	require.InDelta(t, margin/4, d.Most(), 1e-9, "all are alike")
	d.Observe(1000, 600)
	d.Observe(4000, 1000)
	require.Greater(t, d.Most(), .7, "one was denser")
	for range 500 {
		d.Observe(4000, 1000)
	}
	require.InDelta(t, margin/4, d.Most(), .01, "and is long ago")
}
