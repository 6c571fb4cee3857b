package e2e

import (
	"strconv"
	"testing"

	"tandem/e2e/loopback"
)

// ports takes n free addresses for the duration of the test.
func ports(t testing.TB, n int) []string {
	t.Helper()
	return loopback.Addresses(t, n)
}

// twoInARow takes two consecutive ports, and returns the first.
func twoInARow(free func() string) string {
	for first := portOf(free()); ; {
		next := portOf(free())
		n, _ := strconv.Atoi(first)
		if next == strconv.Itoa(n+1) {
			return first
		}
		first = next
	}
}
