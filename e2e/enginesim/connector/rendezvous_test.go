package connector

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/e2e/enginesim/handover"
)

// A key is valid for one meeting; a D that comes after its P was cancelled met nobody.
func TestAKeyIsGoodForOneMeeting(t *testing.T) {
	v := newRendezvous()
	meet := func(key string) error { _, err := v.meet(key, &handover.Question{}); return err }
	enter := func(key string) error { _, err := v.enter(key); return err }

	require.NoError(t, enter("both"))
	require.NoError(t, meet("both"))
	require.ErrorContains(t, meet("both"), "in use by another decode")
	v.close("both")
	require.ErrorContains(t, meet("both"), "was used before")
	require.ErrorContains(t, enter("both"), "was used before")

	require.NoError(t, enter("cut"))
	v.close("cut")
	require.NoError(t, meet("cut"), "it waits for nobody")
	require.ErrorContains(t, enter("cut"), "was used before")
}
