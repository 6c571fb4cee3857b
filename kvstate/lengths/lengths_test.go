package lengths

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// A mean needs some answers, follows the recent ones, and takes nothing that cannot be.
func TestMean(t *testing.T) {
	var m Mean
	m.Add(Needed-1, 100*(Needed-1))
	require.Zero(t, m.Value(), "too few")
	m.Add(1, 100)
	require.InDelta(t, 100, m.Value(), 1e-9)
	m.Add(0, 5000)
	m.Add(1, Longest+1)
	m.Add(1, -1)
	require.InDelta(t, 100, m.Value(), 1e-9, "what cannot be")
	for range 10_000 {
		m.Add(1, 300)
	}
	require.InEpsilon(t, 300, m.Value(), .001, "old ones fade")
	var empty Mean
	empty.Add(Needed, 0)
	require.InDelta(t, 1, empty.Value(), 1e-9, "no answer has less than a token")
}

// Each model has a mean of its own, and a flood of names that clients made up takes it from none that is in use.
func TestByModel(t *testing.T) {
	var b ByModel
	for i := range Needed {
		b.Add("short", 10)
		b.Add("long", 1000)
		b.Add("", 5)
		require.Equal(t, i == Needed-1, b.Mean("long") > 0)
	}
	require.Equal(t, []float64{10, 1000, 0, 0}, []float64{b.Mean("short"), b.Mean("long"), b.Mean(""), b.Mean("other")})
	for i := range 10 * maxModels {
		b.Add(fmt.Sprint("made up ", i), 77)
		if i%(maxModels/2) == 0 {
			b.Add("long", 1000)
		}
	}
	require.Len(t, b.models, maxModels)
	require.InDelta(t, 1000, b.Mean("long"), 1e-9)
	require.Zero(t, b.Mean("short"), "nobody used it")
}
