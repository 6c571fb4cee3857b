//go:build race

package budget

// Race says that the race detector watches: budgets and times mean nothing, and much work takes too long.
const Race = true
