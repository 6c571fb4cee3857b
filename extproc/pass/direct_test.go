package pass

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/plan"
)

// When too many calls are in progress, D computes the prompt.
func TestDirectCallsAreBounded(t *testing.T) {
	x := Pass{shared: &Shared{direct: newDirect()}, policy: &Policy{}}
	for range maxDirectCalls {
		x.shared.direct.places <- struct{}{}
	}
	edits, err := prefillCall{&x, &plan.Decision{}}.prefill(t.Context())
	require.NoError(t, err)
	require.Nil(t, edits)
	require.Equal(t, "direct_calls_spent", x.Req.Attempt.Why)
}
