package e2e

import (
	"strconv"
	"testing"

	"tandem/e2e/loopback"
)

// ports takes n free addresses, for as long as the test runs.
func ports(t testing.TB, n int) []string {
	t.Helper()
	return loopback.Addresses(t, n)
}

// twoInARow takes two ports that follow each other, and gives the first.
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
