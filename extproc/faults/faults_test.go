package faults

import (
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"tandem/extproc/kvtransfer"
)

// Until Envoy's log reports how a try failed, either endpoint of the pair may be the cause. A connection that broke is
// decode's.
func TestFailuresThatNobodyHasReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s Faults
		try := &kvtransfer.Ticket{ID: [16]byte{1}}
		require.Equal(t, Failure{Unknown: true}, s.Failed(t.Context(), try), "Envoy does not log")
		defer s.Opened()()
		require.Equal(t, Failure{Unknown: true}, s.Failed(t.Context(), try), "the entry comes too late")
		s.tries.report([16]byte{2}, Failure{})
		require.Equal(t, Failure{}, s.Failed(t.Context(), &kvtransfer.Ticket{ID: [16]byte{2}}))
	})
}
