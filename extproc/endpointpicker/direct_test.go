package endpointpicker

import (
	"testing"

	"github.com/stretchr/testify/require"

	"tandem/extproc/faults"
	"tandem/extproc/plan"
	"tandem/picker"
)

// When too many calls are in progress, D computes the prompt.
func TestDirectCallsAreBounded(t *testing.T) {
	d := NewDirect(nil, &faults.Faults{})
	for range maxDirectCalls {
		d.places <- struct{}{}
	}
	call := Call{Request: &plan.Request{}}
	edits, err := d.Prefill(t.Context(), &call, picker.Choice{})
	require.NoError(t, err)
	require.Nil(t, edits)
	require.Equal(t, "direct_calls_spent", call.Request.Why)
}
