// Package budget holds tests to budgets of memory. Only tests import it.
//
// The race detector allocates by itself and makes sync.Pool forget a quarter of what it is given, so a budget means
// nothing under it. `make test` runs all tests with it, and then those whose names have "Alloc" again without.
package budget

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Allocs fails t unless f allocates at most atMost times a run: the least of three averages over runs of it, because
// testing.AllocsPerRun counts what any goroutine allocates, and a garbage collection empties pools. It calls f once
// before. Under the race detector f is run and nothing is held.
func Allocs(t testing.TB, runs int, atMost float64, f func(), msg ...any) {
	t.Helper()
	require.Contains(t, strings.ToLower(t.Name()), "alloc", "a test with an allocation budget has Alloc in its name, by which make test runs it again")
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
