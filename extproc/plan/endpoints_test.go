package plan

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// What P says about the request itself is the client's answer; all else is P's own trouble, its overload (408, 425, 429) included, and
// another P is asked.
func TestWhoseFault(t *testing.T) {
	for code := 300; code < 600; code++ {
		require.Equal(t, code/100 == 4 && !slices.Contains([]int{408, 425, 429}, code), ClientsFault(code), code)
	}
}
