package media_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/kvstate/media"
)

// TestTokens: an image is worth what engines have counted for its model, and the start value until then.
func TestTokens(t *testing.T) {
	var m media.Tokens
	one, two := media.Count{media.Image: 1}, media.Count{media.Image: 2}
	require.Zero(t, m.Estimate("a", media.Count{}))
	require.EqualValues(t, 1024, m.Estimate("a", one))
	require.EqualValues(t, 1024+750, m.Estimate("a", media.Count{media.Image: 1, media.Audio: 1}))

	m.Observe("a", media.Count{}, 1e6, 0)
	m.Observe("a", media.Count{media.Image: 1, media.Video: 1}, 1e6, 0)
	m.Observe("a", one, 10_000, 9_000) // mostly text
	m.Observe("a", one, 1<<40, 0)      // nonsense
	m.Observe("a", one, 100, 300)
	require.EqualValues(t, 1024, m.Estimate("a", one), "nothing can be learned of these")

	for range 30 {
		m.Observe("a", two, 3100, 100)
	}
	require.InDelta(t, 1500, m.Estimate("a", one), 20)
	require.InDelta(t, 3000, m.Estimate("a", two), 40)
	require.EqualValues(t, 1024, m.Estimate("b", one), "another model")
	require.EqualValues(t, 750, m.Estimate("a", media.Count{media.Audio: 1}), "another kind")
	for range 1000 {
		m.Observe("a", one, 356, 100)
	}
	require.InDelta(t, 256, m.Estimate("a", one), 30, "it follows")
}

// TestModels: models are bounded; the one that was longest without a prompt makes room.
func TestModels(t *testing.T) {
	var m media.Tokens
	one := media.Count{media.Image: 1}
	for i := range 1000 {
		for range 50 {
			m.Observe(fmt.Sprint(i), one, 100, 0)
			m.Observe("busy", one, 100, 0)
		}
	}
	require.EqualValues(t, 1024, m.Estimate("0", one), "forgotten")
	require.Less(t, m.Estimate("999", one), int64(300))
	require.Less(t, m.Estimate("busy", one), int64(300))
}
