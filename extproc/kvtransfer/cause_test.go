package kvtransfer

import (
	"os"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each cause is told in words: status and explain show them.
func TestCauses(t *testing.T) {
	text, err := os.ReadFile("cause.go")
	require.NoError(t, err)
	names := regexp.MustCompile(`(?m)^\tCause\w+ *= "(\w+)"`).FindAllSubmatch(text, -1)
	require.Len(t, names, len(Causes()))
	for _, n := range names {
		c, ok := CauseOf(string(n[1]))
		require.True(t, ok, "%s", n[1])
		require.NotEmpty(t, c.Words)
	}
}
