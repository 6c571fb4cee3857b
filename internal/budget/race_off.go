//go:build !race

package budget

// Race reports that the race detector is on: budgets and times mean nothing, and heavy work takes too long.
const Race = false
