package kvtransfer

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Each cause is told in words, which status and explain show, and docs/operations.md says what it means.
func TestCauses(t *testing.T) {
	text, err := os.ReadFile("cause.go")
	require.NoError(t, err)
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	_, list, found := strings.Cut(string(page), "- `cause` of a replan:\n")
	require.True(t, found)
	list, _, _ = strings.Cut(list, "\n- ")
	names := regexp.MustCompile(`(?m)^\tCause\w+ *= "(\w+)"`).FindAllSubmatch(text, -1)
	require.Len(t, names, len(Causes()))
	for _, n := range names {
		c, ok := CauseOf(string(n[1]))
		require.True(t, ok, "%s", n[1])
		require.NotEmpty(t, c.Words)
		require.Contains(t, list, "`"+c.Name+"`", "docs/operations.md, causes of a replan")
	}
}
