package endpointpicker

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSubsetNamesEndpoints(t *testing.T) {
	for _, entry := range []string{"[fd00::1]:8000", "fd00::1", "[fd00::1]"} {
		require.True(t, named([]string{"10.0.0.1", entry}, "[fd00::1]:8000"), entry)
	}
	for _, entry := range []string{"[fd00::1]:8001", "fd00::2", "10.0.0.1:8000", ""} {
		require.False(t, named([]string{entry}, "[fd00::1]:8000"), entry)
	}
}
