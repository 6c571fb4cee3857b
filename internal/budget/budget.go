// Package budget checks memory budgets in tests. Only tests import it.
//
// The race detector allocates memory itself and makes sync.Pool drop a quarter of its items, so a budget means nothing
// under it. `make test` runs all tests with it, and then those whose names have "Alloc" again without.
package budget

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Allocs fails t if f allocates more than atMost times per run. It calls f once before, and takes the least of three
// averages over runs, because testing.AllocsPerRun counts the allocations of all goroutines, and a garbage collection
// empties pools. Under the race detector it runs f and checks nothing.
func Allocs(t testing.TB, runs int, atMost float64, f func(), msg ...any) {
	t.Helper()
	require.Contains(t, strings.ToLower(t.Name()), "alloc",
		"a test with an allocation budget has Alloc in its name, by which make test runs it again")
	if Race {
		f()
		return
	}
	least := testing.AllocsPerRun(runs, f)
	for range 2 {
		if least > atMost {
			least = min(least, testing.AllocsPerRun(runs, f))
		}
	}
	require.LessOrEqual(t, least, atMost, msg...)
}
