package kvstate

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// If others know the reference, the last value counts, and its memory is counted once.
func TestPutHandOverAs(t *testing.T) {
	s := New(Options{})
	ref := [16]byte{1}
	require.NoError(t, s.HandOvers.PutHandOverAs(ref, []byte("first")))
	require.NoError(t, s.HandOvers.PutHandOverAs(ref, []byte("second one")))
	got, ok := s.HandOvers.TakeHandOver(ref)
	require.True(t, ok)
	require.Equal(t, "second one", string(got))
	_, ok = s.HandOvers.TakeHandOver(ref)
	require.False(t, ok)
	_, bytes := s.HandOvers.handOvers.Held()
	require.Zero(t, bytes)
}
